"""What tests do with a page: open it, wait for it, look at it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from dashboard_process import Server
from page_server import PageServer

Open = Callable[..., PageServer]

HANG_S = 300.0  # no test is about how long something takes: this only ends one that hangs

DRAWN = "[data-view]:not([data-drawn='0'])"
#: What else is there once a view has drawn what its tests are about.
MARKS = {
    "curves": "figure :is([data-mark=line], [data-mark=best])",
    "cost": "[data-table=cost_of_roles]",
    "placement": ".node",
    "search": ".bar-row",
}
COMPARED = "() => !document.querySelector('[data-view]').innerText.includes('are being compared')"


def wait_until(page: Any, is_so: Callable[[], Any]) -> None:
    until = time.monotonic() + HANG_S
    while not is_so():
        assert time.monotonic() < until, "it did not happen"
        page.wait_for_timeout(20)


def enter(tab: Any, server: Server) -> None:
    name, _, value = server.cookie.partition("=")
    tab.context.add_cookies([{"name": name, "value": value, "url": server.page}])
    tab.goto(server.page)
    tab.wait_for_selector(DRAWN)


def show(tab: Any, view: str) -> str:
    tab.evaluate("view => { location.hash = view; }", view)
    drawn = tab.locator(f"[data-view={view.partition('?')[0]}]:not([data-drawn='0'])")
    return str(drawn.inner_text())  # no handle is kept, which would keep the view after it was closed


def check_width(tab: Any, width: int) -> None:
    """Nothing is wider than a screen of so many pixels; charts are drawn anew in a moment when it has changed."""
    tab.set_viewport_size({"width": width, "height": 800})
    tab.wait_for_function("width => document.documentElement.scrollWidth <= width", arg=width)
