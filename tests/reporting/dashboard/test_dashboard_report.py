"""The report in a real browser, from a disk: each view drawn, and nothing fetched."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from documents import make_documents
from kit import run_events as runs
from page_steps import show, wait_until

from ensemble.reporting import write_report
from ensemble.reporting.report import compose_report
from ensemble.store import RunDir

pytestmark = [pytest.mark.browser, pytest.mark.more]

DRAWN = "section[data-view='{}'][data-drawn]:not([data-drawn='0'])"


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs") / "digits"
    run_dir = RunDir(runs.write_run(path, runs.list_run(), [i for i in range(8) if i != 6]))
    run_dir.log("member-6").parent.mkdir()
    run_dir.log("member-6").write_text("step 11\nFloatingPointError: loss is nan\n")
    return write_report(run_dir)


@pytest.fixture
def alone(own_tab: Any) -> Iterator[Any]:
    """A tab in which anything that is fetched beside the page, and any complaint, fails the test."""
    wrong: list[str] = []
    own_tab.on("request", lambda sent: None if sent.is_navigation_request() else wrong.append(sent.url))
    own_tab.on("console", lambda line: wrong.append(line.text) if line.type in ("error", "warning") else None)
    yield own_tab
    assert wrong == []


def open_views(tab: Any, page: Path) -> list[str]:
    tab.goto(page.as_uri())
    tab.wait_for_selector(DRAWN.format("overview"))
    views: list[str] = tab.eval_on_selector_all(".tab", "tabs => tabs.map(tab => tab.hash.slice(1).split('?')[0])")
    for view in views:
        tab.click(f".tab[href^='#{view}']")
        tab.wait_for_selector(DRAWN.format(view))
    return views


def test_every_view_is_drawn_and_nothing_is_fetched(alone: Any, full: Path) -> None:
    views = open_views(alone, full)
    assert {"overview", "members", "curves", "placement", "ensemble", "cost", "notices"} <= set(views)
    alone.goto(full.as_uri() + "#curves")
    alone.reload()
    alone.wait_for_selector(DRAWN.format("curves"))
    assert alone.title() == "digits · finished, with failures"
    assert alone.text_content(".connection") == "as of the report"
    alone.goto(full.as_uri() + "#member?member=member-6")
    alone.wait_for_selector("pre.log:has-text('FloatingPointError: loss is nan')")
    alone.goto(full.as_uri() + "#member?member=member-0")
    alone.wait_for_selector("text=not in this report; it is in the run directory")


def test_a_search_and_a_run_without_members_are_drawn(alone: Any, tmp_path: Path) -> None:
    runs_of = {"sweep": runs.search_run(), "just started": runs.just_started(), "empty log": []}
    for name, events in runs_of.items():
        views = open_views(alone, write_report(RunDir(runs.write_run(tmp_path / name, events))))
        assert name != "sweep" or "search" in views


def test_a_thousand_members_are_drawn_without_a_row_for_each(alone: Any, tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    documents = make_documents(1000, ended=True)
    page.write_bytes(compose_report({"logs": {}, **documents}).encode(errors="backslashreplace"))
    assert page.stat().st_size < 4 * 2**20
    for view in open_views(alone, page):
        show(alone, view)
        assert alone.evaluate("document.querySelectorAll('#view *').length") < 6000, view


def test_the_policy_forbids_foreign_scripts_and_fetching(browser: Any, full: Path) -> None:
    page = browser.new_page()
    page.goto(full.as_uri())
    page.evaluate("""() => {
      window.forbidden = [];
      addEventListener("securitypolicyviolation", (event) => window.forbidden.push(event.effectiveDirective));
      const script = document.createElement("script");
      script.textContent = "window.hacked = true";
      document.body.append(script);
      fetch("http://127.0.0.1:9/").catch(() => {});
      new Image().src = "http://127.0.0.1:9/x.png";
    }""")
    wait_until(page, lambda: len(page.evaluate("window.forbidden")) == 3)
    assert set(page.evaluate("window.forbidden")) == {"script-src-elem", "connect-src", "img-src"}
    assert page.evaluate("window.hacked") is None
    page.close()


def test_a_report_of_a_run_in_progress_has_no_buttons_and_its_clock_stands(alone: Any, tmp_path: Path) -> None:
    page = write_report(RunDir(runs.write_run(tmp_path / "run", runs.list_run(until=9.0))))
    alone.clock.install()
    alone.goto(page.as_uri())
    alone.wait_for_selector(DRAWN.format("overview"))
    before = alone.inner_text("#app")
    assert "for 9" in alone.text_content(".lead")
    alone.clock.fast_forward("10:00")
    alone.keyboard.press("1")
    assert alone.inner_text("#app") == before
    assert alone.locator("button:has-text('Stop'), button:has-text('Pause')").count() == 0
