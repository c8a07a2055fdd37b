"""Measures the memory of members that train from one pipeline beside that of processes with a DataLoader each.

Both sides train the same net on the same photographs (`ensemble.bench.pipelines.training`), each in its real
processes: `ensemble run` with the local executor on one side, plain programs on the other. They run in turn. What
is summed is the *proportional set size* (proc_pid_smaps(5)): a page that n processes map counts 1/n in each, so
that the sum over a side's processes counts every page once. Its parts are *anonymous* (heaps, data of libraries),
*shared* (the ring and resident sets, or batches of a DataLoader's workers) and *files* (code of libraries, which
other programs that have mapped it make smaller on both sides).
"""

from __future__ import annotations

import contextlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from ensemble.bench.charts import bar_panel
from ensemble.bench.pipelines import training
from ensemble.bench.pipelines.processes import process_tree, read_memory
from ensemble.bench.results import Outcome, Report, group_by, median_rows, series_of, tabulate
from ensemble.events import Epoch
from ensemble.store import read_events_from
from pipelines import PipelineError
from pipelines.ipc.child_processes import child_environment

MEMBERS, DATALOADERS = "members of one pipeline", "a DataLoader each"
TOTAL = "all processes"
_EVERY_S = 0.2  # between two readings: the kernel walks all pages for each
_READINGS = 11
_TIMEOUT_S = 600.0

#: A word of a process's command, the part that it is, and what is forked from it.
_PARTS = (
    ("ensemble.executors.forkserver", "fork server", "member"),
    ("pipelines.feeder.process", "feeder", "preparation worker"),
    ("pipelines.workers.worker_main", "preparation worker", ""),
    ("ensemble.bench.pipelines.training", "training process", "DataLoader worker"),
    ("", "controller", ""),
)
#: Fields of a row, and the kernel's names (`read_memory`).
_FIGURES = {
    "pss_mb": "Pss",
    "anonymous_mb": "Pss_Anon",
    "private_mb": "Private_Dirty",
    "shared_mb": "Pss_Shmem",
    "files_mb": "Pss_File",
}
#: Memory of each process, by process id.
_Reading = dict[int, dict[str, int]]


@dataclass(frozen=True, kw_only=True)
class MemoryRow:
    """The memory of one part of one side, in steady state; medians over the runs, 10^6 bytes.

    Attributes:
        side: `MEMBERS` or `DATALOADERS`.
        trained: how many members, or processes with a DataLoader, trained at once.
        part: the kind of process; `TOTAL` for all of the side.
        processes: of that kind.
        pss_mb: proportional set size of all of them together.
        anonymous_mb, shared_mb, files_mb: the parts of `pss_mb`.
        private_mb: of `anonymous_mb`, what no other process shares.
        peak_mb: of `TOTAL`, the largest sum since the side's start; else None.
    """

    side: str
    trained: int
    part: str
    processes: int
    pss_mb: float
    anonymous_mb: float
    private_mb: float
    shared_mb: float
    files_mb: float
    peak_mb: float | None = None
    runs: int = 1


def study_memory(
    data: str,
    *,
    members: int = 8,
    loaders: int = 2,
    size: int = 224,
    batch_size: int = 32,
    epochs: int = 3,
    repeats: int = 3,
    report: Report = lambda _: None,
) -> list[MemoryRow]:
    """Run both sides `repeats` times in turn; returns the medians.

    Args:
        data, size: see `Config`.
        members: how many train from one pipeline.  loaders: how many processes train with a DataLoader each.
        epochs: that each trains before its memory is taken for steady.

    Raises:
        PipelineError: the archive cannot be read, or a process died.
    """
    _ = training.make_pipeline(data, size).fields  # raises before anything is started
    settings = {"data": str(Path(data).absolute()), "size": size, "batch_size": batch_size}
    rows: list[MemoryRow] = []
    for repeat in range(repeats):
        for side, count in ((MEMBERS, members), (DATALOADERS, loaders)):
            found = list(_measure(side, count, settings, epochs))
            total = found[-1]
            report(f"{repeat + 1}/{repeats} {count} {side}: {total.pss_mb:,.0f} MB, peak {total.peak_mb:,.0f} MB")
            rows += found
    return median_rows(rows, "side", "part")


def _measure(side: str, count: int, settings: dict[str, object], epochs: int) -> Iterator[MemoryRow]:
    until, steady, peak_mb = time.monotonic() + _TIMEOUT_S, list[_Reading](), 0.0
    with (
        tempfile.TemporaryDirectory(prefix="bench-") as folder,
        _run_side(side, count, settings, Path(folder)) as processes,
    ):
        while len(steady) < _READINGS:
            time.sleep(_EVERY_S)
            is_steady = min(_count_epochs(count, Path(folder))) >= epochs
            reading = _read_all(process.pid for process in processes)
            peak_mb = max(peak_mb, _sum_mb(reading, "Pss"))
            steady += [reading] * is_steady
            if any(process.poll() is not None for process in processes):
                said = "".join(_read_outputs(Path(folder)))[-2000:]
                raise PipelineError(f"{side}: a process that trained has ended: {said}")
            if time.monotonic() > until:
                raise PipelineError(f"{side} have not trained {epochs} epochs after {_TIMEOUT_S:g} s")
        parts = group_by(steady[-1], _find_part)
    for part, pids in (*parts.items(), (TOTAL, steady[-1])):
        own = [{pid: each[pid] for pid in (each if part == TOTAL else pids) if pid in each} for each in steady]
        figures: dict[str, Any] = {
            field: statistics.median(_sum_mb(reading, name) for reading in own) for field, name in _FIGURES.items()
        }
        peak = peak_mb if part == TOTAL else None
        yield MemoryRow(side=side, trained=count, part=part, processes=len(own[-1]), peak_mb=peak, **figures)


def _sum_mb(reading: _Reading, name: str) -> float:
    return sum(memory.get(name, 0) for memory in reading.values()) / 1e6


def _read_all(roots: Iterator[int]) -> _Reading:
    """The memory of these processes and their descendants."""
    found = {}
    for pid in (pid for root in roots for pid in process_tree(root)):
        with contextlib.suppress(OSError):  # it has ended
            if memory := read_memory(pid):
                found[pid] = memory
    return found


def _find_part(pid: int) -> str:
    try:
        process = psutil.Process(pid)
        command, parent = process.cmdline(), process.parent()
        is_fork = parent is not None and parent.cmdline() == command
    except psutil.NoSuchProcess:
        return "ended"
    part, forked = next(names for word, *names in _PARTS if word in " ".join(command))
    return forked if forked and is_fork else part


@contextlib.contextmanager
def _run_side(
    side: str, count: int, settings: dict[str, object], folder: Path
) -> Iterator[list[subprocess.Popen[bytes]]]:
    """The processes that train until the context ends, with files in the folder that say how far they are."""
    python = [sys.executable, "-P", "-m"]
    commands = [[*python, training.__name__, *map(str, settings.values())]] * count
    if side == MEMBERS:
        values = {**settings, "members": count}.items()
        sets = [word for name, value in values for word in ("--set", f"{name}={value}")]
        where = ["--executor", "local", "--run-dir", str(folder / "run")]
        commands = [[*python, "ensemble", "run", training.__file__, *where, *sets]]
    with contextlib.ExitStack() as stack:
        processes = []
        for number, command in enumerate(commands):
            with open(folder / f"{number}.txt", "wb") as output:
                streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": output}
                process = stack.enter_context(subprocess.Popen(command, **streams, env=child_environment()))
            stack.callback(process.terminate)  # members end in order, and their fork server with them
            processes.append(process)
        yield processes


def _count_epochs(count: int, folder: Path) -> list[int]:
    """The epochs that each of `count` members or processes has trained since the start."""
    if (file := folder / "run" / "events.jsonl").exists():
        events, _ = read_events_from(file, 0)
        trained = list(Counter(event.member for event in events if isinstance(event, Epoch)).values())
    else:
        trained = [output.count("epoch\n") for output in _read_outputs(folder)]
    return [*trained, *[0] * count][:count]


def _read_outputs(folder: Path) -> list[str]:
    return [path.read_text(encoding="utf-8", errors="replace") for path in folder.glob("*.txt")]


def outcome(rows: Sequence[MemoryRow]) -> Outcome:
    """What is printed: both sides compared, then each side's parts."""
    members, loaders = (row for row in rows if row.part == TOTAL)
    names = f"part processes {' '.join(_FIGURES)}"
    sides = group_by(rows, lambda row: f"{row.trained} {row.side}")
    return Outcome(
        tables=[
            ("", tabulate([members, loaders], "trained side pss_mb peak_mb")),
            *((side, tabulate(each, names)) for side, each in sides.items()),
        ],
        rows=[vars(row) for row in rows],
        findings=[
            f"{members.trained} {MEMBERS} take {members.pss_mb:,.0f} MB, {loaders.trained} processes with "
            f"{DATALOADERS} {loaders.pss_mb:,.0f} MB: {members.pss_mb / loaders.pss_mb:.2f} times as much"
        ],
        title="Memory of members that share a pipeline",
        notes=["proportional set size in steady state"],
        panels=[bar_panel("MB", series_of(rows, "part", "pss_mb", lambda row: f"{row.trained} {row.side}"))],
    )
