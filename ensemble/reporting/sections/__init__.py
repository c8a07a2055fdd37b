"""The sections of the page and of the closing summary, one file for each topic.

Each file has one or both of these functions; a new section is a file here and a line in the list that is named:

- `tabulate(state: RunState, ledger: Ledger) -> list[Table]`: its tables, in the views "Members", "Cost" and
  "Placement"; listed in `TABLES` of `ensemble.reporting.dashboard.tables`.
- `summarize(state: RunState, ledger: Ledger) -> list[Line]`: its lines in the closing summary; listed in
  `SUMMARIES` of `ensemble.reporting.summary`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
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
        of_members: whether the first cell of each row is a member's name.
    """

    id: str
    title: str
    text: str
    head: Sequence[Column]
    rows: Sequence[Sequence[Cell]]
    of_members: bool = False

    def as_dict(self) -> dict[str, Any]:
        """Returns it as JSON holds it: no number is NaN or infinite, and each has all its digits."""
        rows = [[_plain(cell) for cell in row] for row in self.rows]
        return {**vars(self), "head": [list(column) for column in self.head], "rows": rows}


def _plain(cell: Cell) -> Any:
    if isinstance(cell, tuple):
        shown, key = cell
        return [shown, key if isinstance(key, str) else _plain(key)]
    if cell is None or isinstance(cell, str):
        return cell
    return finite_or_none(cell)
