"""A real Chromium for the tests of the live page."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from page_server import PageServer

CHROMIUM = Path("/usr/bin/chromium")  # Debian's; Playwright's own would have to be downloaded

#: Of a view that has been drawn at least once.
DRAWN = "[data-view]:not([data-drawn='0'])"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A running browser; the test is skipped where there is none.

    While Playwright runs, its event loop keeps other tests from running one of their own: it ends with its module.
    """
    playwright = pytest.importorskip("playwright.sync_api")
    if not CHROMIUM.exists():
        pytest.skip(f"there is no {CHROMIUM}")
    with playwright.sync_playwright() as started:
        running = started.chromium.launch(
            executable_path=str(CHROMIUM), args=["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        )
        yield running
        running.close()


@pytest.fixture
def tab(browser: Any) -> Iterator[Any]:
    """A fresh page in a context of its own; an error that no script caught fails the test."""
    context = browser.new_context(viewport={"width": 1280, "height": 900}, color_scheme="light")
    page = context.new_page()
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("console", lambda message: errors.append(message.text) if "Content Security" in message.text else None)
    page.on("dialog", lambda dialog: (errors.append(f"a dialog: {dialog.message}"), dialog.dismiss()))
    page.set_default_timeout(15_000)
    yield page
    context.close()
    assert errors == []


@pytest.fixture
def open_page(tab: Any) -> Iterator[Callable[..., PageServer]]:
    """`open_page(documents, "#members", logs=...)` serves documents and opens the page on them."""
    servers: list[PageServer] = []

    def open_(documents: dict[str, Any], address: str = "", **options: Any) -> PageServer:
        server = PageServer(documents, **options).__enter__()
        servers.append(server)
        tab.goto(server.url + address)
        tab.wait_for_selector(DRAWN)
        return server

    yield open_
    tab.goto("about:blank")
    for server in servers:
        server.__exit__()


def wait_until(page: Any, is_so: Callable[[], Any], timeout_s: float = 15.0) -> None:
    """Waits until something holds in the page or in the server; the browser's events go on meanwhile."""
    waited = 0.0
    while not is_so():
        assert waited < timeout_s, "it did not happen"
        page.wait_for_timeout(20)
        waited += 0.02
