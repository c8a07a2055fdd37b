"""What commands print: rows for people as a table, and for programs as JSON."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

Rows = list[dict[str, Any]]


def say(options: argparse.Namespace, *lines: str) -> None:
    """Lines for people; none where standard output is to hold JSON."""
    if options.json != "-":
        from ensemble.reporting.text import visible

        for line in lines:
            print(visible(line))


def show(renderable: Any) -> None:
    """Print something of rich."""
    console().print(renderable)


def console() -> Console:
    """Standard output."""
    from ensemble.reporting.terminal import PlainConsole

    # In a file or a pipe a row stays one line, however long.
    return PlainConsole(width=None if sys.stdout.isatty() else 1000)


def table(rows: Rows) -> Table:
    """Rows for people; a column for each key."""
    from rich.table import Table
    from rich.text import Text

    made = Table(box=None, pad_edge=False, header_style="dim")
    for name in rows[0] if rows else ():
        figures = all(row[name] is None or isinstance(row[name], (int, float)) for row in rows)
        made.add_column(name, justify="right" if figures else "left", overflow="fold")
    for row in rows:
        made.add_row(*(Text(_cell(value)) for value in row.values()))  # Text: no markup in names
    return made


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"
    return str(value)


def write_json(options: argparse.Namespace, rows: Rows) -> None:
    """Rows to where `--json` says."""
    if not options.json:
        return
    text = json.dumps(rows, indent=1) + "\n"
    if options.json == "-":
        sys.stdout.write(text)
    else:
        Path(options.json).write_text(text)
