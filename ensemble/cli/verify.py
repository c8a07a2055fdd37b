"""The command `verify`: reads all that a run keeps against its digests, and changes nothing."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from ensemble.cli.arguments import Command, add_run_dir
from ensemble.cli.console import find_width, print_lines, write_json
from ensemble.cli.run_commands import EXIT_FAILED

if TYPE_CHECKING:
    from ensemble.store.file_checks import FileCheck


def verify_run(options: argparse.Namespace) -> int:
    """Show what is whole, damaged and missing; the exit status is 1 where something is not whole."""
    from ensemble.store import RunDir
    from ensemble.store.verification import verify

    run_dir = RunDir(options.run_dir)
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


def _format(checks: list[FileCheck]) -> str:
    from ensemble.reporting.tables import format_table

    rows = [[check.file, check.kind, check.condition, check.detail] for check in checks]
    return format_table(["file", "kind", "state", "what is wrong"], rows, find_width())


VERIFY = Command(
    verify_run,
    "Compare the files of a run with the digests in its log, and list what is whole, damaged or missing.",
    add_run_dir,
)
