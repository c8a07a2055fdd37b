"""What the page's tests run in: its modules in Node, and a real Chromium, one for the tests of a file."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from page_server import STATIC, PageServer
from page_steps import COMPARED, DRAWN, HANG_S, MARKS, Open

CHROMIUM = Path("/usr/bin/chromium")  # Debian's; Playwright's own would have to be downloaded
#: Evaluates a line of JSON, [modules, code, arguments], to one: [value] or the text of an error.
EVALUATE = """
import { createInterface } from "node:readline";
for await (const line of createInterface({ input: process.stdin })) {
  const [modules, code, values] = JSON.parse(line);
  let said;
  try {
    const found = await Promise.all(modules.split(" ").map((module) => import(`${process.argv[2]}/${module}`)));
    said = [(await (0, eval)(code)(Object.assign({}, ...found), ...values)) ?? null];
  } catch (error) {
    said = String(error.stack);
  }
  console.log(JSON.stringify(said));
}
"""


@pytest.fixture(scope="session")
def node() -> str:
    return shutil.which("node") or str(Path(pytest.importorskip("playwright").__file__).parent / "driver" / "node")


@pytest.fixture(scope="module")
def call(node: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Any]]:
    """`call("format.js", "(m, x) => m.number(x)", 3.5)` runs code on modules of the page, which draw nothing."""
    folder = tmp_path_factory.mktemp("modules")
    shutil.copytree(STATIC, folder / "static")
    (folder / "package.json").write_text('{"type": "module"}')
    (folder / "evaluate.js").write_text(EVALUATE)
    command = [node, folder / "evaluate.js", (folder / "static").as_uri()]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, encoding="utf-8") as process:

        def run(modules: str, code: str, *values: Any) -> Any:
            assert process.stdin is not None and process.stdout is not None
            print(json.dumps([modules, code, values]), file=process.stdin, flush=True)
            said = json.loads(process.stdout.readline())
            assert isinstance(said, list), said
            return said[0]

        yield run  # in the end its input is closed, and it ends


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A browser; it ends with its module, as Playwright's loop keeps other tests from running one of their own."""
    playwright = pytest.importorskip("playwright.sync_api")
    if not CHROMIUM.exists():
        pytest.skip(f"there is no {CHROMIUM}")
    options = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
    with playwright.sync_playwright() as started:
        running = started.chromium.launch(executable_path=str(CHROMIUM), args=options)
        yield running
        running.close()


def open_tab(browser: Any, errors: list[str]) -> Any:
    """A page in a context of its own; notes errors that no script caught."""
    tab = browser.new_context(viewport={"width": 1280, "height": 900}, color_scheme="light").new_page()
    tab.on("pageerror", lambda error: errors.append(str(error)))
    tab.on("console", lambda message: errors.append(message.text) if "Content Security" in message.text else None)
    tab.on("dialog", lambda dialog: (errors.append(f"a dialog: {dialog.message}"), dialog.dismiss()))
    tab.set_default_timeout(1000 * HANG_S)
    return tab


@pytest.fixture(scope="module")
def shared_tab(browser: Any) -> tuple[Any, list[str]]:
    """One page for the tests of a file, and its errors: a context for each would cost as much as what they do."""
    errors: list[str] = []
    return open_tab(browser, errors), errors


@pytest.fixture
def tab(shared_tab: tuple[Any, list[str]]) -> Iterator[Any]:
    """The page of this file's tests, as it was at first; an error that no script caught fails the test."""
    tab, errors = shared_tab
    errors.clear()
    tab.set_viewport_size({"width": 1280, "height": 900})
    tab.emulate_media(color_scheme="light")
    yield tab
    tab.goto("about:blank")  # nothing of this test goes on in the next
    assert errors == []


@pytest.fixture
def own_tab(browser: Any) -> Iterator[Any]:
    errors: list[str] = []
    tab = open_tab(browser, errors)
    yield tab
    tab.context.close()
    assert errors == []


@pytest.fixture(scope="module")
def page_server() -> Iterator[PageServer]:
    """One server for the tests of a file: the browser keeps the page's modules."""
    with PageServer() as server:
        yield server


@pytest.fixture
def open_page(tab: Any, page_server: PageServer) -> Open:
    """`open_page(documents, "#members", logs=...)` serves documents and opens the page on them."""

    def open_(documents: dict[str, Any], address: str = "", **options: Any) -> PageServer:
        tab.goto(page_server.url + "static/icon.svg")  # of the same origin: nothing runs in it
        tab.evaluate("localStorage.clear()")
        page_server.show(documents, **options)
        tab.goto(page_server.url + address)
        tab.wait_for_selector(DRAWN)
        view = address.removeprefix("#").partition("?")[0]
        if view in MARKS:
            tab.wait_for_selector(f"[data-view={view}] {MARKS[view]}", state="attached")
        elif view == "ensemble":
            tab.wait_for_function(COMPARED)
        return page_server

    return open_
