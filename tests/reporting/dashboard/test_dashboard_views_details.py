"""The view "Details" of the live page, in a real browser."""

from __future__ import annotations

from typing import Any

import pytest
from documents import make_documents
from page_server import PageServer

pytestmark = pytest.mark.browser


def test_the_tables_are_those_of_now_each_time_the_view_is_opened(tab: Any) -> None:
    documents = make_documents(12)
    with PageServer(documents) as server:
        tab.goto(server.url + "#details")
        tab.wait_for_selector("[data-table='cost_of_roles'] >> text=1,235")
        assert tab.locator("[data-table='exchange'] tr[data-member]").count() == 12
        assert tab.inner_text("#view .absent") == "Packing cannot be shown: KeyError: 'members'."
        documents["tables"]["tables"][1]["rows"][0][1] = 4321.0
        tab.click(".tab[href^='#notices']")
        tab.wait_for_selector("[data-view='notices']")
        tab.click(".tab[href^='#details']")
        tab.wait_for_selector("[data-table='cost_of_roles'] >> text=4,321")
        assert sum(path.endswith("/tables") for path in server.asked) == 2


def test_a_share_is_shown_in_words_and_sorted_by_its_number(tab: Any) -> None:
    with PageServer(make_documents(12)) as server:
        tab.goto(server.url + "#details")
        tab.click("[data-table='exchange'] th[data-column='column 3'] button")
        cells = tab.locator("[data-table='exchange'] tr[data-member] td:nth-child(4)")
        assert cells.all_inner_texts() == ["9 KiB", "6 KiB", "3 KiB", "0 KiB", *[""] * 8]
