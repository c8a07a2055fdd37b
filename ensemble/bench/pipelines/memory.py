"""Measures the memory of members that train from one pipeline beside that of processes with a DataLoader each.

Both sides train the same net on the same photographs (`ensemble.bench.pipelines.training`), each in its real
processes: `ensemble run` with the local executor on one side, plain programs on the other. They run in turn. What
is summed is the *proportional set size* (proc_pid_smaps(5)): a page that n processes map counts 1/n in each, so
that the sum over a side's processes counts every page once. Its parts:

- *anonymous*: what processes have written: heaps, Python's objects, the data of libraries. Of it *private* pages
  are of one process alone; the others are still shared with the process that it was forked from.
- *shared*: memory that is made to be shared: the ring and resident sets, or the batches of a DataLoader's workers.
- *files*: code of libraries, which the kernel can read again. Other programs that have mapped the same libraries
  make it smaller on both sides.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ensemble.bench.charts import Panel, Series
from ensemble.bench.pipelines import training
from ensemble.bench.pipelines.processes import process_tree, read_memory
from ensemble.bench.results import Report, Rows, group_by, median_row
from ensemble.store import read_events_from
from pipelines import PipelineError
from pipelines.child_processes import child_environment

MEMBERS, DATALOADERS = "members of one pipeline", "a DataLoader each"
TOTAL = "all processes"
_EVERY_S = 0.2  # between two readings: the kernel walks all pages for each
_READINGS = 11
_TIMEOUT_S = 600.0

#: The command's words by which a process is known, and the part that it is.
_PARTS = (
    ("ensemble.executors.forkserver", "fork server"),
    ("pipelines.feeder.process", "feeder"),
    ("workers.worker_main", "preparation worker"),
    ("ensemble.bench.pipelines.training", "training process"),
)
#: A part -> what is forked from it.
_FORKED = {
    "fork server": "member",
    "feeder": "preparation worker",
    "training process": "DataLoader worker",
}


@dataclass(frozen=True, kw_only=True)
class MemoryRow:
    """The memory of one part of one side, in steady state; medians over the runs, 10^6 bytes.

    Attributes:
        side: `MEMBERS` or `DATALOADERS`.
        trained: how many members, or processes with a DataLoader, trained at once.
        part: the kind of process; `TOTAL` for all of the side.
        processes: of that kind.
        pss_mb: proportional set size of all of them together.
        peak_mb: of `TOTAL`, the largest sum since the side's start; else None.
        anonymous_mb, shared_mb, files_mb: the parts of `pss_mb`.
        private_mb: of `anonymous_mb`, what no other process shares.
        start_s: of `TOTAL`, seconds from the command until all have trained an epoch; else None.
    """

    side: str
    trained: int
    part: str
    processes: int
    pss_mb: float
    peak_mb: float | None
    anonymous_mb: float
    private_mb: float
    shared_mb: float
    files_mb: float
    start_s: float | None
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
        data: a tar archive of JPEG photographs.
        members: how many train from one pipeline.
        loaders: how many processes train with a DataLoader each.
        size: pixels of a side.
        epochs: that each trains before its memory is taken for steady.

    Raises:
        PipelineError: the archive cannot be read, or a process died.
    """
    _ = training.make_pipeline(data, size).fields  # raises before anything is started
    settings = {"data": str(Path(data).absolute()), "size": size, "batch_size": batch_size}
    rows: list[MemoryRow] = []
    for repeat in range(repeats):
        for side, count, start in ((MEMBERS, members, _run_members), (DATALOADERS, loaders, _run_loaders)):
            with start(settings, count) as (roots, count_epochs):
                found = _measure(side, count, roots, count_epochs, epochs)
            total = next(row for row in found if row.part == TOTAL)
            report(f"{repeat + 1}/{repeats} {count} {side}: {total.pss_mb:,.0f} MB, peak {total.peak_mb:,.0f} MB")
            rows += found
    return [median_row(each) for each in group_by(rows, lambda row: (row.side, row.part)).values()]


#: Returns the epochs that each member or process has trained since the start.
CountEpochs = Callable[[], Sequence[int]]


def _measure(
    side: str, trained: int, roots: Sequence[int], count_epochs: CountEpochs, epochs: int
) -> list[MemoryRow]:
    began, start_s, peak_mb = time.monotonic(), None, 0.0
    while min(done := [*count_epochs(), *[0] * trained][:trained]) < epochs:
        if start_s is None and min(done):
            start_s = time.monotonic() - began
        if time.monotonic() - began > _TIMEOUT_S:
            raise PipelineError(f"{side} have not trained {epochs} epochs after {_TIMEOUT_S:g} s")
        peak_mb = max(peak_mb, _sum_pss(_read_all(roots)))
        time.sleep(_EVERY_S)
    start_s = start_s or time.monotonic() - began
    readings = []
    for _ in range(_READINGS):
        readings.append(_read_all(roots))
        time.sleep(_EVERY_S)
    peak_mb = max(peak_mb, *map(_sum_pss, readings))
    kinds = group_by([pid for reading in readings for pid in reading], lambda pid: _find_part(pid, side))
    last = Counter(_find_part(pid, side) for pid in readings[-1])
    made = [
        _make_row(side, trained, part, last[part], [{p: r[p] for p in pids if p in r} for r in readings])
        for part, pids in kinds.items()
        if last[part]
    ]
    total = _make_row(side, trained, TOTAL, len(readings[-1]), readings, peak_mb, start_s)
    return [*made, total]


def _make_row(
    side: str,
    trained: int,
    part: str,
    processes: int,
    readings: Sequence[dict[int, dict[str, int]]],
    peak_mb: float | None = None,
    start_s: float | None = None,
) -> MemoryRow:
    def median_mb(*names: str) -> float:
        return statistics.median(
            sum(memory.get(name, 0) for memory in reading.values() for name in names) / 1e6 for reading in readings
        )

    return MemoryRow(
        side=side,
        trained=trained,
        part=part,
        processes=processes,
        pss_mb=median_mb("Pss"),
        peak_mb=peak_mb,
        anonymous_mb=median_mb("Pss_Anon"),
        private_mb=median_mb("Private_Dirty"),
        shared_mb=median_mb("Pss_Shmem"),
        files_mb=median_mb("Pss_File"),
        start_s=start_s,
    )


def _sum_pss(reading: dict[int, dict[str, int]]) -> float:
    return sum(memory["Pss"] for memory in reading.values()) / 1e6


def _read_all(roots: Sequence[int]) -> dict[int, dict[str, int]]:
    """Process id -> the kernel's figures of its memory, in bytes, of these processes and their descendants."""
    found = {}
    for root in roots:
        for pid in process_tree(root):
            with contextlib.suppress(OSError):  # it has ended
                if memory := read_memory(pid):
                    found[pid] = memory
    return found


def _find_part(pid: int, side: str) -> str:
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").replace("\0", " ")
        parent = int(Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[1])
        parents = Path(f"/proc/{parent}/cmdline").read_bytes().decode(errors="replace").replace("\0", " ")
    except OSError:
        return "ended"
    part = next((part for words, part in _PARTS if words in command), "controller")
    if command == parents:  # forked
        return _FORKED.get(part, part)
    return part


@contextlib.contextmanager
def _run_members(settings: dict[str, object], count: int) -> Iterator[tuple[list[int], CountEpochs]]:
    """`ensemble run` with so many members, which trains until the context ends."""
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        run_dir, output = Path(folder) / "run", Path(folder) / "output.txt"
        command = [sys.executable, "-P", "-m", "ensemble", "run", training.__file__, "--executor", "local"]
        command += ["--run-dir", str(run_dir), "--set", f"members={count}"]
        command += [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]
        with open(output, "wb") as file:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, env=child_environment()
            )
        trained: Counter[str] = Counter()
        offset = 0

        def count_epochs() -> list[int]:
            nonlocal offset
            if process.poll() is not None:
                raise PipelineError(
                    f"the run has ended: {output.read_text(errors='replace', encoding='utf-8')[-2000:]}"
                )
            events_file = run_dir / "events.jsonl"
            events, offset = read_events_from(events_file, offset) if events_file.exists() else ([], 0)
            trained.update(event["member"] for event in events if event["type"] == "epoch")
            return list(trained.values())

        try:
            yield [process.pid], count_epochs
        finally:
            process.send_signal(signal.SIGTERM)  # members end in order, and their fork server with them
            process.wait()


@contextlib.contextmanager
def _run_loaders(settings: dict[str, object], count: int) -> Iterator[tuple[list[int], CountEpochs]]:
    """Processes that train with a DataLoader each until the context ends."""
    command = [sys.executable, "-P", "-m", "ensemble.bench.pipelines.training", json.dumps(settings)]
    with contextlib.ExitStack() as stack:
        processes = [
            stack.enter_context(
                subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=child_environment())
            )
            for _ in range(count)
        ]
        for process in processes:
            stack.callback(process.terminate)
        outputs = {process.stdout.fileno(): 0 for process in processes if process.stdout is not None}

        def count_epochs() -> list[int]:
            for fd in select.select(list(outputs), [], [], 0)[0]:
                if not (received := os.read(fd, 1 << 16)):
                    raise PipelineError("a process that trained with a DataLoader has ended; see its output above")
                outputs[fd] += received.count(b"\n")
            return list(outputs.values())

        yield [process.pid for process in processes], count_epochs


def tables(rows: Sequence[MemoryRow]) -> list[tuple[str, Rows]]:
    """What is printed: both sides, then each side's parts."""
    names = ["part", "processes", "pss_mb", "anonymous_mb", "private_mb", "shared_mb", "files_mb"]
    totals = [row for row in rows if row.part == TOTAL]
    head = [
        {"side": f"{row.trained} {row.side}", "pss_mb": row.pss_mb, "peak_mb": row.peak_mb, "start_s": row.start_s}
        for row in totals
    ]
    sides = group_by(rows, lambda row: row.side)
    parts = [
        (f"{each[0].trained} {side}", [{name: getattr(row, name) for name in names} for row in each])
        for side, each in sides.items()
    ]
    return [("", head), *parts]


def findings(rows: Sequence[MemoryRow]) -> list[str]:
    """Both sides' totals, compared."""
    members, loaders = (
        [row for row in rows if (row.side, row.part) == (s, TOTAL)] for s in (MEMBERS, DATALOADERS)
    )
    return [
        f"{one.trained} {one.side} take {one.pss_mb:,.0f} MB, {other.trained} processes with {other.side} "
        f"{other.pss_mb:,.0f} MB: {one.pss_mb / other.pss_mb:.2f} times as much"
        for one, other in zip(members, loaders, strict=True)
    ]


def panels(rows: Sequence[MemoryRow]) -> list[Panel]:
    """Bars of the parts of each side."""
    colours = {MEMBERS: "#2f7bc4", DATALOADERS: "#b14a8c"}
    series = [
        Series(
            name=f"{each[0].trained} {side}",
            xs=[row.part for row in each],
            ys=[row.pss_mb for row in each],
            colour=colours[side],
        )
        for side, each in group_by(rows, lambda row: row.side).items()
    ]
    return [
        Panel(
            title="Proportional set size, MB",
            at="steady state",
            x="",
            x_scale="category",
            bars=True,
            series=series,
        )
    ]
