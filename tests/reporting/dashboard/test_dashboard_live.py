"""The live page of a real run: `ensemble dashboard` and Chromium, each a process of its own."""

from __future__ import annotations

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


def list_params(state: RunState, *members: str) -> list[str]:
    return [f"{state.members[name].identity['params']['lr']:g}" for name in members]


#: The words that a view has of a run; joules that were estimated are called so.
VIEWS: dict[str, Callable[[RunState], list[str]]] = {
    "overview": lambda state: [state.name, f"{state.executor} executor", "member-"],
    "members": lambda state: [*state.members, "finished", *list_params(state, *state.members)],
    "curves": lambda state: [str(state.objective)],
    "placement": lambda state: [name for name, node in state.nodes.items() if node.info],
    "search": lambda state: ["lr"],
    "ensemble": lambda state: ["Calibration" if state.combined else "combine"],
    "cost": lambda state: ["training", *(node.info.power["origin"] for node in state.nodes.values() if node.info)],
    "notices": lambda state: [""],
    "member?member=member-1": lambda state: ["member-1", *list_params(state, "member-1")],
}
MARKS = {"members": "tbody tr[data-member]", "curves": "[data-metric] g[data-member]"}


def check_views(tab: Any, read: Callable[[], RunState]) -> None:
    for view, list_words in VIEWS.items():
        show(tab, view)
        drawn = "#app" if view == "overview" else f"[data-view={view.partition('?')[0]}]"

        def is_right(view: str = view, list_words: Any = list_words, drawn: str = drawn) -> bool:
            text, state = tab.inner_text(drawn), read()
            marked = tab.eval_on_selector_all(MARKS.get(view, "none"), "all => all.map(e => e.dataset.member)")
            is_marked = view not in MARKS or len(set(marked)) == len(state.members)
            return is_marked and all(word in text for word in list_words(state))

        print(view)  # the last one is the one that is not right
        wait_until(tab, is_right)


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
