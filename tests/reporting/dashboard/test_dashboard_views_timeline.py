"""The view "Timeline" in a real browser: bars and marks, what runs grows, zoom, keyboard, thousands of members."""

from __future__ import annotations

import math
from typing import Any

import pytest
from documents import START, make_documents
from page_steps import Open, show, wait_until

pytestmark = [pytest.mark.browser, pytest.mark.more]


VIEW = "[data-view=timeline]"
BAR = f"{VIEW} [data-mark=attempt]"


def spans_of(documents: dict[str, Any], rows: dict[str, list[list[Any]]]) -> None:
    """Gives the run these attempts alone."""
    documents["state"]["spans"] = {name: rows.get(name, []) for name in documents["state"]["spans"]}


def width(tab: Any, selector: str) -> float:
    return float(tab.locator(selector).get_attribute("width"))


def test_every_attempt_is_a_bar_in_its_group_with_its_marks(tab: Any, open_page: Open) -> None:
    documents = make_documents(8, gpus=0)
    t = START
    rows = {
        "member-0": [[0, "node-0", [], 0, t, t + 10, t + 90, "finished"]],
        "member-1": [
            [0, "node-0", [], 0, t, t + 5, t + 60, "moved"],
            [0, "node-1", [], 1, t + 62, t + 64, None, None],
        ],
        "member-2": [
            [0, "node-1", [], 1, t, t + 5, t + 30, "failed"],
            [1, "node-1", [], 1, t + 40, t + 44, t + 99, "failed"],
        ],
        "member-4": [[0, "node-1", [], None, t + 50, None, None, None]],
    }
    rows["member-1"][1][7] = rows["member-4"][0][7] = "running"
    spans_of(documents, rows)
    at = documents["state"]["members"]["columns"].index("error")
    documents["state"]["members"]["rows"]["member-2"][at] = "CUDA out of memory"
    open_page(documents, "#timeline")
    assert tab.locator(BAR).count() == 6
    heads = tab.locator(f"{VIEW} .lane-head").all_text_contents()
    assert heads == [
        "node-0 · stream group 02 members",
        "node-1 · stream group 12 members",
        "node-1 · alone1 member",
    ]
    for mark, many in {"failed": 2, "retry": 1, "move": 1}.items():
        assert tab.locator(f"{VIEW} [data-mark={mark}]").count() == many
    label = tab.locator(f"{BAR}[data-member=member-2]").nth(1).get_attribute("aria-label")
    assert "attempt 2 on node-1, stream group 1: failed" in label and "CUDA out of memory" in label
    # The pale part is the start, to scale with the rest.
    first = tab.locator(f"{BAR}[data-member=member-0] rect")
    pale, ran = (float(first.nth(i).get_attribute("width")) for i in (0, 1))
    assert math.isclose(ran / pale, 80 / 10, rel_tol=0.03)
    assert "finished 1" in tab.locator(f"{VIEW} .keys-of").inner_text()


def test_what_runs_grows_with_the_clock_without_a_change(tab: Any, open_page: Open) -> None:
    documents = make_documents(8, gpus=0)
    now = documents["state"]["now"]
    spans_of(documents, {"member-1": [[0, "node-0", [], 0, now - 9, now - 8, None, "running"]]})
    documents["state"]["run"]["started"] = now - 300  # so that it has room to grow, however late it is looked at
    open_page(documents, "#timeline")
    bar, rim = f"{BAR} .bar-running", f"{BAR} .chosen-bar"
    longer = "([s, w]) => +document.querySelector(s).getAttribute('width') > w + 2"

    def grows_in_place() -> bool:
        tab.evaluate("s => { window.bar = document.querySelector(s); }", bar)
        tab.wait_for_function(longer, arg=[bar, width(tab, bar)])
        return bool(tab.evaluate("s => window.bar === document.querySelector(s)", bar))

    wait_until(tab, grows_in_place)  # it was drawn anew with the curves, if they arrived meanwhile
    show(tab, "timeline?select=member-1")
    tab.wait_for_selector(rim, state="attached")
    tab.wait_for_function(longer, arg=[rim, width(tab, rim)])


def test_a_change_ends_an_attempt(tab: Any, open_page: Open) -> None:
    documents = make_documents(8)
    server = open_page(documents, "#timeline")
    name = tab.locator(f"{BAR}[data-outcome=running]").first.get_attribute("data-member")
    span = [*documents["state"]["spans"][name][-1]]
    now = documents["state"]["now"]
    span[5:] = [span[5] or span[4] + 1, now, "pruned"]
    server.push({"offset": documents["state"]["offset"] + 9, "now": now, "spans": {name: [span]}})
    tab.wait_for_selector(f"{BAR}[data-member={name}][data-outcome=pruned] .bar-pruned", state="attached")
    assert tab.locator(f"{BAR}[data-member={name}]").count() == 1


def test_the_keyboard_goes_from_bar_to_bar_and_selects_and_the_pointer_too(tab: Any, open_page: Open) -> None:
    open_page(make_documents(8), "#timeline")
    lanes = tab.locator(f"{VIEW} [role=listbox]")
    lanes.focus()
    tab.keyboard.press("ArrowDown")
    tab.keyboard.press("ArrowDown")
    active = tab.locator(f"[id='{lanes.get_attribute('aria-activedescendant')}']")
    name = active.get_attribute("data-member")
    assert name in tab.locator(f"{VIEW} .tip").inner_text()
    tab.keyboard.press("Enter")
    tab.wait_for_function("n => location.hash.includes(`select=${n}`)", arg=name)
    tab.wait_for_selector(f"{BAR}[data-member={name}][aria-selected=true]", state="attached")
    assert tab.locator(f"{BAR}.faded").count() == tab.locator(f"{BAR}:not([data-member={name}])").count()
    other = tab.locator(f"{BAR}:not([data-member={name}])").first
    other.click(force=True)
    tab.wait_for_function("n => location.hash.includes(n)", arg=other.get_attribute("data-member"))


def test_zoom_shows_a_part_and_the_whole_again(tab: Any, open_page: Open) -> None:
    open_page(make_documents(8, ended=True), "#timeline")
    bar = f"{BAR}[data-member=member-0] rect >> nth=1"
    before = width(tab, bar)
    tab.locator(f"{VIEW} [role=listbox]").hover(position={"x": 120, "y": 60})
    tab.keyboard.down("Control")
    tab.mouse.wheel(0, -200)
    tab.keyboard.up("Control")
    tab.get_by_role("button", name="whole run").wait_for()
    assert width(tab, bar) > before
    tab.get_by_role("button", name="whole run").click()
    assert tab.get_by_role("button", name="whole run").count() == 0
    assert width(tab, bar) == before


def test_the_table_has_a_row_for_each_attempt(tab: Any, open_page: Open) -> None:
    documents = make_documents(8)
    open_page(documents, "#timeline")
    tab.get_by_role("button", name="as a table").click()
    many = sum(map(len, documents["state"]["spans"].values()))
    assert tab.locator(f"{VIEW} tbody tr").count() == many
    failed = tab.locator(f"{VIEW} tbody tr", has_text="failed").first.inner_text()
    assert "loss is nan" in failed


def test_of_thousands_of_rows_only_those_in_sight_exist(tab: Any, open_page: Open) -> None:
    open_page(make_documents(3000), "#timeline")
    tab.get_by_label("rows").select_option("member")
    tab.wait_for_selector(f"{VIEW} .lane-name")
    assert tab.locator(f"{VIEW} .lane").count() < 120
    names = set(tab.locator(BAR).evaluate_all("all => all.map(each => each.dataset.member)"))
    tab.locator(f"{VIEW} [role=listbox]").focus()
    tab.keyboard.press("End")
    tab.wait_for_function("([s, n]) => document.querySelector(s)?.dataset.member !== n", arg=[BAR, names.pop()])
    assert tab.locator(f"{VIEW} .lane").count() < 120
