"""The documentation as a site: it builds without a warning, and needs no host but the one that serves it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.more

ROOT = Path(__file__).parents[2]
CHROMIUM = Path("/usr/bin/chromium")  # Debian's; Playwright's own would have to be downloaded

#: Attributes by which a browser fetches something by itself; `a href` is followed by readers only.
FETCHED = {"src", "srcset", "data", "poster", "action"}


class Fetches(HTMLParser):
    """What a page makes a browser fetch."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found += [value or "" for name, value in attrs if name in FETCHED]
        if tag == "link" and dict(attrs).get("rel") != "canonical":
            self.found.append(dict(attrs).get("href") or "")


def test_every_page_of_the_documentation_is_in_the_site_and_in_its_navigation(site: Path) -> None:
    pages = [path.relative_to(ROOT / "docs").with_suffix(".html") for path in (ROOT / "docs").rglob("*.md")]
    home = (site / "index.html").read_text()
    sections = {page.parts[0] for page in pages if len(page.parts) > 1}
    assert sections and all(f'href="{section}/index.html"' in home for section in sections)
    for page in pages:
        assert (site / page).is_file(), page
        if len(page.parts) > 1:  # the tab of the section lists its pages
            entries = (site / page.parts[0] / "index.html").read_text()
            assert page.stem == "index" or f'href="{page.name}"' in entries, page


def test_language_models_find_an_index_and_the_text_of_all_pages(site: Path) -> None:
    links = set(re.findall(r"^- \[.+\]\((\S+)\): \S", (site / "llms.txt").read_text(), re.MULTILINE))
    pages = {str(path.relative_to(ROOT / "docs").with_suffix(".html")) for path in (ROOT / "docs").rglob("*.md")}
    whole = (site / "llms-full.txt").read_text()
    assert pages <= links == set(re.findall(r"^<!-- (\S+\.html) -->$", whole, re.MULTILINE))
    assert "\n## ensemble.submit\n" in whole and "\n::: " not in whole


def test_the_site_fetches_nothing_from_elsewhere(site: Path) -> None:
    foreign = []
    for path in site.rglob("*.html"):
        fetches = Fetches()
        fetches.feed(path.read_text())
        foreign += [(path.name, found) for found in fetches.found if re.match(r"(?:[a-z]+:)?//", found)]
    for path in site.rglob("*.css"):
        fetched = re.findall(r"url\(['\"]?((?:https?:)?//[^)]*)", path.read_text())
        foreign += [(path.name, found) for found in fetched]
    assert foreign == []


@pytest.fixture(scope="module")
def tab(site: Path) -> Iterator[Any]:
    """A page of a browser; an error in a script fails the test."""
    playwright = pytest.importorskip("playwright.sync_api")
    if not CHROMIUM.exists():
        pytest.skip(f"there is no {CHROMIUM}")
    wrong: list[str] = []
    with playwright.sync_playwright() as started:
        options = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        browser = started.chromium.launch(executable_path=str(CHROMIUM), args=options)
        page = browser.new_page(viewport={"width": 400, "height": 900})
        page.set_default_timeout(60_000)
        page.on("pageerror", lambda error: wrong.append(str(error)))
        yield page
        browser.close()
    assert wrong == []


@pytest.mark.browser
def test_the_search_works_on_a_site_that_is_opened_from_a_disk(site: Path, tab: Any) -> None:
    tab.goto((site / "how-to" / "index.html").as_uri())
    tab.click("label.md-header__button[for=__search]")
    tab.wait_for_selector("[data-md-component=search-query]:focus")
    tab.keyboard.type("flotilla")
    tab.wait_for_selector("a.md-search-result__link[href*='flotillas.html']")
