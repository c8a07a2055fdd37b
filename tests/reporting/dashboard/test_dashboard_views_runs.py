"""The list of runs and their comparison, in a browser on a real server of a folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from dashboard_process import serve
from kit import run_events
from page_steps import check_width, enter, wait_until

pytestmark = [pytest.mark.browser, pytest.mark.more]


def names(tab: Any) -> list[str]:
    cells = "rows => rows.filter(row => !row.hidden).map(row => row.cells[1].textContent)"
    return list(tab.eval_on_selector_all("tr[data-member]", cells))


def pick(tab: Any, *names: str) -> None:
    for name in names:
        row = tab.locator("tr[data-member]", has=tab.locator(f"td:nth-child(2) a:text-is('{name}')"))
        row.locator("td").first.click()


def test_runs_are_sorted_filtered_picked_and_compared(own_tab: Any, tmp_path: Path) -> None:
    tab, first = own_tab, run_events.list_run()
    of_names = {"first": first, "second": run_events.list_run(seed=5), "short": run_events.list_run(epochs=3)}
    for name, events in of_names.items():
        run_events.write_run(tmp_path / name, events, range(8))
    run_events.write_run(tmp_path / "sweep", run_events.search_run())
    with serve(tmp_path) as server:
        enter(tab, server)
        wait_until(tab, lambda: len(names(tab)) == 4 and "not read yet" not in tab.inner_text("main"))
        rows = {Path(row["dir"]).name: row for row in server.get("/api/runs")}
        tab.click("th[data-column=best] button")
        assert names(tab) == sorted(rows, key=lambda name: -rows[name]["best"]["value"])
        for _ in range(2):
            tab.click("th[data-column=id] button")
        assert names(tab) == ["sweep", "short", "second", "first"]
        pick(tab, "second")
        written = tab.locator("[aria-label='Filter runs']")
        written.fill("second")
        assert names(tab) == ["second"] and "1 run of 4" in tab.inner_text(".toolbar")
        written.fill("-second state:finished members<20")
        assert names(tab) == ["short", "first"]
        written.fill("colour:red")
        assert names(tab) == [] and "is called colour" in tab.inner_text(".problem >> nth=-1")
        written.fill("")
        pick(tab, "first", "sweep")
        tab.click("text=Compare 3")
        figures = "[data-table^=figures]"
        tab.wait_for_selector(figures)
        keys = {name: row["key"] for name, row in rows.items()}
        assert tab.url == f"{server.page}#compare?runs={keys['second']},{keys['first']},{keys['sweep']}"
        assert "first - second, 95 % interval" in tab.inner_text(f"{figures} thead")
        assert "within noise" in tab.inner_text(figures) and "sweep" in tab.inner_text("[data-table=runs]")
        curves = tab.locator("figure", has_text="Best member of each run").first.locator("canvas")
        wait_until(tab, lambda: int(curves.get_attribute("data-marks") or 0) > 12)
        tab.select_option("label:has-text('compared with') select", keys["first"])
        tab.wait_for_selector(f"{figures} thead >> text=second - first, 95 % interval")
        other = tab.context.new_page()  # somebody else, who was given the address
        other.goto(tab.url)
        other.wait_for_selector(figures)
        assert other.inner_text(figures) == tab.inner_text(figures)
        other.close()
        check_width(tab, 400)
        tab.click("header >> text=All runs")
        tab.wait_for_selector("tr[data-member]")
        check_width(tab, 400)
        assert "Compare 3" in tab.inner_text(".toolbar"), "the picked runs stay picked"
        tab.goto(server.page + f"#compare?runs={keys['first']},{'0' * 16}")
        tab.wait_for_selector("text=They cannot be compared: there is no such run")
