"""Many tabs of one browser, which has six connections to a server for all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from conftest import DRAWN, wait_until
from documents import make_change, make_documents
from page_server import PageServer

Open = Callable[..., PageServer]

pytestmark = pytest.mark.browser


def test_ten_tabs_are_drawn_and_all_get_every_change(tab: Any, open_page: Open) -> None:
    server = open_page(make_documents(4), "#member?member=member-0")
    tabs = [tab]
    for _ in range(9):
        tabs.append(tab.context.new_page())
        tabs[-1].goto(server.url + "#overview")
        tabs[-1].wait_for_selector(DRAWN)
    change = make_change(server.documents["state"], 1)
    server.push(change)
    for each in tabs:
        wait_until(each, lambda each=each: each.get_attribute("body", "data-offset") == str(change["offset"]))


def test_a_run_has_one_stream_and_the_list_another(tab: Any, open_page: Open) -> None:
    server = open_page(make_documents(4), keys=("aa", "bb"))
    wait_until(tab, lambda: server.followers("runs") == 1)
    tab.click("main a")
    wait_until(tab, lambda: server.followers("run") == 1)
    wait_until(tab, lambda: (server.send("runs", ": still there\n\n"), server.followers("runs") == 0)[1])
