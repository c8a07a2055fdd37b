"""The sections of the page and of the closing summary, one file for each topic.

`tabulate` makes the tables of a section on the page (`TABLES` of `dashboard/run_section.py`), `summarize` its
lines in the closing summary (`SUMMARIES` of `summary.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress, repeat
from typing import Any

from ensemble.reporting import text
from ensemble.reporting.ranking import finite_or_none

#: A label, empty where it is that of the line before, and a text.
Line = tuple[str, str]
#: What a cell shows: a text, a number as the page writes numbers, or a text with what it is sorted by.
Cell = str | float | None | tuple[str, float | str | None]
#: A column's name, and its class: "text" or "".
Column = tuple[str, str]


def scored(value: float | None) -> Cell:
    """A figure as the page writes it, which files have with all its digits."""
    return text.score(value), value


@dataclass(frozen=True)
class Table:
    """A table with a row for each member, role or quantity.

    Attributes:
        id: names it in the page.  text: what to know of it.
    """

    id: str
    title: str
    text: str
    head: Sequence[Column]
    rows: Sequence[Sequence[Cell]]

    def as_dict(self) -> dict[str, Any]:
        """Returns it as JSON holds it, without empty columns: no number is NaN, and each has all its digits."""
        kept = [cells.count(None) + cells.count("") < len(cells) for cells in zip(*self.rows, strict=True)]
        head = list(map(list, compress(self.head, kept or repeat(True))))
        rows = [list(map(plain_cell, compress(row, kept))) for row in self.rows]
        return {**vars(self), "head": head, "rows": rows}


def plain_cell(cell: Cell) -> Any:
    if isinstance(cell, tuple):
        shown, key = cell
        return [shown, key if isinstance(key, str) else plain_cell(key)]
    if cell is None or isinstance(cell, str):
        return cell
    return finite_or_none(cell)
