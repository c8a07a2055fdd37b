"""Each mistake of the table is refused: by an exception of that type, with those words, at that time."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
from kit.mistakes import Mistake

ROOMS = sorted(file.stem for file in Path(__file__).parent.glob("of_*.py"))
ROWS = [row for room in ROOMS for row in importlib.import_module(f"mistakes.{room}").ROWS]


@pytest.mark.parametrize("row", ROWS, ids=[row.what for row in ROWS])
def test_a_mistake_is_refused_with_words_that_lead_to_it(
    row: Mistake, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    row.check(tmp_path, capsys)


def test_each_mistake_is_there_once() -> None:
    names = [row.what for row in ROWS]
    assert sorted(set(names)) == sorted(names)
