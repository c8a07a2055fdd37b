"""The page as a whole in a browser: how it opens, follows a run, comes back, freezes, and what it says."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from conftest import DRAWN, wait_until
from documents import make_change, make_documents
from page_server import KEY, STATIC, PageServer

pytestmark = pytest.mark.browser

Open = Callable[..., PageServer]


def tiles(tab: Any) -> dict[str, str]:
    """The figures on the tiles by their labels."""
    found: dict[str, str] = tab.evaluate(
        """() => Object.fromEntries([...document.querySelectorAll("[data-mark='tile']")].map(
            (tile) => [tile.querySelector("dt").textContent, tile.querySelector(".figure").textContent]))"""
    )
    return found


def is_live(tab: Any, server: PageServer) -> bool:
    return server.followers("run") == 1 and tab.text_content(".connection") == "live"


# -- overview ---------------------------------------------------------------------------------------


def test_the_overview_says_how_the_run_stands(tab: Any, open_page: Open) -> None:
    documents = make_documents(40)
    open_page(documents)
    run = documents["state"]["run"]
    assert tab.text_content("h1") == "digits"
    assert tab.text_content(".pill") == "running"
    assert tab.text_content(".progress .figure") == "42 % done"
    assert "about 6 min 52 s left" in tab.text_content(".progress")
    shown = tiles(tab)
    assert shown["Members finished"] == f"{run['counts']['finished']} of 40"
    assert shown["Best accuracy so far"] == f"{run['best']['value']:.4f}"
    assert shown["Reuse of prepared samples"] == "8.00×"
    assert shown["CPU time (measured)"] == "4,870 s"
    assert shown["Energy (measured)"] == "201 kJ"
    assert shown["Power now (measured)"] == "690 W"
    parts = tab.locator(".progress [data-mark='state']")
    assert parts.count() == len(run["counts"])
    facts = tab.eval_on_selector_all("[data-mark='fact'] dd", "all => all.map(each => each.textContent)")
    assert facts == [fact["text"] for fact in run["facts"]]
    assert tab.locator("[data-mark='notice']").count() == 3


def test_the_best_so_far_is_drawn_from_the_curves(tab: Any, open_page: Open) -> None:
    documents = make_documents(40)
    open_page(documents)
    curves = documents["curves"]["members"].values()
    highest = max(value for curve in curves for value in curve["values"]["accuracy"])
    tab.wait_for_selector("svg.step-chart path.step-line[d^=M]")
    assert tab.text_content(".step-value") == f"{highest:.4f}"


def test_an_ended_run_shows_what_was_combined(tab: Any, open_page: Open) -> None:
    documents = make_documents(12, ended=True)
    open_page(documents)
    combined = documents["state"]["run"]["combined"]["metrics"]
    assert tiles(tab)["Combined accuracy"] == f"{combined['ensemble']['accuracy']:.4f}"
    assert "+0.0220 to the best member, both on test" in tab.text_content(".tiles")
    assert tiles(tab)["Wall time"] == "5 min 00 s"
    assert tab.text_content(".connection") == "run ended"


def test_a_state_in_the_legend_leads_to_its_members(tab: Any, open_page: Open) -> None:
    open_page(make_documents(40))
    tab.click(".state-legend button:has-text('failed')")
    tab.wait_for_selector("[data-view='members']:not([data-drawn='0'])")
    assert tab.url.endswith("#members?filter=state%3Afailed")


def test_a_member_has_a_figure_for_each_metric(tab: Any, open_page: Open) -> None:
    documents = make_documents(20)
    open_page(documents, "#member?member=member-0")
    curve = documents["curves"]["members"]["member-0"]
    tab.wait_for_selector("figure >> text=accuracy")
    assert tab.locator("[data-member='member-0'][data-mark='line']").count() == 2
    assert tab.locator("[data-member='member-0'][data-mark='training']").count() == 1
    tab.click("figure:has-text('accuracy') button:has-text('as a table')")
    shown = tab.eval_on_selector_all("figure tbody tr", "rows => rows.map(row => row.cells[1].textContent)")
    assert shown == [f"{value:.4f}" for value in reversed(curve["values"]["accuracy"])]


# -- following --------------------------------------------------------------------------------------


def test_changes_are_drawn_at_most_five_times_a_second(tab: Any, open_page: Open) -> None:
    documents = make_documents(50)
    server = open_page(documents)
    wait_until(tab, lambda: is_live(tab, server))
    before = int(tab.get_attribute("[data-view]", "data-drawn"))
    begun = tab.evaluate("() => performance.now()")
    for step in range(1, 101):
        server.push(make_change(documents["state"], step))
        tab.wait_for_timeout(10)
    tab.wait_for_selector(f"body[data-offset='{make_change(documents['state'], 100)['offset']}']")
    took_s = (tab.evaluate("() => performance.now()") - begun) / 1000
    drawn = int(tab.get_attribute("[data-view]", "data-drawn")) - before
    assert 1 <= drawn <= 5 * took_s + 2


def test_a_stale_document_is_fetched_again_once_for_many_changes(tab: Any, open_page: Open) -> None:
    documents = make_documents(10)
    server = open_page(documents)
    wait_until(tab, lambda: is_live(tab, server))
    asked = f"/api/runs/{KEY}/quality"
    wait_until(tab, lambda: server.asked.count(asked) == 1)
    server.documents["quality"] = make_documents(10, ended=True)["quality"]
    for step in range(1, 11):
        server.push({**make_change(documents["state"], step), "stale": ["quality"]})
    tab.wait_for_selector("text=Combined accuracy so far")
    assert server.asked.count(asked) == 2


def test_a_lost_connection_is_said_and_taken_up_again_from_where_it_ended(tab: Any, open_page: Open) -> None:
    documents = make_documents(10)
    server = open_page(documents)
    wait_until(tab, lambda: is_live(tab, server))
    change = make_change(documents["state"], 1)
    server.push(change)
    tab.wait_for_selector(f"body[data-offset='{change['offset']}']")
    server.drop()
    tab.wait_for_selector("text=connection lost, trying again")
    wait_until(tab, lambda: is_live(tab, server))
    later = make_change(documents["state"], 2)
    server.push(later)
    tab.wait_for_selector(f"body[data-offset='{later['offset']}']")


def test_another_log_in_its_place_loads_the_page_anew(tab: Any, open_page: Open) -> None:
    documents = make_documents(10)
    server = open_page(documents, "#members?select=member-2")
    wait_until(tab, lambda: is_live(tab, server))
    server.documents = make_documents(7, seed=5)
    server.documents["state"]["offset"] = 55
    server.reset()
    tab.wait_for_selector("body[data-offset='55']")
    wait_until(tab, lambda: tab.locator("tr[data-member]:not([hidden])").count() == 7)
    assert tab.url.endswith("select=member-2")


def test_a_key_that_is_no_longer_valid_is_said(tab: Any, open_page: Open) -> None:
    server = open_page(make_documents(5))
    server.refusal = (401, "no")
    del server.documents["state"]
    tab.evaluate("() => { location.hash = '#overview?run=gone'; }")
    tab.wait_for_selector("[role=alert] >> text=The run cannot be read")


# -- runs -------------------------------------------------------------------------------------------


def test_a_folder_lists_its_runs_and_each_can_be_opened(tab: Any, open_page: Open) -> None:
    open_page(make_documents(10), keys=("a1", "b2", "c3"))
    assert tab.locator("[data-mark='run']").count() == 3
    assert tab.text_content("h1") == "Runs"
    tab.click("[data-mark='run'] >> nth=1 >> a")
    tab.wait_for_selector("[data-view='overview']:not([data-drawn='0'])")
    assert "run=" in tab.url
    tab.keyboard.press("2")
    tab.wait_for_selector("[data-view='members']:not([data-drawn='0'])")
    assert "run=" in tab.url, "it is still that run"
    tab.click("text=All runs")
    tab.wait_for_selector("[data-view='runs']")


def test_one_run_opens_at_once(tab: Any, open_page: Open) -> None:
    server = open_page(make_documents(3))
    assert f"/api/runs/{KEY}/state" in server.asked
    assert not tab.is_visible("text=All runs")


# -- a member ---------------------------------------------------------------------------------------


def test_a_failed_member_says_why_and_what_to_do(tab: Any, open_page: Open) -> None:
    documents = make_documents(8)
    open_page(documents, "#member?member=member-3")
    members = documents["state"]["members"]
    row = dict(zip(members["columns"], members["rows"]["member-3"], strict=True))
    assert row["error"] in tab.text_content(".failure")
    assert row["advice"] in tab.text_content(".failure")
    assert tab.locator("[data-mark='attempt']").count() == 3
    shown = tab.eval_on_selector_all("[data-mark='param'] th", "all => all.map(each => each.textContent)")
    assert shown == list(row["params"])


def test_a_clone_names_its_origin(tab: Any, open_page: Open) -> None:
    open_page(make_documents(12), "#member?member=member-9")
    assert "clone of member-1, with its weights of epoch 3" in tab.text_content(".member-head")


def test_a_member_that_is_not_there_is_said(tab: Any, open_page: Open) -> None:
    open_page(make_documents(3), "#member?member=nobody")
    assert tab.is_visible("text=The run has no member of this name.")


def test_a_log_follows_holds_and_keeps_its_last_lines(tab: Any, open_page: Open) -> None:
    start = "".join(f"line {i} <b>\n" for i in range(100))
    server = open_page(make_documents(8), "#member?member=member-1", logs={"member-1": start})
    tab.wait_for_selector("pre.log >> text=line 99 <b>")
    at_end = "() => { const log = document.querySelector('pre.log'); return log.scrollTop + log.clientHeight >= log.scrollHeight - 2; }"  # fmt: skip # noqa: E501
    assert tab.evaluate(at_end)
    assert tab.locator("pre.log b").count() == 0
    tab.get_by_role("button", name="Hold").click()
    size = len(start)
    more = "".join(f"more {i}\n" for i in range(10_000))
    server.push_log("member-1", more, size)
    tab.wait_for_timeout(500)  # nothing is to happen
    assert "more" not in tab.text_content("pre.log")
    tab.get_by_role("button", name="Go on").click()
    tab.wait_for_selector("pre.log >> text=more 9999")
    lines = tab.text_content("pre.log").strip().split("\n")
    assert len(lines) == 4000
    assert lines[0] == "more 6000"
    assert tab.evaluate(at_end)
    assert tab.is_visible("text=the last 4,000 lines")


def test_a_log_is_left_with_its_page(tab: Any, open_page: Open) -> None:
    server = open_page(make_documents(8), "#member?member=member-1", logs={"member-1": "one\n"})
    wait_until(tab, lambda: server.followers("log member-1") == 1)
    tab.keyboard.press("1")
    tab.wait_for_selector("[data-view='overview']:not([data-drawn='0'])")
    assert tab.locator("pre.log").count() == 0
    server.push_log("member-1", "x\n", 4)  # the server notices a reader that has gone when it writes
    wait_until(tab, lambda: (server.push_log("member-1", "x\n", 4), server.followers("log member-1") == 0)[1])


# -- the frame --------------------------------------------------------------------------------------


def test_number_keys_open_the_views_in_the_order_of_the_tabs(tab: Any, open_page: Open) -> None:
    open_page(make_documents(8))
    titles = tab.eval_on_selector_all("nav a", "all => all.map(each => each.textContent)")
    for number, title in reversed(list(enumerate(titles[:9], start=1))):
        tab.keyboard.press(str(number))
        tab.wait_for_selector(f"nav a[aria-current=page] >> text={title}")
        assert tab.evaluate("() => document.activeElement.id") == "view", "the focus goes to the view"


def test_the_help_lists_the_keys_and_the_filter(tab: Any, open_page: Open) -> None:
    open_page(make_documents(8))
    tab.keyboard.press("?")
    assert "lr<0.1" in tab.text_content("dialog[open]")
    tab.keyboard.press("Escape")
    tab.wait_for_selector("dialog", state="detached")


def test_the_button_changes_the_colours_and_the_choice_stays(tab: Any, open_page: Open) -> None:
    open_page(make_documents(8))
    ground = "() => getComputedStyle(document.body).backgroundColor"
    light = tab.evaluate(ground)
    button = tab.get_by_role("button", name=re.compile("^Colours"))
    button.click()
    assert tab.evaluate(ground) == light
    button.click()
    dark = tab.evaluate(ground)
    assert dark != light
    tab.reload()
    tab.wait_for_selector(DRAWN)
    assert tab.evaluate(ground) == dark


@pytest.mark.parametrize("view", ["overview", "members", "notices", "member?member=member-3"])
@pytest.mark.parametrize("width", [400, 1280])
def test_nothing_is_wider_than_the_screen(tab: Any, open_page: Open, view: str, width: int) -> None:
    tab.set_viewport_size({"width": width, "height": 800})
    open_page(make_documents(30, hostile=True), f"#{view}")
    assert tab.evaluate("() => document.documentElement.scrollWidth") == width


@pytest.mark.parametrize("view", ["overview", "members", "notices", "member?member=member-3", "runs"])
def test_what_can_be_used_has_a_name(tab: Any, open_page: Open, view: str) -> None:
    open_page(make_documents(12), f"#{view}")
    unnamed = tab.evaluate(
        """() => [...document.querySelectorAll("a[href], button, input, select, textarea, [role=img], table, nav")]
            .filter((each) => each.getClientRects().length)
            .filter((each) => !(each.getAttribute("aria-label") || each.textContent.trim() || each.labels?.length))
            .map((each) => each.outerHTML.slice(0, 120))"""
    )
    assert unnamed == []
    heads = "[...document.querySelectorAll('th')].filter((each) => !each.getAttribute('scope')).length"
    assert tab.evaluate(f"() => {heads}") == 0


@pytest.mark.slow  # it measures time
def test_a_run_of_a_thousand_is_painted_in_less_than_two_seconds(tab: Any, open_page: Open) -> None:
    open_page(make_documents(1000), "#members")
    tab.wait_for_selector("tr[data-member='member-0']")
    took_ms = tab.evaluate("""() => {
        const [page] = performance.getEntriesByType("navigation");
        return performance.getEntriesByName("first-contentful-paint")[0].startTime - page.responseStart;
    }""")
    assert took_ms < 2000


# -- frozen -----------------------------------------------------------------------------------------


def test_the_same_page_shows_documents_that_lie_in_it(tab: Any, open_page: Open, tmp_path: Path) -> None:
    documents = make_documents(10, ended=True)
    documents["logs"] = {"member-1": "the end\n"}
    embedded = json.dumps(documents).replace("<", "\\u003c")
    page = (STATIC / "index.html").read_text(encoding="utf-8")
    page = page.replace("</body>", f'<script type="application/json" id="documents">{embedded}</script></body>')
    server = open_page(make_documents(3))
    tab.route(server.url, lambda route: route.fulfill(body=page, content_type="text/html"))
    server.asked.clear()
    tab.goto(server.url)
    tab.wait_for_selector("text=as of the report")
    assert tab.text_content("h1") == "digits"
    assert tab.locator(".progress button:not(.link)").count() == 0
    tab.keyboard.press("2")
    wait_until(tab, lambda: tab.locator("tr[data-member]:not([hidden])").count() == 10)
    tab.evaluate("() => { location.hash = '#member?member=member-1'; }")
    tab.wait_for_selector("pre.log >> text=the end")
    assert [path for path in server.asked if path.startswith("/api")] == []


# -- what a reader with a small screen, a keyboard or a screen reader meets ---------------------------


def test_the_shown_views_tab_is_seen_on_a_narrow_screen(tab: Any, open_page: Open) -> None:
    tab.set_viewport_size({"width": 400, "height": 800})
    open_page(make_documents(8), "#notices")
    box = tab.locator("nav a[aria-current=page]").bounding_box()
    assert box["x"] >= 0 and box["x"] + box["width"] <= 400


def test_the_list_of_runs_shows_progress_and_best_on_a_narrow_screen(tab: Any, open_page: Open) -> None:
    tab.set_viewport_size({"width": 400, "height": 800})
    open_page(make_documents(8), keys=("aa", "bb"))
    assert tab.evaluate("() => document.documentElement.scrollWidth") == 400
    for column in (3, 5):
        box = tab.locator(f"tbody tr:first-child > :nth-child({column})").bounding_box()
        assert box["x"] + box["width"] <= 400 - 14


def test_the_help_names_the_key_of_each_view(tab: Any, open_page: Open) -> None:
    open_page(make_documents(8))
    titles = tab.eval_on_selector_all("nav a", "all => all.map(each => each.textContent)")
    tab.keyboard.press("?")
    said = tab.text_content("dialog[open]")
    for i, title in enumerate(titles):
        assert f"{(i + 1) % 10 if i < 10 else 'no key'}: {title}" in said


@pytest.mark.parametrize(
    "view", ["overview", "members", "placement", "pipeline", "cost", "member?member=member-3"]
)
def test_headings_leave_no_level_out(tab: Any, open_page: Open, view: str) -> None:
    open_page(make_documents(8), f"#{view}")
    levels = tab.eval_on_selector_all("h1, h2, h3", "all => all.map(each => Number(each.tagName[1]))")
    assert levels[0] == 1 and all(after - before <= 1 for before, after in pairwise(levels))


def test_the_bar_of_a_run_without_members_has_a_name(tab: Any, open_page: Open) -> None:
    documents = make_documents(8)
    documents["state"]["run"]["counts"] = {}
    open_page(documents, keys=("aa", "bb"))
    assert tab.locator("[role=img][aria-label='no members']").count() == 2


def test_a_log_says_that_it_is_the_end_and_is_not_read_aloud(tab: Any, open_page: Open) -> None:
    open_page(make_documents(8), "#member?member=member-1", logs={"member-1": "x" * 99 + "\n", "member-2": ""})
    tab.wait_for_selector("[aria-label='Log'] >> text=/^1 line$/")
    assert tab.locator("[aria-label='Log'] :is([role=status], [aria-live=polite])").count() == 0


def test_a_long_log_says_that_its_last_lines_are_shown(tab: Any, open_page: Open) -> None:
    open_page(make_documents(8), "#member?member=member-1", logs={"member-1": ("x" * 1023 + "\n") * 100})
    tab.wait_for_selector("[aria-label='Log'] >> text=the last 64 lines")
