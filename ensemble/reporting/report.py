"""Writes the report of a run, which may have ended, run or be broken off: one HTML file for any browser."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ensemble.reporting.dashboard.member_log import tidy
from ensemble.store.errors import StoreError
from ensemble.store.regular_files import open_regular

if TYPE_CHECKING:
    from pathlib import Path

    from ensemble.events import Event
    from ensemble.reporting.dashboard.projection import RunView
    from ensemble.store import RunDir, RunState

#: Of the logs of members that failed: lines of each, bytes of each, bytes of all.
LOG_LINES, LOG_BYTES, LOGS_BYTES = 60, 16 * 2**10, 2**20
#: They take two seconds of CPU time, which the end of every run would pay.
NO_SEARCH = "The report has importances of searches; of a list of members `ensemble dashboard` computes them."


def write_report(run_dir: RunDir, events: Sequence[Event] | None = None, samples: int = 0) -> Path:
    """Write `report.html` into the run directory, whole or not at all, and return its path.

    Args:
        events: of the run; None: as the log has them.
        samples: of each order (most wrong, unsure, disputed) so many samples of the data are in it. Reading them
            runs the user's code, in a process of limited memory and time.

    Raises:
        CombineError: samples are wanted, and members predicted different ones.
        StoreError: there is no run, or the file cannot be written.
    """
    from ensemble.reporting.dashboard.frozen import compose_report
    from ensemble.reporting.dashboard.projection import RunView
    from ensemble.reporting.status import describe_lost_controller
    from ensemble.store import read_events
    from ensemble.store.files import write_bytes

    events = read_events(run_dir.events) if events is None else events
    view = RunView(run_dir)
    view.apply(events, run_dir.events.stat().st_size)
    if events:
        view.driver = describe_lost_controller(run_dir, view.state)
    page = compose_report(read_documents(run_dir, view, samples))
    write_bytes(run_dir.report, page.encode(errors="backslashreplace"))
    return run_dir.report


def read_documents(run_dir: RunDir, view: RunView, samples: int = 0) -> dict[str, Any]:
    """Returns all documents of a run, ends of the logs of members that failed, and some samples of each order."""
    from ensemble.reporting.dashboard.analysis import read_importances, read_quality
    from ensemble.reporting.samples.frozen import read_samples

    no_search = {"importances": [], "method": "", "missing": NO_SEARCH, "plots": []}
    return {
        "state": view.state_document(),
        "curves": view.curves_document(),
        "quality": read_quality(run_dir, view.state),
        "importances": read_importances(run_dir, view.state) if view.state.mode == "search" else no_search,
        "tables": view.tables_document(),
        "logs": read_logs(run_dir, view.state),
        "samples": read_samples(run_dir, view.state, samples) if samples else None,
    }


def read_logs(run_dir: RunDir, state: RunState) -> dict[str, str]:
    """Returns the last lines of the log of each member that failed, as far as they have room."""
    found: dict[str, str] = {}
    room = LOGS_BYTES
    for member in state.members.values():
        if member.error is None or room <= 0:
            continue
        try:
            with open_regular(run_dir.log(member.id), follows_link=True) as file:
                size = file.seek(0, 2)
                file.seek(max(0, size - LOG_BYTES))
                end = file.read().decode(errors="replace")
        except (OSError, StoreError):
            continue  # it has written none
        lines = tidy(end).splitlines()
        found[member.id] = "\n".join(lines[-LOG_LINES:]) + "\n"
        room -= len(found[member.id])
    return found
