"""The documentation as a site: it builds without a warning, and needs no host but the one that serves it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

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


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site as `make docs` builds it."""
    folder = tmp_path_factory.mktemp("docs") / "site"
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    env = os.environ | {"NO_MKDOCS_2_WARNING": "1", "NO_COLOR": "1"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "WARNING" not in done.stdout + done.stderr
    return folder


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
