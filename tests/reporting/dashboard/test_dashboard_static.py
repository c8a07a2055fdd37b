"""The files of the live page keep the rules that its safety and the linker rest on, and its colours are seen."""

from __future__ import annotations

import re
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from page_server import STATIC

SCRIPTS = sorted(STATIC.rglob("*.js"))
IMPORT = re.compile(r'^import \{ \w+(?:, \w+)* \} from "(\.\.?/[\w/]+\.js)";$')
EXPORT = re.compile(r"^export (?:async )?(?:function|const|class) (\w+)")
FORBIDDEN = (
    *(r"\b(?:inner|outer)HTML\b", r"\binsertAdjacentHTML\b", r"\bcreateContextualFragment\b", r"\bDOMParser\b"),
    *(r"\bsetHTML\w*\(", r"\bdocument\.write", r"\beval\(", r"\bnew Function\b", r"\bimport\("),
    r"\bhttps?://(?!www\.w3\.org/)",
)


def name_of(path: Path) -> str:
    return str(path.relative_to(STATIC))


def plain(path: Path) -> str:
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


Array = np.ndarray[Any, np.dtype[np.float64]]

XYZ = np.array(
    [[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.0721750], [0.0193339, 0.1191920, 0.9503041]]
)


def read_colours(text: str) -> Array:
    found = re.findall(r"#([0-9a-f]{6})\b", text)
    given = np.array([[int(each[i : i + 2], 16) for i in (0, 2, 4)] for each in found]) / 255
    return np.where(given <= 0.04045, given / 12.92, ((given + 0.055) / 1.055) ** 2.4)


def contrast(one: Array, other: Array) -> Array:
    pair = np.stack(np.broadcast_arrays(one @ XYZ[1], other @ XYZ[1])) + 0.05
    return np.asarray(pair.max(0) / pair.min(0))


def test_twelve_members_have_colours_that_are_seen_on_every_card() -> None:
    store, style = (STATIC / "store.js").read_text(), (STATIC / "style.css").read_text()
    series = read_colours(store.split("SERIES = [")[1].split("]")[0])
    assert len(np.unique(series, axis=0)) == 12
    for card in {*re.findall(r"--card: (#[0-9a-f]{6})", style)}:
        assert contrast(series, read_colours(card)).min() > 2.85, card


def themes() -> list[dict[str, str]]:
    style = (STATIC / "style.css").read_text(encoding="utf-8")
    blocks = re.findall(r":root(\S*) \{(.*?)\}", style, re.S)
    found = [dict(re.findall(r"--(\w+): (#[0-9a-f]{6})", body)) for _, body in blocks]
    light, *dark = [colours for colours in found if "bg" in colours]
    assert all(colours == dark[0] for colours in dark), "dark by the system and dark by the button are one"
    return [light, dark[0]]


def test_text_has_contrast_aa_on_every_ground() -> None:
    for colours, ground in product(themes(), ("bg", "card", "hover", "chosen")):
        inks = [read_colours(colours[ink]) for ink in ("ink", "soft", "accent", "good", "warn", "bad")]
        assert min(contrast(ink, read_colours(colours[ground])).min() for ink in inks) >= 4.5, ground
