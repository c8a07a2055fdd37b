"""The files of the live page keep the rules that its safety and the report's linker rest on."""

from __future__ import annotations

import re
from itertools import product
from pathlib import Path

from page_server import STATIC

SCRIPTS = sorted(STATIC.rglob("*.js"))
IMPORT = re.compile(r'^import \{ \w+(?:, \w+)* \} from "(\.\.?/[\w/]+\.js)";$')
EXPORT = re.compile(r"^export (?:async )?(?:function|const|class) (\w+)")
FORBIDDEN = (
    r"\b(?:inner|outer)HTML\b",
    r"\binsertAdjacentHTML\b",
    r"\bcreateContextualFragment\b",
    r"\bDOMParser\b",
    r"\bsetHTML\w*\(",
    r"\bdocument\.write",
    r"\beval\(",
    r"\bnew Function\b",
    r"\bimport\(",
    r"\bhttps?://(?!www\.w3\.org/)",
)


def name_of(path: Path) -> str:
    return str(path.relative_to(STATIC))


def plain(path: Path) -> str:
    """A script without its comments."""
    text = re.sub(r"/\*.*?\*/", "", path.read_text(encoding="utf-8"), flags=re.S)
    return re.sub(r"(^|\s)//.*", "", text)


def exports(path: Path) -> set[str]:
    return {found[1] for line in path.read_text(encoding="utf-8").splitlines() if (found := EXPORT.match(line))}


def test_no_script_makes_markup_or_code_from_text() -> None:
    found = [(name_of(path), each) for path in SCRIPTS for each in FORBIDDEN if re.search(each, plain(path))]
    assert found == []


def test_imports_and_exports_have_the_forms_that_the_linker_reads() -> None:
    for path in SCRIPTS:
        for line in path.read_text(encoding="utf-8").splitlines():
            if re.match(r"\s*import\b(?!\()", line) and not line.lstrip().startswith("import.meta"):
                found = IMPORT.match(line)
                assert found, (name_of(path), line)
                target = (path.parent / found[1]).resolve()
                assert target.is_file(), (name_of(path), line)
                names = set(re.findall(r"\w+", line[line.index("{") : line.index("}")]))
                assert names <= exports(target), (name_of(path), line)
            if re.match(r"\s*export\b", line):
                assert EXPORT.match(line), (name_of(path), line)


def test_each_export_is_described_and_each_file_is_short() -> None:
    for path in SCRIPTS:
        lines = path.read_text(encoding="utf-8").splitlines()
        assert len(lines) <= 400, name_of(path)
        assert lines[0].startswith("/**"), f"{name_of(path)} begins with what it is for"
        for number, line in enumerate(lines):
            if EXPORT.match(line) and "function" in line:
                assert lines[number - 1].strip().endswith("*/"), (name_of(path), line)


def test_the_page_loads_no_script_of_its_own_text_and_nothing_from_elsewhere() -> None:
    page = (STATIC / "index.html").read_text(encoding="utf-8")
    assert re.findall(r"<script(?![^>]*\bsrc=)", page) == []
    assert re.findall(r"\bon\w+=", page) == []
    assert all(not link.startswith(("http", "//")) for link in re.findall(r'(?:src|href)="([^"]+)"', page))
    style = (STATIC / "style.css").read_text(encoding="utf-8")
    assert "@import" not in style
    assert "url(" not in style


def test_every_view_is_listed_once() -> None:
    index = (STATIC / "views" / "index.js").read_text(encoding="utf-8")
    imported = re.findall(r"import \{ (\w+View) \}", index)
    listed = re.findall(r"\w+View", index[index.index("export const VIEWS") :])
    made = {name for path in SCRIPTS for name in exports(path) if name.endswith("View")}
    assert sorted(listed) == sorted(imported) == sorted(made)


def _luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def _themes() -> dict[str, dict[str, str]]:
    style = (STATIC / "style.css").read_text(encoding="utf-8")
    blocks = re.findall(r":root(\S*) \{(.*?)\}", style, re.S)
    found = [dict(re.findall(r"--(\w+): (#[0-9a-f]{6})", body)) for _, body in blocks]
    light, *dark = [colours for colours in found if "bg" in colours]
    assert all(colours == dark[0] for colours in dark), "dark by the system and dark by the button are one"
    return {"light": light, "dark": dark[0]}


def test_text_has_contrast_aa_on_every_ground() -> None:
    inks = ("ink", "soft", "accent", "good", "warn", "bad")
    for theme, colours in _themes().items():
        for ground, ink in product(("bg", "card", "hover", "chosen"), inks):
            low, high = sorted(_luminance(colours[name]) for name in (ink, ground))
            assert (high + 0.05) / (low + 0.05) >= 4.5, (theme, ground, ink)
