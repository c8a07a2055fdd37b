"""The live page of a real run: its driver, `ensemble dashboard` and Chromium, each a process of its own."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from dashboard_process import Server, serve
from event_dicts import fold, read_events
from leftovers import wait_until as wait_for
from page_steps import HANG_S, show, wait_until

import ensemble
from ensemble.events import to_dict
from ensemble.store import RunDir, RunState
from ensemble.store.log_lines import read_events_from

pytestmark = pytest.mark.browser

HERE = Path(__file__).parent
MEMBERS = ("member-0", "member-1", "member-2", "member-3")
SAID, CONFIRM = ".toasts .toast", "dialog button[type=submit]"


class Driver:
    """The process that drives the run, and what its log says."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.output = run_dir.parent / f"{run_dir.name}.txt"
        self.start()

    def start(self) -> None:
        self._events, self._offset = list[dict[str, Any]](), 0
        with self.output.open("ab") as output:
            self.process = subprocess.Popen(
                [sys.executable, str(HERE / "live_driver.py"), str(self.run_dir)],
                env={**os.environ, "PYTHONPATH": str(HERE.parents[2])},
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def read(self) -> list[dict[str, Any]]:
        """All events; those that were read before are not read again."""
        found, self._offset = read_events_from(self.run_dir / "events.jsonl", self._offset)
        self._events += map(to_dict, found)
        return self._events

    def fold(self) -> RunState:
        return fold(self.read())

    def wait_for_epochs(self, many: int = 1) -> None:
        """Waits until each member has ended so many epochs since now."""
        wait_for(lambda: self.has_started(), "the run begins")
        before = len(self.read())

        def is_so() -> bool:
            assert self.process.poll() is None, self.output.read_text()[-3000:]
            ended = [e["member"] for e in self.read()[before:] if e["type"] == "epoch"]
            return all(ended.count(member) >= many for member in MEMBERS)

        wait_for(is_so, "all members train")

    def has_started(self) -> bool:
        assert self.process.poll() is None, self.output.read_text()[-3000:]
        return (self.run_dir / "events.jsonl").exists()

    def find_answer(self, verb: str) -> dict[str, Any] | None:
        """What the run has answered to the last request of this kind."""
        return next((e for e in reversed(self.read()) if e["type"] == "request" and e["verb"] == verb), None)

    def stop(self) -> None:
        """Ends the run as Ctrl-C twice does."""
        for _ in range(2):
            if self.process.poll() is None:
                self.process.send_signal(signal.SIGINT)
                try:
                    self.process.wait(HANG_S)
                except subprocess.TimeoutExpired:
                    continue
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()


@pytest.fixture
def on_local(tmp_path: Path) -> Iterator[Driver]:
    """A run in which all four members train."""
    driver = Driver(tmp_path / "run")
    try:
        driver.wait_for_epochs()
        yield driver
    finally:
        driver.stop()


@pytest.fixture
def page(own_tab: Any) -> Iterator[Any]:
    """A tab; an error on its console, or a request to anywhere but the server, fails the test."""
    wrong: list[str] = []
    own_tab.on("console", lambda message: wrong.append(message.text) if message.type == "error" else None)
    own_tab.on("request", lambda request: wrong.append(request.url) if "//127.0.0.1:" not in request.url else None)
    yield own_tab
    assert wrong == []


def enter(tab: Any, server: Server) -> None:
    name, _, value = server.cookie.partition("=")
    tab.context.add_cookies([{"name": name, "value": value, "url": server.page}])
    tab.goto(server.page)
    tab.wait_for_selector("[data-view=overview]:not([data-drawn='0'])")


def count(tab: Any, selector: str) -> int:
    """How many members, or nodes, the marks are of."""
    named = "each => each.map(e => e.dataset.member ?? e.dataset.node)"
    return len(set(tab.eval_on_selector_all(selector, named)))


# -- the page of a run, in all its views -------------------------------------------------------------------------


def is_overview(tab: Any, text: str, state: RunState) -> bool:
    named = f"{state.executor} executor" in tab.inner_text(".lead") and tab.inner_text("h1") == state.name
    return named and "member-" in tab.inner_text(".tiles") and tab.locator("[data-mark=tile]").count() >= 8


def is_table_of_members(tab: Any, text: str, state: RunState) -> bool:
    lines = {name: tab.inner_text(f"tr[data-member={name}]") for name in state.members}
    params = {name: f"{member.identity['params']['lr']:g}" for name, member in state.members.items()}
    has_all = all(state.members[name].state in line and params[name] in line for name, line in lines.items())
    return has_all and count(tab, "tbody tr[data-member]") == len(state.members)


def is_curves(tab: Any, text: str, state: RunState) -> bool:
    return count(tab, "[data-metric] g[data-member]") == len(state.members) and str(state.objective) in text


def is_timeline(tab: Any, text: str, state: RunState) -> bool:
    attempts = sum(len(member.spans) for member in state.members.values())
    return tab.locator("[data-mark=attempt]").count() == attempts and count(tab, "[data-node]") == len(state.nodes)


def is_placement(tab: Any, text: str, state: RunState) -> bool:
    nodes = tab.eval_on_selector_all("[data-node]", "each => each.map(e => e.dataset.node)")
    known = {name for name, node in state.nodes.items() if node.info}
    return set(nodes) == known and count(tab, "[data-mark=piece][data-member]") > 0


def is_pipeline(tab: Any, text: str, state: RunState) -> bool:
    if not state.feeders:
        return "every member prepares its own samples" in text
    is_drawn = tab.locator("[data-cohort]").count() == 1
    return is_drawn and all(word in text for word in ("Source", "prepared", "consumed"))


def is_cost(tab: Any, text: str, state: RunState) -> bool:
    """Joules that were estimated are called so; nobody may take them for measured ones."""
    origins = {node.info.power["origin"] for node in state.nodes.values() if node.info}
    return all(name in text for name in ("train", *state.members)) and origins <= set(re.findall(r"\w+", text))


def is_page_of_a_member(tab: Any, text: str, state: RunState) -> bool:
    params = state.members["member-1"].identity["params"]
    drawn = tab.locator("[data-mark=attempt]").count() == 1 and tab.locator("[data-mark=param]").count() == len(
        params
    )
    return drawn and "member-1" in text and f"{params['lr']:g}" in text


VIEWS: dict[str, Callable[[Any, str, RunState], bool]] = {
    "overview": is_overview,
    "members": is_table_of_members,
    "curves": is_curves,
    "timeline": is_timeline,
    "placement": is_placement,
    "pipeline": is_pipeline,
    "search": lambda tab, text, state: "lr" in text,
    "ensemble": lambda tab, text, state: ("Calibration" if state.combined else "saved") in text,
    "cost": is_cost,
    "details": lambda tab, text, state: "member-1" in text,
    "notices": lambda tab, text, state: bool(text),
    "member?member=member-1": is_page_of_a_member,
}


def check_views(tab: Any, read: Callable[[], RunState]) -> None:
    """Every view shows what the log says; some fetch a document first."""
    for view, is_right in VIEWS.items():
        name = view.partition("?")[0]
        show(tab, view)
        print(view)  # the last one is the one that is not right
        wait_until(tab, lambda: is_right(tab, tab.inner_text(f"[data-view={name}]"), read()))  # noqa: B023


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """A run of two members, in this process: before there is a browser, which has its own loop here."""
    from execute_members import an_ensemble

    run = RunDir(tmp_path_factory.mktemp("finished") / "run")
    ensemble.submit(an_ensemble([{"lr": 0.3}, {"lr": 0.1}]), run.path, executor="inline").wait()
    return run


def test_the_page_of_a_real_run_follows_its_log_and_draws_every_view(finished_run: RunDir, page: Any) -> None:
    run = finished_run
    log = run.events.read_bytes()
    until = log.index(b'"epoch"')  # within the first line that tells of an epoch
    run.events.write_bytes(log[:until])
    with serve(run.path) as server:
        enter(page, server)
        assert "0 of 2" in page.inner_text(".tiles")
        with run.events.open("ab") as file:
            file.write(log[until:])
        page.wait_for_selector("header .pill >> text=finished")
        check_views(page, lambda: fold(read_events(run.events)))
        assert "2 of 2" in show(page, "overview")


@pytest.mark.more
def test_what_is_asked_from_the_page_is_done_and_said(page: Any, on_local: Driver) -> None:
    """Every view shows it. Pause, resume, clone, cancel, stop: the log has the answer, and the page says it."""
    with serve(on_local.run_dir) as server:
        enter(page, server)
        assert all(text in page.inner_text("#app") for text in ("4 running", "Stop the run …"))
        check_views(page, on_local.fold)

        def wait_for_answer(verb: str, said: str) -> None:
            wait_until(page, lambda: on_local.find_answer(verb) is not None)
            answer = on_local.find_answer(verb)
            assert answer is not None and answer["done"], answer
            wait_until(page, lambda: any(said in each for each in page.locator(SAID).all_inner_texts()))

        show(page, "member?member=member-1")
        page.click("text=Pause")
        wait_for_answer("pause", "pause member-1: ")
        page.wait_for_selector(".member-head .pill >> text=paused")
        page.click("button >> text=Resume")
        wait_for_answer("resume", "resume member-1: ")
        page.wait_for_selector(".member-head .pill >> text=running")

        page.click("text=Clone with changes …")
        page.fill("dialog input[name=lr]", "0.01")
        page.check("dialog input[value=warm]")
        page.click(CONFIRM)
        wait_for_answer("add", "a clone of member-1: ")
        show(page, "members")
        page.wait_for_selector("tr[data-member=member-4] >> text=running")
        identity = on_local.fold().members["member-4"].identity
        assert identity["params"]["lr"] == 0.01 and identity["lineage"]["from"] == "member-1"
        assert "clone of member-1" in show(page, "member?member=member-4")

        show(page, "member?member=member-3")
        page.click("text=Cancel …")
        page.click(CONFIRM)
        wait_for_answer("cancel", "cancel member-3: ")
        page.wait_for_selector(".member-head .pill >> text=cancelled")

        show(page, "overview")
        page.click("text=Stop the run …")
        page.click(CONFIRM)
        wait_for_answer("stop", "stop: ")
        page.wait_for_selector("header .pill >> text=stopped")
        assert page.locator("text=Stop the run …").count() == 0
        assert on_local.process.wait(HANG_S) is not None
        assert page.text_content(".connection") == "run ended"


@pytest.mark.slow
def test_a_lost_controller_is_said_and_the_resumed_run_goes_on(page: Any, on_local: Driver) -> None:
    with serve(on_local.run_dir) as server:
        enter(page, server)
        on_local.process.send_signal(signal.SIGKILL)
        on_local.process.wait()
        page.wait_for_selector("header .pill >> text=interrupted")
        text = page.inner_text("[data-view=overview]")
        assert f"process {on_local.process.pid}" in text and f"ensemble resume {on_local.run_dir}" in text
        assert page.locator("text=Stop the run …").count() == 0
        on_local.start()
        page.wait_for_selector("header .pill >> text=running")
        on_local.wait_for_epochs()
        page.wait_for_selector("text=Stop the run …")
        assert "is gone" not in page.inner_text("[data-view=overview]")
        show(page, "timeline")
        assert page.locator("[data-mark=attempt]").count() == 2 * len(MEMBERS)


@pytest.mark.slow
def test_a_lost_server_is_said_and_what_to_do(own_tab: Any, on_local: Driver) -> None:
    tab = own_tab
    with serve(on_local.run_dir) as server:
        enter(tab, server)
        server.close(signal.SIGKILL)
        tab.wait_for_selector(".connection >> text=connection lost")
        tab.wait_for_selector(".trouble >> text=ensemble dashboard")
        assert "does not answer" in tab.inner_text(".trouble")
        with serve(on_local.run_dir, "--port", str(server.port)) as again:
            tab.wait_for_selector(".trouble >> text=key is not valid any more")
            enter(tab, again)
            tab.wait_for_selector(".connection:text-is('live')")
            assert not tab.is_visible(".trouble")
