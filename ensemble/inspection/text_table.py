"""Tables as plain text, of names and values that may come from users' code."""

from __future__ import annotations

import io
from collections.abc import Sequence

from ensemble.reporting.text import visible

WIDEST = 10_000  # columns of a table that may be as wide as it needs


def format_table(head: Sequence[str], rows: Sequence[Sequence[str]], width: int | None = None) -> str:
    """A table of texts, the columns aligned on the left; a text is one line, unless it is folded.

    Args:
        width: columns that it has at most, for which long texts are folded; None: as many as it needs.
    """
    from rich.table import Table
    from rich.text import Text

    from ensemble.reporting.terminal import PlainConsole

    table = Table(box=None, pad_edge=False, header_style="")
    for name in head:
        table.add_column(Text(_clean(name)), overflow="fold")
    for row in rows:
        table.add_row(*(Text(_clean(cell)) for cell in row))
    console = PlainConsole(file=io.StringIO(), width=width or WIDEST, color_system=None, force_terminal=False)
    with console.capture() as captured:
        console.print(table)
    return "\n".join(line.rstrip() for line in captured.get().splitlines())


def _clean(cell: str) -> str:
    return visible(cell).replace("\n", "\\n")
