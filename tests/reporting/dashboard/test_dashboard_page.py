"""The page as a whole in a browser: how it opens, follows a run, comes back, and what it says in any width."""

from __future__ import annotations

import re
from itertools import pairwise
from typing import Any

import pytest
from documents import COLUMNS, HOSTILE, make_change, make_documents, make_notice
from page_server import KEY, PageServer
from page_steps import DRAWN, Open, check_width, figure, show, wait_until

from ensemble.reporting.text import visible

pytestmark = [pytest.mark.browser, pytest.mark.more]

VIEWS = ("overview", "members", "curves", "timeline", "placement", "pipeline", "search", "ensemble", "cost")
VIEWS += ("notices", "member?member=member-3")
NARROW = {"width": 400, "height": 800}


def tiles(tab: Any, what: str = "figure") -> dict[str, str]:
    """The figures on the tiles by their labels, or the notes below them."""
    found: dict[str, str] = tab.evaluate(
        """(what) => Object.fromEntries([...document.querySelectorAll("[data-mark='tile']")].map(
            (tile) => [tile.querySelector("dt").textContent, tile.querySelector("." + what).textContent]))""",
        what,
    )
    return found


def is_live(tab: Any, server: PageServer) -> bool:
    return server.followers("run") == 1 and tab.text_content(".connection") == "live"


# -- overview ---------------------------------------------------------------------------------------


def test_the_overview_says_how_the_run_stands(tab: Any, open_page: Open) -> None:
    documents = make_documents(40)
    run = documents["state"]["run"]
    run["totals"]["models"] = "5 finished, 2 pruned."
    open_page(documents)
    assert not tab.is_visible("text=All runs"), "one run opens at once"
    assert tab.text_content("h1") == "digits"
    assert tab.text_content(".pill") == "running"
    assert tab.text_content(".progress .figure") == "42 % done"
    assert "about 6:50 left" in tab.text_content(".progress")
    shown = tiles(tab)
    assert shown["Members finished"] == f"{run['counts']['finished']} of 40"
    assert shown["Best accuracy so far, on validation"] == f"{run['best']['value']:.4f}"
    assert shown["Reuse of prepared samples"] == "8.00×"
    assert shown["CPU time (measured)"] == "4,870 s"
    assert shown["Energy (measured)"] == "201 kJ"
    assert shown["Power now (measured)"] == "690 W"
    assert "while training" in tiles(tab, "note")["Samples a second"]
    assert tiles(tab, "note")["Models a minute"] == "5 finished, 2 pruned."
    assert tab.locator(".progress [data-mark='state']").count() == len(run["counts"])
    facts = tab.eval_on_selector_all("[data-mark='fact'] dd", "all => all.map(each => each.textContent)")
    assert facts == [fact["text"] for fact in run["facts"]]
    assert tab.locator("[data-mark='notice']").count() == 3
    curves = documents["curves"]["members"].values()
    highest = max(value for curve in curves for value in curve["values"]["accuracy"])
    wait_until(tab, lambda: f"accuracy {highest:.4f} of" in figure(tab, "Best of any epoch").inner_text())
    tab.click(".state-legend button:has-text('failed')")
    tab.wait_for_selector("[data-view='members']:not([data-drawn='0'])")
    assert tab.url.endswith("#members?filter=state%3Afailed")


def test_an_ended_run_shows_what_was_combined_and_of_which_samples_its_figures_are(
    tab: Any, open_page: Open
) -> None:
    documents = make_documents(40, ended=True)
    run = documents["state"]["run"]
    run["totals"]["node_energy_j"] = 402468.0
    open_page(documents)
    shown, said = tiles(tab), tiles(tab, "note")
    figures = run["combined"]["metrics"]
    assert shown["Combined accuracy, on test"] == f"{figures['ensemble']['accuracy']:.4f}"
    there = f"which has {figures['best']['accuracy']:.4f} there"
    assert said["Combined accuracy, on test"] == f"+0.0220 to the best member, {there}"
    assert shown["Wall time"] == "5 min 00 s"
    assert said["Best accuracy, on validation"] == run["best"]["member"]
    assert said["Energy (measured)"].startswith("of 402 kJ for the whole of the nodes")
    assert said["Models a minute"] == "finished and pruned, from the first start to the last end"
    assert tab.text_content(".connection") == "run ended"


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
    server = open_page(documents, "#ensemble")
    wait_until(tab, lambda: is_live(tab, server))
    assert tab.locator("text=No member has finished yet. >> visible=true").count() == 1
    assert tab.locator("[data-view=ensemble] figure >> visible=true").count() == 0, "one sentence for all figures"
    asked = f"/api/runs/{KEY}/quality"
    assert server.asked.count(asked) == 1
    server.documents["quality"] = make_documents(10, ended=True)["quality"]
    for step in range(1, 11):
        server.push({**make_change(documents["state"], step), "stale": ["quality"]})
    tab.wait_for_selector("[data-metric=accuracy] .dot-row")
    assert tab.locator("[data-view=ensemble] .absent >> visible=true").count() == 0
    assert server.asked.count(asked) == 2
    show(tab, "overview")
    tab.wait_for_selector("text=Combined accuracy so far")


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


DRIVER = "the controller (process 4711) is gone; `ensemble resume /data/runs/digits` goes on"


def test_a_run_without_its_controller_does_not_look_alive(tab: Any, open_page: Open) -> None:
    documents = make_documents(12)
    server = open_page(documents)
    wait_until(tab, lambda: tab.text_content(".connection") == "live")
    assert tab.locator("[data-mark='driver']").is_hidden()
    run = documents["state"]["run"] | {"driver": DRIVER, "state": {"word": "interrupted", "tone": "bad"}}
    server.push({"offset": 123457, "now": documents["state"]["now"], "run": run})
    tab.wait_for_selector("[data-mark='driver']")
    wait_until(tab, lambda: tab.text_content(".connection") == "standing still")
    assert "left" not in tab.text_content(".progress-head")
    for view in ("members", "timeline", "placement", "cost"):
        show(tab, view)
        said = tab.text_content("[data-mark='driver']")
        assert said.startswith(
            "The controller (process 4711) is gone; `ensemble resume /data/runs/digits` goes on."
        )
        assert "5:00" in said
    server.push({"offset": 123458, "now": documents["state"]["now"], "run": run | {"driver": None}})
    wait_until(tab, lambda: tab.locator("[data-mark='driver']").is_hidden())
    assert tab.text_content(".connection") == "live"


# -- many tabs of one browser, which has six connections to a server for all of them -----------------------------


def test_seven_tabs_are_drawn_and_all_get_every_change(tab: Any, open_page: Open) -> None:
    server = open_page(make_documents(4), "#member?member=member-0")
    tabs = [tab]
    for _ in range(6):
        tabs.append(tab.context.new_page())
        tabs[-1].goto(server.url + "#overview")
        tabs[-1].wait_for_selector(DRAWN)
    change = make_change(server.documents["state"], 1)
    server.push(change)
    for each in tabs:
        wait_until(each, lambda each=each: each.get_attribute("body", "data-offset") == str(change["offset"]))
    for each in tabs[1:]:
        each.close()


def test_a_run_has_one_stream_and_the_list_another(tab: Any, open_page: Open) -> None:
    server = open_page(make_documents(4), keys=("aa", "bb"))
    wait_until(tab, lambda: server.followers("runs") == 1)
    tab.click("main a")
    wait_until(tab, lambda: server.followers("run") == 1)
    wait_until(tab, lambda: (server.send("runs", ": still there\n\n"), server.followers("runs") == 0)[1])


# -- runs -------------------------------------------------------------------------------------------


def test_a_folder_lists_its_runs_and_each_can_be_opened(tab: Any, open_page: Open) -> None:
    open_page(make_documents(10), keys=("a1", "b2", "c3"))
    assert tab.locator("tr[data-member]:visible").count() == 3
    assert tab.text_content("h1") == "Runs"
    tab.click("tr[data-member] >> nth=1 >> a")
    tab.wait_for_selector("[data-view='overview']:not([data-drawn='0'])")
    assert "run=" in tab.url
    tab.keyboard.press("2")
    tab.wait_for_selector("[data-view='members']:not([data-drawn='0'])")
    assert "run=" in tab.url, "it is still that run"
    tab.click("text=All runs")
    tab.wait_for_selector("[data-view='runs']")


# -- a member ---------------------------------------------------------------------------------------


def test_a_member_has_a_figure_for_each_metric(tab: Any, open_page: Open) -> None:
    documents = make_documents(20)
    open_page(documents, "#member?member=member-0")
    curve = documents["curves"]["members"]["member-0"]
    tab.wait_for_selector("figure >> text=accuracy")
    loss = figure(tab, "loss")
    loss.locator("[data-mark=training]").wait_for(state="attached")
    dots = loss.locator(":is([data-mark=line], [data-mark=best]) circle:not(.best-ring)")
    assert dots.count() == len(curve["epoch"]), "in validation; in training it is dotted"
    tab.get_by_role("button", name="learning rate").click()
    figure(tab, "learning rate").locator("[data-member='member-0']").first.wait_for(state="attached")
    tab.click("figure:has-text('accuracy') button:has-text('as a table')")
    shown = tab.eval_on_selector_all("figure tbody tr", "rows => rows.map(row => row.cells[1].textContent)")
    assert shown == [f"{value:.4f}" for value in reversed(curve["values"]["accuracy"])]


def test_a_member_says_why_it_failed_and_whose_clone_it_is(tab: Any, open_page: Open) -> None:
    documents = make_documents(12)
    open_page(documents, "#member?member=member-3")
    row = dict(zip(COLUMNS, documents["state"]["members"]["rows"]["member-3"], strict=True))
    assert row["error"] in tab.text_content(".failure")
    assert row["advice"] in tab.text_content(".failure")
    assert tab.locator("[data-mark='attempt']").count() == 3
    shown = tab.eval_on_selector_all("[data-mark='param'] th", "all => all.map(each => each.textContent)")
    assert shown == list(row["params"])
    tab.evaluate("() => { location.hash = 'member?member=member-9'; }")
    tab.wait_for_selector(".member-head >> text=clone of member-1, with its weights of epoch 3")
    tab.evaluate("() => { location.hash = 'member?member=nobody'; }")
    tab.wait_for_selector("text=The run has no member of this name.")


def test_a_members_page_tells_its_own_best_from_that_of_all(tab: Any, open_page: Open) -> None:
    documents = make_documents(8)
    best = documents["state"]["run"]["best"]
    documents["curves"]["members"]["member-1"]["values"]["accuracy"] = [0.2, 0.7, 0.6, 0.5]
    documents["curves"]["members"]["member-1"]["epoch"] = list(range(4))
    open_page(documents, "#member?member=member-1")
    assert best["member"] != "member-1"
    wanted = f"best of all members, {best['member']}: {best['value']:.4f}; its own best 0.7000 after epoch 2"
    wait_until(tab, lambda: tiles(tab, "note")["accuracy"] == wanted)


def test_a_log_follows_stands_still_and_keeps_its_last_lines(tab: Any, open_page: Open) -> None:
    start = "".join(f"line {i} <b>\n" for i in range(100))
    server = open_page(make_documents(8), "#member?member=member-1", logs={"member-1": start})
    tab.wait_for_selector("pre.log >> text=line 99 <b>")
    at_end = "() => { const log = document.querySelector('pre.log'); return log.scrollTop + log.clientHeight >= log.scrollHeight - 2; }"  # fmt: skip # noqa: E501
    assert tab.evaluate(at_end)
    assert tab.locator("pre.log b").count() == 0
    tab.get_by_label("Follow").uncheck()
    place = tab.eval_on_selector("pre.log", "log => log.scrollTop")
    size = len(start)
    more = "".join(f"more {i}\n" for i in range(10_000))
    server.push_log("member-1", more, size)
    tab.wait_for_selector("pre.log >> text=more 9999")
    assert tab.eval_on_selector("pre.log", "log => log.scrollTop") == place
    assert tab.text_content("pre.log").startswith(start), "nothing moves under the reader's eyes"
    tab.get_by_label("Follow").check()
    server.push_log("member-1", "last\n", size + len(more))
    tab.wait_for_selector("pre.log >> text=last")
    lines = tab.text_content("pre.log").strip().split("\n")
    assert len(lines) == 4000
    assert lines[0] == "more 6001"
    assert tab.evaluate(at_end)
    assert tab.is_visible("text=the last 4,000 lines")


def test_a_log_is_left_with_its_page(tab: Any, open_page: Open) -> None:
    server = open_page(make_documents(8), "#member?member=member-1", logs={"member-1": "one\n"})
    wait_until(tab, lambda: server.followers("log member-1") == 1)
    tab.keyboard.press("1")
    tab.wait_for_selector("[data-view='overview']:not([data-drawn='0'])")
    assert tab.locator("[role=log]").count() == 0
    server.push_log("member-1", "x\n", 4)  # the server notices a reader that has gone when it writes
    wait_until(tab, lambda: (server.push_log("member-1", "x\n", 4), server.followers("log member-1") == 0)[1])


# -- the frame --------------------------------------------------------------------------------------


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


# -- what a reader with a small screen, a keyboard or a screen reader meets ---------------------------


def test_a_log_says_of_which_part_it_is_and_is_not_read_aloud(tab: Any, open_page: Open) -> None:
    logs = {"member-1": "x" * 99 + "\n", "member-2": ("x" * 1023 + "\n") * 100}
    open_page(make_documents(8), "#member?member=member-1", logs=logs)
    tab.wait_for_selector("[aria-label='Log'] >> text=/^1 line$/")
    assert tab.locator("[aria-label='Log'] :is([role=status], [aria-live=polite])").count() == 0
    tab.evaluate("() => { location.hash = 'member?member=member-2'; }")
    tab.wait_for_selector("[aria-label='Log'] >> text=the last 64 lines")


# -- what a reader with a small screen, a keyboard or a screen reader meets ---------------------------


def test_number_keys_open_the_views_in_the_order_of_the_tabs_and_the_help_names_them(
    tab: Any, open_page: Open
) -> None:
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


def test_hostile_names_stay_text_in_every_view_and_nothing_is_wider_than_the_screen(
    tab: Any, open_page: Open
) -> None:
    for ended in (False, True):
        documents = make_documents(40, hostile=True, ended=ended)
        documents["state"]["streams"][0] |= {"lost": [HOSTILE[0]], "design": "<b>x</b>", "nodes": ["<b>"]}
        documents["importances"]["importances"] = [["<i>evil</i>&amp;", 0.9], ["lr", 0.1]]
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
            for chart in tab.locator(
                "#view :is(canvas, .chart, [role=listbox])[tabindex='0'] >> visible=true"
            ).all():
                chart.focus()
                for _ in range(3):
                    tab.keyboard.press("ArrowDown")  # shows a tip
                    tab.keyboard.press("ArrowRight")
            click = "all => all.filter((each) => each.getClientRects().length).forEach((each) => each.click())"
            tab.eval_on_selector_all("#view button.as-table", click)
            assert tab.locator("#view :is(img, script, b, i, br)").count() == 0, view
            assert tab.evaluate("() => window.hacked === undefined"), view
            if view in ("curves", "timeline", "search", "cost"):
                assert HOSTILE[0] in tab.inner_text("#view"), view
        open_page(documents, "#notices")
        shown = tab.locator("nav a[aria-current=page]").bounding_box()
        assert shown["x"] >= 0 and shown["x"] + shown["width"] <= 400, "its tab, the last, is in sight"


def test_a_member_of_any_name_is_selected_and_opened(tab: Any, open_page: Open) -> None:
    open_page(make_documents(20, hostile=True), "#members")
    shown = tab.eval_on_selector_all("tr[data-member]", "rows => rows.map(row => row.dataset.member)")
    assert shown[: len(HOSTILE)] == list(HOSTILE)
    for name in HOSTILE:
        tab.evaluate("(name) => { location.hash = '#members?select=' + encodeURIComponent(name); }", name)
        wait_until(tab, lambda: tab.locator("tr[aria-selected='true']").count() == 1)
        assert tab.get_attribute("tr[aria-selected='true']", "data-member") == name
        tab.evaluate("(name) => { location.hash = '#member?member=' + encodeURIComponent(name); }", name)
        tab.wait_for_selector("[data-view='member']:not([data-drawn='0'])")
        assert tab.locator(".member-head h2").count() == 1
        assert not tab.is_visible("text=The run has no member of this name.")
        show(tab, "members")


def test_what_can_be_used_has_a_name_and_headings_leave_no_level_out(tab: Any, open_page: Open) -> None:
    documents = make_documents(12)

    def check(view: str) -> None:
        unnamed = tab.eval_on_selector_all(
            "a[href], button, input, select, textarea, [role=img], table, nav",
            """(all) => all.filter((each) => each.getClientRects().length)
                .filter((each) => !each.getAttribute("aria-label") && !each.textContent.trim())
                .filter((each) => !each.labels?.length)
                .map((each) => each.outerHTML.slice(0, 120))""",
        )
        assert unnamed == [], view
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
    documents["state"]["members"]["rows"]["member-3"][COLUMNS.index("error")] = error
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
    tab.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert tab.locator("[data-print=members] tr[data-member=member-3]").bounding_box()["height"] < 400
    for notice in tab.locator(".sheets [data-mark=notice]").all():
        assert notice.bounding_box()["height"] < 160


# -- causes and tables ------------------------------------------------------------------------------


def test_a_cause_stands_once_with_its_members_and_their_log(tab: Any, open_page: Open) -> None:
    documents = make_documents(12, hostile=True)
    server = open_page(documents)
    causes = tab.locator("[data-mark=failure]")
    assert causes.count() == 1 and "3 × loss is nan" in causes.inner_text()
    assert causes.locator("a").all_text_contents() == [visible(name) for name in HOSTILE[3:6]]
    causes.locator("summary").click()
    assert HOSTILE[0] in causes.locator("pre").inner_text()
    grouped = make_notice(70.0, "warning", "4 × failed (oom): no memory") | {"who": "a, attempt 1, b, attempt 2"}
    for count in (4, 5):  # a group that grows takes its own place
        change = make_change(documents["state"], count, touched=0)
        server.push(
            change | {"notices": [grouped | {"count": count, "text": f"{count} × failed (oom): no memory"}]}
        )
        tab.wait_for_selector(f"[data-mark=notice] >> text={count} × failed")
    assert tab.locator("[data-mark=notice] >> text=failed (oom)").count() == 1
    assert "b, attempt 2" in tab.locator("[data-mark=notice]").first.inner_text()


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
    show(tab, "members")
    tab.click(".chooser summary")
    tab.click(".chooser label:has-text('sent by a worker')")
    tab.keyboard.press("Escape")
    tab.click("th[data-column='exchange sent by a worker'] button")
    place = tab.locator("thead th").evaluate_all(
        "all => all.findIndex((e) => e.dataset.column.includes('sent by'))"
    )
    cells = tab.locator(f"tr[data-member] td:nth-child({place + 1})")
    assert cells.all_inner_texts()[:5] == ["9 KiB", "6 KiB", "3 KiB", "0 KiB", "–"], "sorted by its number"
    show(tab, "member?member=member-3")
    tab.wait_for_selector("[aria-label=Measured] >> text=3 KiB")
