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
    for each in names:
        tab.locator("tr[data-member]", has=tab.locator(f"td:nth-child(2) a:text-is('{each}')")).locator(
            "td"
        ).first.click()


def test_runs_are_sorted_filtered_picked_and_compared(own_tab: Any, tmp_path: Path) -> None:
    tab = own_tab
    run_events.write_run(tmp_path / "first", run_events.list_run(), range(8))
    run_events.write_run(tmp_path / "second", run_events.list_run(seed=5), range(8))
    run_events.write_run(tmp_path / "short", run_events.list_run(epochs=3), range(8))
    run_events.write_run(tmp_path / "sweep", run_events.search_run())
    with serve(tmp_path) as server:
        enter(tab, server)
        wait_until(tab, lambda: len(names(tab)) == 4 and "not read yet" not in tab.inner_text("main"))
        best = {Path(row["dir"]).name: row["best"]["value"] for row in server.get("/api/runs")}
        tab.click("th[data-column=best] button")
        assert names(tab) == sorted(best, key=lambda name: -best[name])
        tab.click("th[data-column=id] button")
        tab.click("th[data-column=id] button")
        assert names(tab) == ["sweep", "short", "second", "first"]

        pick(tab, "second")
        tab.fill("[aria-label='Filter runs']", "second")
        assert names(tab) == ["second"] and "1 run of 4" in tab.inner_text(".toolbar")
        tab.fill("[aria-label='Filter runs']", "-second state:finished members<20")
        assert names(tab) == ["short", "first"]
        tab.fill("[aria-label='Filter runs']", "colour:red")
        assert names(tab) == [] and "is called colour" in tab.inner_text(".problem >> nth=-1")
        tab.fill("[aria-label='Filter runs']", "")

        pick(tab, "first", "sweep")
        tab.click("text=Compare 3")
        tab.wait_for_selector("[data-table^=figures]")
        keys = {Path(row["dir"]).name: row["key"] for row in server.get("/api/runs")}
        address = f"#compare?runs={keys['second']},{keys['first']},{keys['sweep']}"
        assert tab.url == server.page + address
        assert "first - second, 95 % interval" in tab.inner_text("[data-table^=figures] thead")
        assert "within noise" in tab.inner_text("[data-table^=figures]")
        assert "sweep" in tab.inner_text("[data-table=runs]")
        curves = tab.locator("figure", has_text="Best member of each run").first.locator("canvas")
        wait_until(tab, lambda: int(curves.get_attribute("data-marks") or 0) > 12)

        tab.select_option("label:has-text('compared with') select", keys["first"])
        tab.wait_for_selector("[data-table^=figures] thead >> text=second - first, 95 % interval")
        address = tab.url
        other = tab.context.new_page()  # somebody else, who was given the address
        other.goto(address)
        other.wait_for_selector("[data-table^=figures]")
        assert other.inner_text("[data-table^=figures]") == tab.inner_text("[data-table^=figures]")
        other.close()
        check_width(tab, 400)
        tab.click("header >> text=All runs")
        tab.wait_for_selector("tr[data-member]")
        check_width(tab, 400)
        assert "Compare 3" in tab.inner_text(".toolbar"), "the picked runs stay picked"
        tab.goto(server.page + f"#compare?runs={keys['first']},{'0' * 16}")
        tab.wait_for_selector("text=They cannot be compared: there is no such run")
