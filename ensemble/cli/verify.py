"""The command `verify`: reads all that a run keeps against its digests, and changes nothing."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from ensemble.cli.console import find_width, print_lines, write_json
from ensemble.cli.run_commands import EXIT_FAILED

if TYPE_CHECKING:
    from ensemble.store import RunDir
    from ensemble.store.verification import FileCheck


def verify_run(options: argparse.Namespace) -> int:
    """Show what is whole, damaged and missing; the exit status is 1 where something is not whole.

    With `--contents` all files are listed instead, with what they hold.
    """
    from ensemble.store import RunDir
    from ensemble.store.verification import verify

    run_dir = RunDir(options.run_dir)
    if options.contents:
        return _list_contents(run_dir, options)
    checks = verify(run_dir)
    print_lines(options, *_format(checks).splitlines())
    open_files = [check.file for check in checks if check.condition == "not known"]
    more = f"; others may write into {', '.join(open_files)}, which has no digest" if open_files else ""
    checked = len(checks) - len(open_files)
    whole = sum(check.condition == "whole" for check in checks)
    count = f"all {checked} files are whole" if whole == checked else f"{whole} of {checked} files are whole"
    print_lines(options, f"{count}{more}")
    write_json(options, [check.as_row() for check in checks])
    return 0 if all(check.is_sound for check in checks) else EXIT_FAILED


def _list_contents(run_dir: RunDir, options: argparse.Namespace) -> int:
    from ensemble.inspection.run_contents import list_contents
    from ensemble.reporting.tables import format_table
    from ensemble.reporting.text import memory

    rows = list_contents(run_dir)
    table = [[row["file"], memory(row["bytes"]), row["holds"], row["of"]] for row in rows]
    print_lines(options, *format_table(["file", "size", "holds", "of"], table, find_width()).splitlines())
    write_json(options, rows)
    return 0


def _format(found: list[FileCheck]) -> str:
    from ensemble.reporting.tables import format_table

    rows = [[each.file, each.kind, each.condition, each.detail] for each in found]
    return format_table(["file", "kind", "state", "what is wrong"], rows, find_width())
