"""The live page of a real run: `ensemble dashboard` and Chromium, each a process of its own."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from dashboard_process import serve
from kit.event_dicts import fold, read_events
from page_steps import enter, show, wait_until

import ensemble
from ensemble.store import RunDir, RunState

pytestmark = pytest.mark.browser


@pytest.fixture
def page(own_tab: Any) -> Iterator[Any]:
    """A tab; an error on its console, or a request to anywhere but the server, fails the test."""
    wrong: list[str] = []
    own_tab.on("console", lambda message: wrong.append(message.text) if message.type == "error" else None)
    own_tab.on("request", lambda request: wrong.append(request.url) if "//127.0.0.1:" not in request.url else None)
    yield own_tab
    assert wrong == []


def count(tab: Any, selector: str) -> int:
    """How many members, or nodes, the marks are of."""
    named = "each => each.map(e => e.dataset.member ?? e.dataset.node)"
    return len(set(tab.eval_on_selector_all(selector, named)))


def is_overview(tab: Any, text: str, state: RunState) -> bool:
    named = f"{state.executor} executor" in tab.inner_text(".lead") and tab.inner_text("h1") == state.name
    return named and "member-" in tab.inner_text(".tiles") and tab.locator("[data-mark=tile]").count() >= 7


def is_table_of_members(tab: Any, text: str, state: RunState) -> bool:
    lines = {name: tab.inner_text(f"tr[data-member={name}]") for name in state.members}
    params = {name: f"{member.identity['params']['lr']:g}" for name, member in state.members.items()}
    has_all = all(state.members[name].state in line and params[name] in line for name, line in lines.items())
    return has_all and count(tab, "tbody tr[data-member]") == len(state.members)


def is_curves(tab: Any, text: str, state: RunState) -> bool:
    return count(tab, "[data-metric] g[data-member]") == len(state.members) and str(state.objective) in text


def is_placement(tab: Any, text: str, state: RunState) -> bool:
    nodes = tab.eval_on_selector_all("[data-node]", "each => each.map(e => e.dataset.node)")
    known = {name for name, node in state.nodes.items() if node.info}
    return set(nodes) == known and count(tab, "[data-mark=piece][data-member]") > 0


def is_cost(tab: Any, text: str, state: RunState) -> bool:
    """Joules that were estimated are called so; nobody may take them for measured ones."""
    origins = {node.info.power["origin"] for node in state.nodes.values() if node.info}
    return "training" in text and origins <= set(re.findall(r"\w+", text))


def is_page_of_a_member(tab: Any, text: str, state: RunState) -> bool:
    params = state.members["member-1"].identity["params"]
    marks = tab.locator("[data-mark=param]").count()
    drawn = tab.locator("[data-mark=attempt]").count() == 1 and marks == len({"seed", *params})
    return drawn and "member-1" in text and f"{params['lr']:g}" in text


VIEWS: dict[str, Callable[[Any, str, RunState], bool]] = {
    "overview": is_overview,
    "members": is_table_of_members,
    "curves": is_curves,
    "placement": is_placement,
    "search": lambda tab, text, state: "lr" in text,
    "ensemble": lambda tab, text, state: ("Calibration" if state.combined else "combine") in text,
    "cost": is_cost,
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
    from kit.execute_members import an_ensemble

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
def test_a_lost_server_is_said_and_what_to_do(own_tab: Any, finished_run: RunDir) -> None:
    tab = own_tab
    with serve(finished_run.path) as server:
        enter(tab, server)
        server.close(signal.SIGKILL)
        tab.wait_for_selector(".connection >> text=its page is no longer served")
        tab.wait_for_selector(".trouble >> text=ensemble dashboard")
        assert "does not answer" in tab.inner_text(".trouble")
        with serve(finished_run.path, "--port", str(server.port)) as again:
            tab.wait_for_selector(".trouble >> text=key is not valid any more")
            enter(tab, again)
            tab.wait_for_selector(".connection >> text=run ended")
            assert not tab.is_visible(".trouble")
