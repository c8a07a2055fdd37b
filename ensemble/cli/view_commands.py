"""Commands that show a run or this machine, or fetch a run: each takes its options and returns the exit status."""

from __future__ import annotations

import argparse
import sys
import time
from typing import TYPE_CHECKING

from ensemble.cli.arguments import Command, add_run_dir
from ensemble.cli.console import find_width, print_lines, print_styled, write_json
from ensemble.cli.control_commands import POLL_S
from ensemble.spec import SpecError
from ensemble.store.files import format_command
from ensemble.store.folding import without_garbage_collection
from pipelines.providers import import_object

if TYPE_CHECKING:
    from ensemble.store import RunDir

CHECK_S = 1.0  # between two looks whether a run that is watched still has its controller


def status(options: argparse.Namespace) -> int:
    """Show the state of the run and a row for each member."""
    from ensemble.store import RunDir

    run_dir = RunDir(options.run_dir)
    if options.watch:
        if options.json:
            raise SpecError("--watch shows a table until the run ends, and --json writes one: give one of them")
        return _watch(run_dir)
    with without_garbage_collection():
        return _show_status(run_dir, options)


def _show_status(run_dir: RunDir, options: argparse.Namespace) -> int:
    from ensemble import reporting
    from ensemble.store import RunStatus
    from ensemble.store.mirror_status import load_status

    status = RunStatus.load(run_dir)
    gone = reporting.describe_lost_controller(run_dir, status.state)
    run = reporting.RunProjection.from_status(status, gone)
    if options.json != "-":
        print_lines(options, reporting.status_head(run), *reporting.status_lines(run, find_width()))
        mirror = load_status(run_dir)
        print_lines(options, *reporting.status_notes(run, find_width()), *([str(mirror)] if mirror else []))
    write_json(options, reporting.status_rows(run))
    if gone is not None:
        print(gone, file=sys.stderr)
    return 0


def show_summary(options: argparse.Namespace) -> int:
    """Show what a run printed at its end."""
    from ensemble.reporting import RunProjection, describe_lost_controller, status_rows
    from ensemble.reporting.summary import summary
    from ensemble.store import RunDir, RunStatus

    status = RunStatus.load(run_dir := RunDir(options.run_dir))
    run = RunProjection.from_status(status, describe_lost_controller(run_dir, status.state))
    if options.json != "-":
        print_styled(summary(run, run_dir, options.all, find_width()))
    write_json(options, status_rows(run))
    return 0


def add_fetch_options(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `ensemble fetch`."""
    parser.epilog = (
        "The declaration of a run is a pickle, which runs code when the run is resumed or loaded: fetch only what "
        "you trust, and let nobody else write to the address."
    )
    parser.add_argument("url", metavar="URL", help="as it was given to --mirror")
    parser.add_argument("run_dir", metavar="RUN_DIR", help="a new directory, or an empty one")


def fetch_run(options: argparse.Namespace) -> int:
    """Bring a run back from its mirror."""
    run_dir = import_object("ensemble.store.mirror_fetch:fetch")(options.url, options.run_dir)
    command = format_command("resume", run_dir)
    print_lines(options, f"{options.url} was fetched into {run_dir}; {command} continues and copies it again")
    write_json(options, [{"url": options.url, "run_dir": str(run_dir)}])
    return 0


def _watch(run_dir: RunDir) -> int:
    """Show the progress of a run that another process drives until it ends, its controller is lost, or Ctrl-C.

    The log is looked at a few times a second; nothing is drawn unless it has grown.
    """
    from ensemble.reporting import Progress, describe_lost_controller
    from ensemble.run import StateFollower

    follower, checked_at = StateFollower(run_dir), 0.0
    state, gone = follower.state, None
    try:
        with Progress(sys.stdout) as progress:
            while state.ended is None and gone is None:
                if state.starts and time.monotonic() - checked_at >= CHECK_S:
                    gone = describe_lost_controller(run_dir, state)
                    checked_at = time.monotonic()
                if follower.read() or not progress.is_drawn:  # after the check: the last events are included
                    progress.update(state)
                if state.ended is None and gone is None:
                    time.sleep(POLL_S)
    except KeyboardInterrupt:
        print("ensemble: the watch has ended, the run goes on", file=sys.stderr)
        raise KeyboardInterrupt("reported") from None
    if state.ended is None and gone is not None:
        print(gone, file=sys.stderr)
    return 0


def _add_status_options(parser: argparse.ArgumentParser) -> None:
    add_run_dir(parser)
    parser.epilog = "A number beside a state, as in finished (2), says how often the member was started."
    parser.add_argument("--watch", action="store_true", help="show its progress until it ends, or Ctrl-C")


def _add_summary_options(parser: argparse.ArgumentParser) -> None:
    add_run_dir(parser)
    parser.add_argument("--all", action="store_true", help="show all members and figures, of any length")


STATUS = Command(status, "Show the state of a run and of its members.", _add_status_options)
SUMMARY = Command(show_summary, "Show what a run printed at its end, or all that is known.", _add_summary_options)
FETCH = Command(fetch_run, "Bring a run back from the address to which --mirror copied it.", add_fetch_options)
