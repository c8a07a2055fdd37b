"""Output of commands: tables and lines on standard output, rows as JSON."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from ensemble.store.user_files import JSON_END

Rows = list[dict[str, Any]]


@contextlib.contextmanager
def json_alone(options: argparse.Namespace) -> Iterator[None]:
    """With `--json -`, lead to standard error what anything but `write_json` writes to standard output.

    The user's code, C libraries and child processes write to descriptor 1; it stays where the process ends with
    the command, as libraries empty their buffers at its end.
    """
    options.json_stream = sys.stdout
    if getattr(options, "json", None) != "-":
        yield
        return
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # a notebook's, a test's
            if sys.stdout.fileno() == 1:
                sys.stdout.flush()
                options.json_stream = os.fdopen(os.dup(1), "w", encoding=sys.stdout.encoding, errors="replace")
                os.dup2(2, 1)
        stack.enter_context(contextlib.redirect_stdout(sys.stderr))
        yield


def print_lines(options: argparse.Namespace, *lines: str) -> None:
    """Print lines, unless standard output is for JSON."""
    if options.json != "-":
        from ensemble.reporting.text import visible

        for line in lines:
            print(visible(line))


def print_styled(lines: Iterable[tuple[str, str]]) -> None:
    """Print lines, each with its style on a terminal, as rich names it."""
    if not sys.stdout.isatty():
        print(*(line for line, _ in lines), sep="\n")
        return
    from rich.text import Text

    from ensemble.reporting.terminal import PlainConsole

    console = PlainConsole()
    for line, style in lines:
        console.print(Text(line, style), soft_wrap=True)


def find_width() -> int | None:
    """The columns of the terminal; None where standard output is none: each row of a table is then one line."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def write_json(options: argparse.Namespace, rows: Rows | dict[str, Any]) -> None:
    """Write rows, or an object, as JSON to the file of `--json`, if it is given."""
    if not options.json:
        return
    text = json.dumps(rows, indent=1) + "\n"
    if options.json == "-":
        options.json_stream.write(text)
        options.json_stream.flush()
    else:
        Path(options.json).write_text(text[:-1] + JSON_END, encoding="utf-8")
