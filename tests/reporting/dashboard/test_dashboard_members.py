"""The table of members in a browser: sorted, filtered, selected, driven by the keyboard, of any length."""

from __future__ import annotations

from typing import Any

import pytest
from documents import make_documents
from page_steps import Open, wait_until

pytestmark = [pytest.mark.browser, pytest.mark.more]

ROWS = "tr[data-member]:not([hidden])"


def names(tab: Any) -> list[str]:
    return list(tab.eval_on_selector_all(ROWS, "rows => rows.map(row => row.dataset.member)"))


def rows_of(documents: dict[str, Any]) -> dict[str, dict[str, Any]]:
    members = documents["state"]["members"]
    return {name: dict(zip(members["columns"], row, strict=True)) for name, row in members["rows"].items()}


def test_every_member_has_a_row_and_a_column_sorts_both_ways_with_unknown_last(tab: Any, open_page: Open) -> None:
    documents = make_documents(12)
    open_page(documents, "#members")
    rows = rows_of(documents)
    assert names(tab) == list(rows) and tab.get_attribute("table", "aria-rowcount") == "13"
    cut = "all => all.filter(each => each.scrollWidth > each.clientWidth).map(each => each.textContent)"
    assert tab.eval_on_selector_all("thead .sort", cut) == [], "no head is cut"
    head = tab.locator("th[data-column=error]").bounding_box()
    assert head["x"] + head["width"] < 1280, "why a member failed is in sight"
    tab.set_viewport_size({"width": 400, "height": 800})
    tab.reload()
    tab.wait_for_selector(ROWS)
    head = tab.locator("th[data-column=error]").bounding_box()
    assert head["x"] + head["width"] <= 400, "on a phone there is more than name and state"
    tab.set_viewport_size({"width": 1280, "height": 900})
    known = sorted((row["metric"], name) for name, row in rows.items() if row["metric"] is not None)
    unknown = [name for name, row in rows.items() if row["metric"] is None]
    for direction, ranked in (("descending", known[::-1]), ("ascending", known)):
        tab.click("th[data-column='metric'] button")
        assert tab.get_attribute("th[data-column='metric']", "aria-sort") == direction
        assert names(tab) == [name for _, name in ranked] + unknown
    shown = tab.eval_on_selector_all("thead th", "all => all.map(head => head.dataset.column)")
    assert {"state", "epoch", "metric", "place", "waited", "cpu_s", "energy_j", "param lr"} <= set(shown)
    assert "param optimizer" not in shown, "it is the same for all"
    tab.click("summary")  # columns are chosen and remembered
    tab.check("label:has-text('optimizer') input")
    tab.uncheck("label:has-text('place') input")
    wait_until(tab, lambda: tab.locator("th[data-column='param optimizer']").count() == 1)
    tab.reload()
    tab.wait_for_selector("th[data-column='param optimizer']")
    assert tab.locator("th[data-column='place']").count() == 0


def test_the_filter_is_written_into_the_address_and_read_from_it(tab: Any, open_page: Open) -> None:
    documents = make_documents(60)
    wanted = [name for name, row in rows_of(documents).items() if row["params"]["lr"] < 0.005]
    open_page(documents, "#members")
    tab.keyboard.press("/")
    tab.keyboard.type("lr<0.005")
    wait_until(tab, lambda: tab.get_by_text(f"{len(wanted)} members of 60").count())
    assert tab.url.endswith("#members?filter=lr%3C0.005")
    tab.reload()
    tab.wait_for_selector(ROWS)
    wait_until(tab, lambda: set(names(tab)) <= set(wanted))
    assert tab.input_value("input.filter") == "lr<0.005"


def test_a_click_selects_shift_all_between_and_keys_go_through_the_table(tab: Any, open_page: Open) -> None:
    open_page(make_documents(200), "#members")
    tab.click("tr[data-member='member-2'] td:nth-child(3)")
    wait_until(tab, lambda: "select=member-2" in tab.url)
    assert tab.get_attribute("tr[data-member='member-2']", "aria-selected") == "true"
    boxes = [tab.get_by_role("checkbox", name=name, exact=True) for name in ("member-2", "member-3")]
    assert [box.is_checked() for box in boxes] == [True, False]
    tab.click("tr[data-member='member-5'] td:nth-child(3)", modifiers=["Shift"])
    wait_until(tab, lambda: tab.url.endswith("select=member-2,member-3,member-4,member-5"))
    tab.wait_for_selector("button.chip >> text=4 selected ×")
    tab.keyboard.press("Escape")
    wait_until(tab, lambda: "select" not in tab.url)
    tab.reload()
    tab.wait_for_selector(ROWS)
    tab.focus("table.grid-table")
    for _ in range(3):
        tab.keyboard.press("ArrowDown")
    tab.keyboard.press("Space")
    wait_until(tab, lambda: tab.url.endswith("select=member-2"))
    tab.keyboard.press("End")
    wait_until(tab, lambda: "member-199" in names(tab))
    active = tab.get_attribute("table.grid-table", "aria-activedescendant")
    assert tab.get_attribute(f"#{active}", "data-member") == "member-199"
    assert tab.get_attribute(f"#{active}", "aria-rowindex") == "201"
    tab.keyboard.press("Enter")
    tab.wait_for_selector("[data-view='member']")
    assert tab.url.endswith("#member?member=member-199&select=member-2")
    assert tab.text_content(".member-head h2") == "member-199"


@pytest.mark.slow  # it measures time
def test_ten_thousand_members_scroll_with_few_rows_in_the_document(tab: Any, open_page: Open) -> None:
    open_page(make_documents(10_000), "#members")
    assert tab.locator("tr[data-member]").count() < 60
    session = tab.context.new_cdp_session(tab)
    session.send("Performance.enable", {"timeDomain": "threadTicks"})

    def count_script_s() -> float:
        found = {each["name"]: each["value"] for each in session.send("Performance.getMetrics")["metrics"]}
        return float(found["ScriptDuration"] + found["LayoutDuration"] + found["RecalcStyleDuration"])

    scroll = """async ([steps, by]) => {
        const box = document.querySelector(".table-scroll");
        const { left, top } = box.getBoundingClientRect();
        const filled = [];
        for (let i = 0; i < steps; i += 1) {
            box.scrollTop += by ?? box.scrollHeight / (steps - 1);
            await new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)));
            filled.push(document.elementFromPoint(left + 90, top + 60).closest("tr[data-member]") !== null);
        }
        return filled;
    }"""
    before_s = count_script_s()
    assert all(tab.evaluate(scroll, [60, 120])), "no empty rows are seen while the wheel turns"
    assert (count_script_s() - before_s) / 60 < 0.016, "a notch of the wheel takes less than a frame"
    assert names(tab)[0] != "member-0"
    assert all(tab.evaluate(scroll, [60, None])), "nor in great leaps"
    assert names(tab)[-1] == "member-9999"
    assert tab.locator("tr[data-member]").count() < 60
