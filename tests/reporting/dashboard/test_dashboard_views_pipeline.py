"""The view "Pipeline" in a real browser: the flow of each stream, where it is slow, who waits, what is lost."""

from __future__ import annotations

from typing import Any

import pytest
from documents import make_documents
from page_steps import Open

from ensemble.reporting.dashboard.streams import group_streams

pytestmark = [pytest.mark.browser, pytest.mark.more]


VIEW = "[data-view=pipeline]"
PREPARATION = "preparation (a member waited 61% of the time): try prep_workers=8"
LINKS = "the links between nodes (a member waited 70% of the time, links were used 80%): try sharing='node'"


def fill_of(tab: Any, part: str, cohort: int = 0) -> float:
    fill = f"{VIEW} [data-cohort='{cohort}'] [data-part={part}] .level-fill"
    return float(tab.locator(fill).evaluate("each => each.style.width").rstrip("%"))


def test_a_stream_is_drawn_with_rates_levels_and_where_it_is_slow(tab: Any, open_page: Open) -> None:
    documents = make_documents(8)
    documents["state"]["run"]["samples"] = 1078
    stream = documents["state"]["streams"][0]["streams"][0]
    stream |= {"slow": "preparation", "limit": PREPARATION, "skipped": 3, "restarts": 2, "detached": 1}
    stream["cache"] = {"samples": 900, "bytes": 3 << 20, "limit": 1 << 30, "hits": 120, "wrong": 0}
    documents["state"]["streams"] = group_streams([stream])
    open_page(documents, "#pipeline")
    card = tab.locator(f"{VIEW} [data-cohort='0']")
    parts = card.locator("[data-part]").evaluate_all("all => all.map(each => each.dataset.part)")
    assert parts == ["source", "preparation", "ring", "members"]
    text = card.inner_text()
    assert "Limited by preparation (a member waited 61% of the time): try prep_workers=8." in text
    assert "2,600/s" in text and "20,800/s" in text and "used 8.00 times" in text
    assert "1,078 samples" in text and "4,096 samples" in text and "1.07 MiB" in text and "4 workers" in text
    assert "3 bad records" in text and "2 workers restarted" in text and "1 left and work alone" in text
    assert "900 kept (3 MiB of 1 GiB), 120 read again" in text
    assert (fill_of(tab, "preparation"), fill_of(tab, "ring"), fill_of(tab, "members")) == (47, 90, 61)
    slow = card.locator("[data-mark=slow]")
    assert slow.count() == 1
    assert card.locator(".slow").get_attribute("data-part") == "preparation"
    assert "12,936 samples prepared, 103,488 consumed" in tab.locator(f"{VIEW} .pipeline-summary").inner_text()


def test_streams_of_several_nodes_are_one_flow_and_a_row_each(tab: Any, open_page: Open) -> None:
    documents = make_documents(8)
    first = documents["state"]["streams"][0]["streams"][0]
    first |= {
        "nodes": ["node-0", "node-1"],
        "design": "multi",
        "slow": "links",
        "limit": LINKS,
        "sent_bytes": 3 << 28,
    }
    first["levels"]["link"] = 0.8
    second = {**first, "node": "node-1", "prepared_per_s": 400.0}
    documents["state"]["streams"] = group_streams([first, second])
    open_page(documents, "#pipeline")
    assert tab.locator(f"{VIEW} .stream").count() == 1
    text = tab.locator(f"{VIEW} .stream").inner_text()
    assert "multi design" in text and "1.5 GiB sent" in text and "3,000/s" in text and "2 nodes" in text
    assert tab.locator(f"{VIEW} .slow").get_attribute("data-part") == "links"
    assert tab.locator(f"{VIEW} tbody tr").count() == 2


def test_a_lost_feeder_is_said_and_a_change_moves_the_levels(tab: Any, open_page: Open) -> None:
    documents = make_documents(8)
    streams = documents["state"]["streams"]
    server = open_page(documents, "#pipeline")
    streams[0] |= {"lost": ["the feeder of stream group 0 ended"], "prepared_per_s": None, "consumed_per_s": None}
    streams[1]["levels"] = {"ring": 0.25, "workers": 0.5, "waiting": 0.75}
    change = {"offset": documents["state"]["offset"] + 9, "now": documents["state"]["now"], "streams": streams}
    server.push(change)
    tab.wait_for_selector(f"{VIEW} [data-cohort='0'] [data-mark=lost]")
    assert fill_of(tab, "members", 1) == 75
    assert tab.locator(f"{VIEW} [data-cohort='0'] .rate").count() == 0


def test_nothing_shared_is_said(tab: Any, open_page: Open) -> None:
    documents = make_documents(8)
    documents["state"]["streams"] = []
    open_page(documents, "#pipeline")
    assert "every member prepares its own samples" in tab.locator(f"{VIEW} .absent").inner_text()


def test_members_hang_on_their_stream_those_that_wait_most_first_and_are_selected(
    tab: Any, open_page: Open
) -> None:
    documents = make_documents(60)
    state = documents["state"]
    columns = state["members"]["columns"]
    expected = []
    for name, row in state["members"]["rows"].items():
        member = dict(zip(columns, row, strict=True))
        if member["cohort"] == 0 and member["state"] in ("placed", "running"):
            expected.append((-1 if member["waited"] is None else member["waited"], name))
    open_page(documents, "#pipeline")
    readers = tab.locator(f"{VIEW} [data-cohort='0'] [data-mark=reader]")
    names = readers.evaluate_all("all => all.map(each => each.dataset.member)")
    assert sorted(names) == sorted(name for _, name in expected)
    assert names[0] == max(expected)[1]
    alone = tab.locator(f"{VIEW} [data-mark=reader]", has_text="25 % of its batches prepared alone")
    assert set(alone.evaluate_all("all => all.map(each => +each.dataset.member.split('-')[1] % 4)")) == {2}
    readers.first.focus()
    tab.keyboard.press("ArrowRight")
    tab.keyboard.press("Enter")
    tab.wait_for_function("n => location.hash.includes(`select=${n}`)", arg=names[1])
    tab.wait_for_selector(f"{VIEW} [data-member={names[0]}].pale")
