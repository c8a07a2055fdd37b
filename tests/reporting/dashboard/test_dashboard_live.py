"""The live page of a real run: its driver, `ensemble dashboard` and Chromium, each a process of its own."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import wait_until
from dashboard_process import Server, serve
from leftovers import wait_until as wait_for

from ensemble.store import RunState, fold
from ensemble.store.log_lines import read_events_from

pytestmark = pytest.mark.browser

HERE = Path(__file__).parent
MEMBERS = ("member-0", "member-1", "member-2", "member-3")
SAID, CONFIRM = ".toasts .toast", "dialog button[type=submit]"


class Driver:
    """The process that drives the run, and what its log says."""

    def __init__(self, run_dir: Path, executor: str) -> None:
        self.run_dir, self.executor = run_dir, executor
        self.output = run_dir.parent / f"{run_dir.name}.txt"
        self.start()

    def start(self) -> None:
        self._events, self._offset = list[dict[str, Any]](), 0
        with self.output.open("ab") as output:
            self.process = subprocess.Popen(
                [sys.executable, str(HERE / "live_driver.py"), str(self.run_dir), self.executor],
                env={**os.environ, "PYTHONPATH": str(HERE.parents[2])},
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def read(self) -> list[dict[str, Any]]:
        """All events; those that were read before are not read again."""
        found, self._offset = read_events_from(self.run_dir / "events.jsonl", self._offset)
        self._events += found
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
        return next((e for e in reversed(self.read()) if e["type"] == "asked" and e["verb"] == verb), None)

    def stop(self) -> None:
        """Ends the run as Ctrl-C twice does."""
        for _ in range(2):
            if self.process.poll() is None:
                self.process.send_signal(signal.SIGINT)
                try:
                    self.process.wait(30)
                except subprocess.TimeoutExpired:
                    continue
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()


@contextlib.contextmanager
def driven(run_dir: Path, executor: str) -> Iterator[Driver]:
    """A run in which all four members train."""
    driver = Driver(run_dir, executor)
    try:
        driver.wait_for_epochs()
        yield driver
    finally:
        driver.stop()


@pytest.fixture(scope="module")
def on_ray(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Driver]:
    with driven(tmp_path_factory.mktemp("live") / "run", "ray") as driver:
        yield driver


@pytest.fixture
def on_local(tmp_path: Path) -> Iterator[Driver]:
    with driven(tmp_path / "run", "local") as driver:
        yield driver


@pytest.fixture
def page(tab: Any) -> Iterator[Any]:
    """The tab; an error on its console, or a request to anywhere but the server, fails the test."""
    wrong: list[str] = []
    tab.on("console", lambda message: wrong.append(message.text) if message.type == "error" else None)
    tab.on("request", lambda request: wrong.append(request.url) if "//127.0.0.1:" not in request.url else None)
    tab.wrong = wrong
    yield tab
    assert wrong == []


def enter(tab: Any, server: Server) -> None:
    name, _, value = server.cookie.partition("=")
    tab.context.add_cookies([{"name": name, "value": value, "url": server.page}])
    tab.goto(server.page)
    tab.wait_for_selector("[data-view=overview]:not([data-drawn='0'])")


def show(tab: Any, view: str) -> str:
    """Opens a view; returns its text when it has been drawn twice: also after something changed."""
    tab.evaluate(f"location.hash = '#{view}'")
    name = view.partition("?")[0]
    drawn = f"Number(document.querySelector('[data-view={name}]')?.dataset.drawn ?? 0)"
    wait_until(tab, lambda: tab.evaluate(drawn) >= 3)
    return str(tab.inner_text(f"[data-view={name}]"))


def count(tab: Any, selector: str) -> int:
    """How many members, or nodes, the marks are of."""
    named = "each => each.map(e => e.dataset.member ?? e.dataset.node)"
    return len(set(tab.eval_on_selector_all(selector, named)))


# -- what each view says of a run on Ray -------------------------------------------------------------------------


def check_overview(tab: Any, text: str, state: RunState) -> None:
    assert "4 running" in text and "Stop the run …" in text and "0 of 4" in text
    assert "member-" in tab.inner_text(".tiles") and tab.locator("[data-mark=tile]").count() >= 8
    assert "ray executor" in tab.inner_text(".lead") and tab.inner_text("h1") == "watched"


def check_members(tab: Any, text: str, state: RunState) -> None:
    assert count(tab, "tbody tr[data-member]") == len(MEMBERS)
    for member in MEMBERS:
        line = tab.inner_text(f"tr[data-member={member}]")
        assert "running" in line and f"{state.members[member].identity['params']['lr']:g}" in line


def check_curves(tab: Any, text: str, state: RunState) -> None:
    assert count(tab, "[data-metric] g[data-member]") == len(MEMBERS)
    assert state.objective is not None and state.objective in text


def check_timeline(tab: Any, text: str, state: RunState) -> None:
    assert tab.locator("[data-mark=attempt]").count() == sum(len(m.spans) for m in state.members.values()) == 4
    assert count(tab, "[data-node]") == 1 and tab.locator("[data-mark=now]").count() == 1
    assert tab.locator("[data-mark=attempt][data-outcome=running]").count() == 4


def check_placement(tab: Any, text: str, state: RunState) -> None:
    nodes = tab.eval_on_selector_all("[data-node]", "each => each.map(e => e.dataset.node)")
    assert set(nodes) == {name for name, node in state.nodes.items() if node.info}
    assert count(tab, "[data-mark=piece][data-member]") == len(MEMBERS)


def check_pipeline(tab: Any, text: str, state: RunState) -> None:
    wait_until(tab, lambda: tab.locator("[data-cohort]").count() == 1, 60)
    text = tab.inner_text("[data-view=pipeline]")
    assert "Source" in text and "prepared" in text and "consumed" in text
    assert count(tab, "[data-mark=reader]") == len(MEMBERS)


def check_search(tab: Any, text: str, state: RunState) -> None:
    assert "lr" in text


def check_cost(tab: Any, text: str, state: RunState) -> None:
    wait_until(tab, lambda: "member-3" in tab.inner_text("[data-view=cost]"), 60)
    assert "train" in tab.inner_text("[data-view=cost]")


def check_member(tab: Any, text: str, state: RunState) -> None:
    assert "member-2" in text and "0.2" in text and "Pause" in text
    assert tab.locator("[data-mark=attempt]").count() == 1 and tab.locator("[data-mark=param]").count() == 3


VIEWS: dict[str, Callable[[Any, str, RunState], None]] = {
    "overview": check_overview,
    "members": check_members,
    "curves": check_curves,
    "timeline": check_timeline,
    "placement": check_placement,
    "pipeline": check_pipeline,
    "search": check_search,
    "cost": check_cost,
    "member?member=member-2": check_member,
}


@pytest.mark.ray
def test_each_view_shows_the_ensemble_that_trains_on_ray(page: Any, on_ray: Driver) -> None:
    with serve(on_ray.run_dir) as server:
        enter(page, server)
        for view, check in VIEWS.items():
            text = show(page, view)
            check(page, text, on_ray.fold())
            if where := os.environ.get("SCREENSHOTS"):
                take_screenshots(page, Path(where), view.partition("?")[0])
        for view in ("ensemble", "notices"):
            assert show(page, view)


def take_screenshots(tab: Any, folder: Path, name: str) -> None:
    """Pictures of the shown view, to be looked at: light, dark, on a narrow screen."""
    folder.mkdir(exist_ok=True)
    for kind, width, scheme in (("light", 1280, "light"), ("dark", 1280, "dark"), ("narrow", 400, "light")):
        tab.emulate_media(color_scheme=scheme)
        tab.set_viewport_size({"width": width, "height": 900})
        tab.wait_for_timeout(600)
        tab.screenshot(path=folder / f"{name}-{kind}.png", full_page=True)
    tab.emulate_media(color_scheme="light")
    tab.set_viewport_size({"width": 1280, "height": 900})


@pytest.mark.ray
def test_what_is_asked_from_the_page_is_done_and_said(page: Any, on_ray: Driver) -> None:
    """Pause, resume, clone, cancel, stop: the log has the answer, and the page says it."""
    with serve(on_ray.run_dir) as server:
        enter(page, server)

        def wait_for_answer(verb: str, said: str) -> None:
            wait_until(page, lambda: on_ray.find_answer(verb) is not None, 60)
            answer = on_ray.find_answer(verb)
            assert answer is not None and answer["done"], answer
            wait_until(page, lambda: any(said in each for each in page.locator(SAID).all_inner_texts()), 30)

        show(page, "member?member=member-1")
        page.click("text=Pause")
        wait_for_answer("pause", "pause member-1: ")
        page.wait_for_selector(".member-head .pill >> text=paused", timeout=60_000)
        page.click("button >> text=Resume")
        wait_for_answer("resume", "resume member-1: ")
        page.wait_for_selector(".member-head .pill >> text=running", timeout=60_000)

        page.click("text=Clone with changes …")
        page.fill("dialog input[name=lr]", "0.01")
        page.check("dialog input[value=warm]")
        page.click(CONFIRM)
        wait_for_answer("add", "a clone of member-1: ")
        show(page, "members")
        page.wait_for_selector("tr[data-member=member-4] >> text=running", timeout=60_000)
        identity = on_ray.fold().members["member-4"].identity
        assert identity["params"]["lr"] == 0.01 and identity["lineage"]["from"] == "member-1"
        assert "clone of member-1" in show(page, "member?member=member-4")

        show(page, "member?member=member-3")
        page.click("text=Cancel …")
        page.click(CONFIRM)
        wait_for_answer("cancel", "cancel member-3: ")
        page.wait_for_selector(".member-head .pill >> text=cancelled", timeout=60_000)

        show(page, "overview")
        page.click("text=Stop the run …")
        page.click(CONFIRM)
        wait_for_answer("stop", "stop: ")
        page.wait_for_selector("header .pill >> text=stopped", timeout=60_000)
        assert page.locator("text=Stop the run …").count() == 0
        assert on_ray.process.wait(60) is not None
        assert page.text_content(".connection") == "run ended"


@pytest.mark.slow
def test_a_lost_controller_is_said_and_the_resumed_run_goes_on(page: Any, on_local: Driver) -> None:
    with serve(on_local.run_dir) as server:
        enter(page, server)
        on_local.process.send_signal(signal.SIGKILL)
        on_local.process.wait()
        page.wait_for_selector("header .pill >> text=interrupted", timeout=60_000)
        text = page.inner_text("[data-view=overview]")
        assert f"process {on_local.process.pid}" in text and f"ensemble resume {on_local.run_dir}" in text
        assert page.locator("text=Stop the run …").count() == 0
        on_local.start()
        page.wait_for_selector("header .pill >> text=running", timeout=120_000)
        on_local.wait_for_epochs()
        page.wait_for_selector("text=Stop the run …")
        assert "is gone" not in page.inner_text("[data-view=overview]")
        show(page, "timeline")
        assert page.locator("[data-mark=attempt]").count() == 2 * len(MEMBERS)


@pytest.mark.slow
def test_a_lost_server_is_said_and_what_to_do(tab: Any, on_local: Driver) -> None:
    with serve(on_local.run_dir) as server:
        enter(tab, server)
        server.close(signal.SIGKILL)
        tab.wait_for_selector(".connection >> text=connection lost", timeout=30_000)
        tab.wait_for_selector(".trouble >> text=ensemble dashboard", timeout=30_000)
        assert "does not answer" in tab.inner_text(".trouble")
        with serve(on_local.run_dir, "--port", str(server.port)) as again:
            tab.wait_for_selector(".trouble >> text=key is not valid any more", timeout=30_000)
            enter(tab, again)
            tab.wait_for_selector(".connection:text-is('live')")
            assert not tab.is_visible(".trouble")


@pytest.mark.slow
def test_a_run_that_takes_the_place_of_a_deleted_one_is_shown_instead(page: Any, on_local: Driver) -> None:
    with serve(on_local.run_dir) as server:
        enter(page, server)
        show(page, "members")
        on_local.stop()
        page.wait_for_selector("header .pill >> text=stopped", timeout=60_000)
        shutil.rmtree(on_local.run_dir)
        page.wait_for_selector("header .pill >> text=not started", timeout=30_000)
        assert page.locator("tbody tr[data-member]").count() == 0
        on_local.start()
        page.wait_for_selector("tr[data-member=member-3] >> text=running", timeout=120_000)
        assert page.inner_text("header .pill") == "running" and page.text_content(".connection") == "live"
