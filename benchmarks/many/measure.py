"""Runs the drivers of `python -m benchmarks many` one after the other, and measures what they leave and use."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ensemble.bench.results import Outcome, Report, outcome_of
from ensemble.events import RunFinished

COLUMNS = (
    "executor members inodes kilobytes log_kilobytes driver_ms report_ms others_ms wall_ms status_s page_s list_s "
    "verify_s"
)


@dataclass(frozen=True, kw_only=True)
class ManyRow:
    """One run; what is not said to be of the whole run is divided by the number of its members.

    Attributes:
        finished: members that finished.
        inodes, kilobytes: files and directories in the run directory, and their bytes.  log_kilobytes: of these,
            of the event log.
        driver_ms: CPU-milliseconds of the driving process.  report_ms: of these, to write the report.
        others_ms: CPU-milliseconds of all other processes of the run.
        wall_ms: of the whole run.
        status_s, page_s, list_s, verify_s: CPU-seconds, not divided, to read the run for `ensemble status`, the
            page's document, the list of runs, and against its digests.
    """

    executor: str
    members: int
    epochs: int
    finished: int
    inodes: float
    kilobytes: float
    log_kilobytes: float
    driver_ms: float
    report_ms: float
    others_ms: float
    wall_ms: float
    status_s: float
    page_s: float
    list_s: float
    verify_s: float


def study(options: argparse.Namespace, report: Report) -> Outcome:
    """Drive a run of each number of members."""
    rows = []
    for members in options.members:
        with tempfile.TemporaryDirectory(prefix="many-", dir=options.folder) as folder:
            rows.append(measure(Path(folder) / "run", members, options.epochs, options.executor))
        row = rows[-1]
        report(f"{members} members: {row.inodes:.2f} inodes, {row.driver_ms:.1f} ms of the driver each")
    return outcome_of(rows, "What a tiny member costs", COLUMNS, part="many", title="Many tiny members")


def measure(folder: Path, members: int, epochs: int, executor: str) -> ManyRow:
    """Drive one run in a process of its own.

    Raises:
        subprocess.CalledProcessError: it failed.
    """
    command = [sys.executable, "-m", "benchmarks.many.driver", str(folder), str(members), str(epochs), executor]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True)
    driven: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    each = 1000 / members
    return ManyRow(
        executor=executor,
        members=members,
        epochs=epochs,
        driver_ms=driven["cpu_s"] * each,
        wall_ms=driven["wall_s"] * each,
        **_read(folder, members),
    )


def _read(folder: Path, members: int) -> dict[str, Any]:
    """What a run has left, and what reading it costs."""
    from ensemble.inspection import list_runs
    from ensemble.reporting.dashboard.feed import LogReader, encode
    from ensemble.reporting.run_projection import RunProjection
    from ensemble.reporting.status import status_rows
    from ensemble.store import RunDir, RunStatus
    from ensemble.store.verification import verify

    run_dir = RunDir(folder)
    inodes, size = _count(folder)
    run = RunProjection.from_status(RunStatus.load(run_dir))
    ended = run.state.ended
    report_s = (ended.report_cpu_s or 0.0) if isinstance(ended, RunFinished) else 0.0

    def read_page() -> None:
        reader = LogReader(run_dir)
        reader.read()
        encode(reader.view.state_document())

    return {
        "finished": sum(member.state == "finished" for member in run.state.members.values()),
        "inodes": inodes / members,
        "kilobytes": size / 1000 / members,
        "log_kilobytes": run_dir.events.stat().st_size / 1000 / members,
        "report_ms": 1000 * report_s / members,
        "others_ms": 1000 * (run.ledger.run.cpu_s - run.ledger.cpu_by_role().get("orchestrate", 0.0)) / members,
        "status_s": _time(lambda: status_rows(RunProjection.from_status(RunStatus.load(run_dir)))),
        "page_s": _time(read_page),
        "list_s": _time(lambda: list_runs(folder.parent)),
        "verify_s": _time(lambda: verify(run_dir)),
    }


def _count(folder: Path) -> tuple[int, int]:
    inodes = size = 0
    for parent, folders, files in os.walk(folder):
        inodes += len(folders) + len(files)
        size += sum(os.lstat(os.path.join(parent, name)).st_size for name in files)
    return inodes, size


def _time(do: Callable[[], object]) -> float:
    began = time.process_time()
    do()
    return time.process_time() - began
