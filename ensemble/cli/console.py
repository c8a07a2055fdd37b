"""Output of commands: tables and lines on standard output, rows as JSON."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table

Rows = list[dict[str, Any]]


def print_lines(options: argparse.Namespace, *lines: str) -> None:
    """Print lines, unless standard output is for JSON."""
    if options.json != "-":
        from ensemble.reporting.text import visible

        for line in lines:
            print(visible(line))


def print_renderable(renderable: Any) -> None:
    """Print a renderable object of rich."""
    from ensemble.reporting.terminal import PlainConsole

    if sys.stdout.isatty():
        PlainConsole().print(renderable)
    else:  # each row is one line, however long
        print(PlainConsole(width=1000).render_text(renderable))


def make_table(rows: Rows) -> Table:
    """A table of rows with a column for each key."""
    from rich.table import Table
    from rich.text import Text

    made = Table(box=None, pad_edge=False, header_style="dim")
    for name in rows[0] if rows else ():
        figures = all(row[name] is None or isinstance(row[name], (int, float)) for row in rows)
        made.add_column(name, justify="right" if figures else "left", overflow="fold")
    for row in rows:
        made.add_row(*(Text(_format_cell(value)) for value in row.values()))  # Text: names are no markup
    return made


def _format_cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"
    return str(value)


def find_width() -> int | None:
    """The columns of the terminal; None where standard output is none: each row of a table is then one line."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def write_json(options: argparse.Namespace, rows: Rows | dict[str, Any]) -> None:
    """Write rows, or an object, as JSON to the file of `--json`, if it is given."""
    if not options.json:
        return
    text = json.dumps(rows, indent=1) + "\n"
    if options.json == "-":
        sys.stdout.write(text)
    else:
        Path(options.json).write_text(text, encoding="utf-8")
