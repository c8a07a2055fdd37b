"""The page as a whole in a browser: how it opens, follows a run, comes back, and what it says in any width."""

from __future__ import annotations

import re
from itertools import pairwise
from typing import Any

import pytest
from documents import HOSTILE, make_change, make_documents, make_notice, renew
from page_server import KEY, PageServer
from page_steps import DRAWN, Open, check_width, show, wait_until

from ensemble.reporting.dashboard.rows import FIELDS

pytestmark = [pytest.mark.browser, pytest.mark.more]

VIEWS = ("overview", "members", "curves", "placement", "search", "ensemble", "cost")
VIEWS += ("notices", "member?member=member-3")
NARROW = {"width": 400, "height": 800}


def tiles(tab: Any, what: str = "figure") -> dict[str, str]:
    read = """(what) => Object.fromEntries([...document.querySelectorAll("[data-mark='tile']")].map(
        (tile) => [tile.querySelector("dt").textContent, tile.querySelector("." + what).textContent]))"""
    return dict(tab.evaluate(read, what))


def is_live(tab: Any, server: PageServer) -> bool:
    return server.followers("run") == 1 and tab.text_content(".connection") == "live"


def test_the_overview_says_how_the_run_stands_and_is_drawn_five_times_a_second(tab: Any, open_page: Open) -> None:
    server = open_page(make_documents(40))
    assert not tab.is_visible("text=All runs"), "one run opens at once"
    assert tab.text_content(".pill") == "running"
    assert tiles(tab) == {tile["label"]: tile["figure"] for tile in server.documents["state"]["run"]["tiles"]}
    wait_until(tab, lambda: is_live(tab, server))
    before = int(tab.get_attribute("[data-view]", "data-drawn"))
    begun = tab.evaluate("() => performance.now()")
    for step in range(1, 101):
        server.push(make_change(server.documents, step))
        tab.wait_for_timeout(10)
    tab.wait_for_selector(f"body[data-offset='{server.documents['state']['offset']}']")
    took_s = (tab.evaluate("() => performance.now()") - begun) / 1000
    drawn = int(tab.get_attribute("[data-view]", "data-drawn")) - before
    assert 1 <= drawn <= 5 * took_s + 2
    tab.click(".state-legend button:has-text('failed')")
    tab.wait_for_selector("[data-view='members']:not([data-drawn='0'])")
    assert tab.url.endswith("#members?filter=state%3Afailed")


def test_a_stale_document_is_fetched_again_once_for_many_changes(tab: Any, open_page: Open) -> None:
    server = open_page(make_documents(10), "#ensemble")
    wait_until(tab, lambda: is_live(tab, server))

    def count(selector: str) -> int:
        return int(tab.locator(f"[data-view=ensemble] >> {selector} >> visible=true").count())

    assert count("text=The run combines its members at its end.") == 1, "one sentence for all"
    assert count("figure") == 0
    asked = f"/api/runs/{KEY}/quality"
    assert server.asked.count(asked) == 1
    server.documents["quality"] = make_documents(10, ended=True)["quality"]
    server.documents["state"]["stamps"]["quality"] = 99
    for step in range(1, 11):
        server.push(make_change(server.documents, step))
    tab.wait_for_selector("[data-view=ensemble] [data-table=models]")
    assert count(".absent") == 0 and server.asked.count(asked) == 2


def test_a_lost_connection_is_taken_up_again_and_another_log_loads_it_anew(tab: Any, open_page: Open) -> None:
    documents = make_documents(10)
    server = open_page(documents, "#members?select=member-2")
    wait_until(tab, lambda: is_live(tab, server))
    for step in (1, 2):
        server.push(make_change(server.documents, step))
        tab.wait_for_selector(f"body[data-offset='{server.documents['state']['offset']}']")
        if step == 1:
            server.drop()
            tab.wait_for_selector("text=connection lost, trying again")
            wait_until(tab, lambda: is_live(tab, server))
    other = make_documents(7, seed=5)
    other["state"]["offset"] = 55
    server.push(other)
    tab.wait_for_selector("body[data-offset='55']")
    wait_until(tab, lambda: tab.locator("tr[data-member]:not([hidden])").count() == 7)
    assert tab.url.endswith("select=member-2")


def test_a_run_without_its_controller_does_not_look_alive(tab: Any, open_page: Open) -> None:
    server = open_page(make_documents(12))
    wait_until(tab, lambda: tab.text_content(".connection") == "live")
    mark = tab.locator("[data-mark='driver']")
    assert mark.is_hidden()
    driver = "the controller (process 4711) is gone; `ensemble resume /data/runs/digits` goes on"
    run = server.documents["state"]["run"] | {"driver": driver, "state": {"word": "interrupted", "tone": "bad"}}
    server.push(renew(server.documents, 1, run=run))
    tab.wait_for_selector("[data-mark='driver']")
    wait_until(tab, lambda: tab.text_content(".connection") == "standing still")
    assert "left" not in tab.text_content(".progress-head")
    for view in ("members", "placement", "cost"):
        show(tab, view)
        assert mark.text_content().startswith(f"T{driver[1:]}.") and "5:00" in mark.text_content()
    server.push(renew(server.documents, 2, run=run | {"driver": None}))
    wait_until(tab, mark.is_hidden)
    assert tab.text_content(".connection") == "live"


def test_a_hidden_tab_has_no_stream_and_is_renewed_when_it_is_shown(tab: Any, open_page: Open) -> None:
    hide = """hidden => {
      Object.defineProperty(document, "hidden", { configurable: true, get: () => hidden });
      document.dispatchEvent(new Event("visibilitychange"));
    }"""
    server = open_page(make_documents(4), "#member?member=member-0")
    tabs = [tab]
    for _ in range(6):
        tabs[-1].evaluate(hide, True)
        tabs.append(tab.context.new_page())
        tabs[-1].goto(server.url + "#overview")
        tabs[-1].wait_for_selector(DRAWN)
    server.push(make_change(server.documents, 1))
    offset = str(server.documents["state"]["offset"])
    wait_until(tabs[-1], lambda: tabs[-1].get_attribute("body", "data-offset") == offset)
    for each in tabs[1:]:
        each.close()
    assert tab.get_attribute("body", "data-offset") != offset
    tab.evaluate(hide, False)
    wait_until(tab, lambda: tab.get_attribute("body", "data-offset") == offset)


def test_a_run_has_one_stream_and_the_list_another(tab: Any, open_page: Open) -> None:
    server = open_page(make_documents(4), keys=("aa", "bb"))
    wait_until(tab, lambda: server.followers("runs") == 1)
    tab.click("main a")
    wait_until(tab, lambda: server.followers("run") == 1)
    wait_until(tab, lambda: (server.send("runs", ": still there\n\n"), server.followers("runs") == 0)[1])


def test_a_member_says_why_it_failed_whose_clone_it_is_and_its_own_best(tab: Any, open_page: Open) -> None:
    documents = make_documents(12)
    curve, best = documents["curves"]["members"]["member-1"], documents["state"]["run"]["best"]
    curve["values"]["accuracy"], curve["epoch"] = [0.2, 0.7, 0.6, 0.5], list(range(4))
    open_page(documents, "#member?member=member-3")
    row = dict(zip(FIELDS, documents["state"]["members"]["rows"]["member-3"], strict=True))
    assert all(row[name] in tab.text_content(".failure") for name in ("error", "advice"))
    assert tab.locator("[data-mark='attempt']").count() == 3
    shown = tab.eval_on_selector_all("[data-mark='param'] th", "all => all.map(each => each.textContent)")
    assert shown == list(row["params"])
    show(tab, "member?member=member-9")
    tab.wait_for_selector(".member-head >> text=clone of member-1, with its weights of epoch 3")
    show(tab, "member?member=nobody")
    tab.wait_for_selector("text=The run has no member of this name.")
    show(tab, "member?member=member-1")
    assert best["member"] != "member-1"
    wanted = f"the best member, {best['member']}, has {best['value']:.4f}; this one's best epoch: 2, with 0.7000"
    wait_until(tab, lambda: tiles(tab, "note").get("accuracy") == wanted)


def test_a_log_follows_stands_still_keeps_its_last_lines_and_is_left(tab: Any, open_page: Open) -> None:
    start = "".join(f"line {i} <b>\n" for i in range(100))
    server = open_page(make_documents(8), "#member?member=member-1", logs={"member-1": start})
    tab.wait_for_selector("pre.log >> text=line 99 <b>")
    at_end = "log => log.scrollTop + log.clientHeight >= log.scrollHeight - 2"
    assert tab.eval_on_selector("pre.log", at_end) and tab.locator("pre.log b").count() == 0
    tab.get_by_label("Follow").uncheck()
    place = tab.eval_on_selector("pre.log", "log => log.scrollTop")
    more = "".join(f"more {i}\n" for i in range(10_000))
    server.push_log("member-1", more, len(start))
    tab.wait_for_selector("pre.log >> text=more 9999")
    assert tab.eval_on_selector("pre.log", "log => log.scrollTop") == place
    assert tab.text_content("pre.log").startswith(start), "nothing moves under the reader's eyes"
    tab.get_by_label("Follow").check()
    server.push_log("member-1", "last\n", len(start) + len(more))
    tab.wait_for_selector("pre.log >> text=last")
    lines = tab.text_content("pre.log").strip().split("\n")
    assert len(lines) == 4000 and lines[0] == "more 6001" and tab.eval_on_selector("pre.log", at_end)
    assert tab.is_visible("text=the last 4,000 lines")
    assert tab.locator("[aria-label='Log'] :is([role=status], [aria-live=polite])").count() == 0, "not read aloud"
    assert server.followers("log member-1") == 1
    show(tab, "overview")
    assert tab.locator("[role=log]").count() == 0
    # The server notices a reader that has gone when it writes.
    wait_until(tab, lambda: (server.push_log("member-1", "x\n", 4), server.followers("log member-1") == 0)[1])


def test_number_keys_open_views_the_help_names_them_and_colours_stay(tab: Any, open_page: Open) -> None:
    open_page(make_documents(8))
    titles = tab.eval_on_selector_all("nav a", "all => all.map(each => each.textContent)")
    for number, title in reversed(list(enumerate(titles[:9], start=1))):
        tab.keyboard.press(str(number))
        tab.wait_for_selector(f"nav a[aria-current=page] >> text={title}")
        assert tab.evaluate("() => document.activeElement.id") == "view", "the focus goes to the view"
    tab.keyboard.press("?")
    said = tab.text_content("dialog[open]")
    for i, title in enumerate(titles):
        assert f"{(i + 1) % 10 if i < 10 else 'no key'}: {title}" in said
    assert "lr<0.1" in said
    tab.keyboard.press("Escape")
    tab.wait_for_selector("dialog", state="detached")
    light = tab.evaluate(ground := "() => getComputedStyle(document.body).backgroundColor")
    tab.get_by_role("button", name=re.compile("^Colours")).click()
    dark = tab.evaluate(ground)
    tab.reload()
    tab.wait_for_selector(DRAWN)
    assert light != dark == tab.evaluate(ground)


def test_hostile_names_stay_text_in_every_view_and_nothing_is_too_wide(tab: Any, open_page: Open) -> None:
    charts = "#view :is(canvas, .chart, [role=listbox])[tabindex='0'] >> visible=true"
    click = "all => all.filter((each) => each.getClientRects().length).forEach((each) => each.click())"
    for ended in (False, True):
        documents = make_documents(40, hostile=True, ended=ended)
        documents["importances"]["importances"] = [["<i>evil</i>&amp;", 0.9], ["lr", 0.1]]
        documents["tables"]["lines"].append(["energy", HOSTILE[0]])
        tab.set_viewport_size(NARROW)
        open_page(documents, keys=("aa", "bb"))
        box = tab.locator("tr[data-member] >> nth=0 >> td:nth-child(4)").bounding_box()
        assert box["x"] + box["width"] <= 400 - 14, "the list of runs shows progress and best"
        open_page(documents)
        for view in VIEWS:
            show(tab, view)
            if view == "curves":
                tab.wait_for_selector("#view .panels .card")  # they are fetched with the view
            for width in (1280, 400):
                check_width(tab, width)
            for chart in tab.locator(charts).all():
                chart.focus()
                for key in ("ArrowDown", "ArrowRight") * 3:
                    tab.keyboard.press(key)  # shows a tip
            tab.eval_on_selector_all("#view button.as-table", click)
            assert tab.locator("#view :is(img, script, b, i, br)").count() == 0, view
            assert tab.evaluate("() => window.hacked === undefined"), view
            shown = {"curves": HOSTILE[0], "search": "<i>evil</i>&amp;", "cost": HOSTILE[0]}.get(view, "")
            wait_until(tab, lambda: shown in tab.inner_text("#view"))  # noqa: B023 (importances are fetched)
        show(tab, "notices")
        shown = tab.locator("nav a[aria-current=page] >> visible=true").bounding_box()
        assert shown["x"] >= 0 and shown["x"] + shown["width"] <= 400, "its tab, the last, is in sight"


def test_what_can_be_used_has_a_name_and_headings_leave_no_level_out(tab: Any, open_page: Open) -> None:
    documents = make_documents(12)
    list_unnamed = """(all) => all.filter((each) => each.getClientRects().length)
        .filter((each) => !each.getAttribute("aria-label") && !each.textContent.trim())
        .filter((each) => !each.labels?.length).map((each) => each.outerHTML.slice(0, 120))"""

    def check(view: str) -> None:
        usable = "a[href], button, input, select, textarea, [role=img], table, nav"
        assert tab.eval_on_selector_all(usable, list_unnamed) == [], view
        assert tab.locator("th:not([scope])").count() == 0, view
        levels = tab.eval_on_selector_all("h1, h2, h3", "all => all.map(each => Number(each.tagName[1]))")
        assert levels[0] == 1 and all(after - before <= 1 for before, after in pairwise(levels)), view

    open_page(documents)
    for view in VIEWS:
        show(tab, view)
        check(view)
    documents["state"]["run"]["counts"] = {}
    open_page(documents, keys=("aa", "bb"))
    check("runs")
    assert tab.locator("[role=img][aria-label='no members']").count() == 2


def test_a_long_error_does_not_bury_what_is_beside_it(tab: Any, open_page: Open) -> None:
    documents = make_documents(8)
    error = "the reason why " * 1400
    documents["state"]["members"]["rows"]["member-3"][FIELDS.index("error")] = error
    documents["state"]["notices"].append(make_notice(70.0, "error", error))
    documents["state"]["run"]["facts"].append({"label": "failed", "text": error, "tone": "bad"})
    open_page(documents, "#members")  # a view is drawn again where it is opened again
    for view, text in (("overview", "notice"), ("notices", "notice"), ("overview", "fact")):
        show(tab, view)
        long = tab.locator(f"[data-mark={text}]", has=tab.locator(".more"))
        assert long.bounding_box()["height"] < 160
        long.locator(".more").click()
        assert long.bounding_box()["height"] > 1000
        assert error.strip() in long.text_content()
    show(tab, "member?member=member-3")
    tab.wait_for_selector("[data-view=member] .failure .more")
    assert tab.locator(".failure").bounding_box()["height"] < 250


def test_the_tables_are_those_of_now_each_time_a_view_is_opened(tab: Any, open_page: Open) -> None:
    documents = make_documents(12)
    server = open_page(documents, "#cost")
    tab.wait_for_selector("[data-table='cost_of_roles'] >> text=1,235")
    assert "Packing cannot be shown: KeyError: 'members'." in tab.inner_text("#view")
    documents["tables"]["tables"][0]["rows"][0][1] = 4321.0
    show(tab, "notices")
    show(tab, "cost")
    tab.wait_for_selector("[data-table='cost_of_roles'] >> text=4,321")
    assert sum(path.endswith("/tables") for path in server.asked) == 2
    assert "1.2 kJ estimated" in tab.inner_text("#view"), "texts and tables are of one document"
    show(tab, "members")
    tab.click(".chooser summary")
    tab.click(".chooser label:has-text('sent by a worker')")
    tab.keyboard.press("Escape")
    tab.click("th[data-column='exchange sent by a worker'] button")
    find_sent = "all => all.findIndex((e) => e.dataset.column.includes('sent by'))"
    place = tab.locator("thead th").evaluate_all(find_sent)
    cells = tab.locator(f"tr[data-member] td:nth-child({place + 1})")
    assert cells.all_inner_texts()[:5] == ["9 KiB", "6 KiB", "3 KiB", "0 KiB", "–"], "sorted by its number"
    show(tab, "member?member=member-3")
    tab.wait_for_selector("[aria-label=Measured] >> text=3 KiB")
