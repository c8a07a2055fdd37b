"""The page of a run whose controller is gone: every view says so, and nothing looks alive."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from conftest import wait_until
from documents import make_documents
from page_server import PageServer

pytestmark = pytest.mark.browser

DRIVER = "the controller (process 4711) is gone; `ensemble resume /data/runs/digits` goes on"


def test_a_run_without_its_controller_does_not_look_alive(tab: Any, open_page: Callable[..., PageServer]) -> None:
    documents = make_documents(12)
    server = open_page(documents)
    wait_until(tab, lambda: tab.text_content(".connection") == "live")
    assert tab.locator("[data-mark='driver']").is_hidden()
    assert "now" in tab.locator(".step-chart").text_content()
    run = documents["state"]["run"] | {"driver": DRIVER, "state": {"word": "interrupted", "tone": "bad"}}
    server.push({"offset": 123457, "now": documents["state"]["now"], "run": run})
    tab.wait_for_selector("[data-mark='driver']")
    wait_until(tab, lambda: tab.text_content(".connection") == "standing still")
    assert "left" not in tab.text_content(".progress-head")
    wait_until(tab, lambda: "now" not in tab.locator(".step-chart").text_content())
    for view in ("members", "timeline", "placement", "cost"):
        tab.goto(f"{server.url}#{view}")
        tab.wait_for_selector(f"[data-view={view}]:not([data-drawn='0'])")
        said = tab.text_content("[data-mark='driver']")
        assert said.startswith(
            "The controller (process 4711) is gone; `ensemble resume /data/runs/digits` goes on."
        )
        assert "5:00" in said
    server.push({"offset": 123458, "now": documents["state"]["now"], "run": run | {"driver": None}})
    wait_until(tab, lambda: tab.locator("[data-mark='driver']").is_hidden())
    assert tab.text_content(".connection") == "live"
