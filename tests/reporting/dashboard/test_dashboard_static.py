"""The files of the live page keep the rules that its safety and the linker rest on, and its colours are seen."""

from __future__ import annotations

import re
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import numpy as np
from page_server import STATIC

SCRIPTS = sorted(STATIC.rglob("*.js"))
FORBIDDEN = [r"\b(?:inner|outer)HTML\b", r"\binsertAdjacentHTML\b", r"\bcreateContextualFragment\b"]
FORBIDDEN += [r"\bDOMParser\b", r"\bsetHTML\w*\(", r"\bdocument\.write", r"\beval\(", r"\bnew Function\b"]
FORBIDDEN += [r"\bimport\(", r"\bhttps?://(?!www\.w3\.org/)"]


def plain(path: Path) -> str:
    text = re.sub(r"/\*.*?\*/", "", path.read_text(encoding="utf-8"), flags=re.S)
    return re.sub(r"(^|\s)//.*", "", text)


def test_no_script_makes_markup_or_code_from_text() -> None:
    assert [(path, form) for path in SCRIPTS for form in FORBIDDEN if re.search(form, plain(path))] == []


def test_scripts_are_short_and_say_what_they_and_what_they_export_are_for() -> None:
    for path in SCRIPTS:
        lines = path.read_text(encoding="utf-8").splitlines()
        assert len(lines) <= 400 and lines[0].startswith("/**"), path
        exported = [before for before, line in pairwise(lines) if re.match(r"export (async )?function", line)]
        assert [before for before in exported if not before.strip().endswith("*/")] == [], path


def test_the_page_loads_no_script_of_its_own_text_and_nothing_from_elsewhere() -> None:
    page = (STATIC / "index.html").read_text(encoding="utf-8")
    assert re.findall(r"<script(?![^>]*\bsrc=)", page) == []
    assert re.findall(r"\bon\w+=", page) == []
    assert all(not link.startswith(("http", "//")) for link in re.findall(r'(?:src|href)="([^"]+)"', page))
    style = (STATIC / "style.css").read_text(encoding="utf-8")
    assert "@import" not in style and "url(" not in style


def test_every_view_is_listed_once() -> None:
    index = (STATIC / "views" / "index.js").read_text(encoding="utf-8")
    imported = re.findall(r"import \{ (\w+View) \}", index)
    listed = re.findall(r"\w+View", index[index.index("export const VIEWS") :])
    assert sorted(listed) == sorted(imported), "that all are imported says the linker"


Array = np.ndarray[Any, np.dtype[np.float64]]
LUMINANCE = np.array([0.2126729, 0.7151522, 0.0721750])


def read_colours(text: str) -> Array:
    given = np.array([[*bytes.fromhex(colour)] for colour in re.findall(r"#([0-9a-f]{6})\b", text)]) / 255
    return np.where(given <= 0.04045, given / 12.92, ((given + 0.055) / 1.055) ** 2.4)


def contrast(one: Array, other: Array) -> Array:
    pair = np.stack(np.broadcast_arrays(one @ LUMINANCE, other @ LUMINANCE)) + 0.05
    return np.asarray(pair.max(0) / pair.min(0))


def test_twelve_members_have_colours_that_are_seen_on_every_card() -> None:
    store, style = (STATIC / "store.js").read_text(), (STATIC / "style.css").read_text()
    series = read_colours(store.split("SERIES = [")[1].split("]")[0])
    assert len(np.unique(series, axis=0)) == 12
    for card in {*re.findall(r"--card: (#[0-9a-f]{6})", style)}:
        assert contrast(series, read_colours(card)).min() > 2.85, card


def test_text_has_contrast_aa_on_every_ground() -> None:
    style = (STATIC / "style.css").read_text(encoding="utf-8")
    blocks = re.findall(r":root\S* \{(.*?)\}", style, re.S)
    light, *dark = (dict(re.findall(r"--(\w+): (#[0-9a-f]{6})", body)) for body in blocks if "--bg:" in body)
    assert all(colours == dark[0] for colours in dark), "dark by the system and dark by the button are one"
    for colours, ground in product((light, dark[0]), ("bg", "card", "hover", "chosen")):
        inks = [read_colours(colours[ink]) for ink in ("ink", "soft", "accent", "good", "warn", "bad")]
        assert min(contrast(ink, read_colours(colours[ground])).min() for ink in inks) >= 4.5, ground
