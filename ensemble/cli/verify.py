"""The command `verify`: reads all that a run keeps against its digests, and mends what can be mended."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from ensemble.cli.console import find_width, print_lines, write_json
from ensemble.cli.run_commands import EXIT_FAILED, resume
from ensemble.spec import SpecError

if TYPE_CHECKING:
    from ensemble.store import RunDir
    from ensemble.store.verification import FileCheck


def verify_run(options: argparse.Namespace) -> int:
    """Show what is whole, damaged and missing; the exit status is 1 where something is not whole.

    With `--contents` all files are listed instead, with what they hold.
    With `--repair` what is not is made again first: the run is resumed for it where copies and the log do not do.
    """
    from ensemble.controller.repair import restore_files
    from ensemble.store import RunDir, fold, is_locked, read_events
    from ensemble.store.verification import verify

    run_dir = RunDir(options.run_dir)
    if options.contents:
        return _list_contents(run_dir, options)
    found = verify(run_dir)
    if options.repair and not all(each.is_sound for each in found):
        if is_locked(run_dir.events):
            raise SpecError(f"{run_dir.path} is in progress: it can be repaired when it has ended")
        for each in found:
            if not each.is_sound:
                print(f"ensemble: {each.file}: {each.detail}", file=sys.stderr)
        restore_files(run_dir, fold(read_events(run_dir.events)))
        if not all(each.is_sound or each.kind == "code" for each in found):
            how = {"member": None, "epochs": None, "budget": None, "json": None}
            how |= {"mirror": None}
            status = resume(argparse.Namespace(**{**vars(options), **how}))
            if status == EXIT_FAILED:
                return status
        found = verify(run_dir)
    unsound = [each for each in found if not each.is_sound]
    print_lines(options, *_format(found).splitlines())
    open_files = [each.file for each in found if each.condition == "not known"]
    more = f"; others may write into {', '.join(open_files)}, which has no digest" if open_files else ""
    checked = len(found) - len(open_files)
    whole = sum(each.condition == "whole" for each in found)
    count = f"all {checked} files are whole" if whole == checked else f"{whole} of {checked} files are whole"
    print_lines(options, f"{count}{more}")
    if unsound and not options.repair:
        print_lines(options, f"`ensemble verify {run_dir.path} --repair` makes again what can be made again")
    write_json(options, [each.as_row() for each in found])
    return EXIT_FAILED if unsound else 0


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
