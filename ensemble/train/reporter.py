"""Reports of a worker: events, CPU usage, lines of the member's log, notes of failures."""

from __future__ import annotations

import contextlib
import datetime
import json
import math
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ensemble.meter.cpu import CpuClock, report_interval_s
from ensemble.store import RunDir
from ensemble.store.files import make_directory
from ensemble.train.gpu_busy import describe_gpu_busy
from ensemble.train.job import Job

#: Seconds between two reports of usage, at least; epochs may be shorter.
LEAST_S = 10.0


class EventReporter:
    """Reports what one rank of a member does.

    Args:
        clock: the time in seconds, of a clock that does not go back.
    """

    def __init__(
        self,
        job: Job,
        emit: Callable[[dict[str, Any]], None],
        cpu: CpuClock,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._job = job
        self._emit = emit
        self._log = RunDir(job.run_dir).log(job.identity.member)
        self._last_progress = 0.0
        self._cpu, self._prepare_last = cpu, 0.0
        self._startup_before_s = cpu.count("startup")
        self._clock, self._began = clock, clock()
        self._emit_at = self._began

    def event(self, type: str, **fields: Any) -> None:
        """Emit an event about the member; only rank 0 does."""
        if self._job.rank != 0:
            return
        self._emit({"type": type, "member": self._job.identity.member, "attempt": self._job.attempt, **fields})
        if type != "progress":
            self.log(" ".join([type, *(f"{name}={_format_value(value)}" for name, value in fields.items())]))

    def progress(self, fields: Callable[[], Mapping[str, Any]]) -> bool:
        """Emit a `progress` event, at most once a second; returns whether it was time for one."""
        time_s = time.monotonic()
        if time_s - self._last_progress < 1.0:
            return False
        self._last_progress = time_s
        self.event("progress", **fields())
        return True

    def usage(self, prepare_cpu_s: float = 0.0, *, is_last: bool = False) -> None:
        """Emit the CPU time of this process by role, unless it was emitted shortly before.

        Args:
            prepare_cpu_s: the part of it spent on preparing batches in this process, cumulative in this job.
            is_last: whether the job has ended: it is emitted in any case.
        """
        time_s = self._clock()
        if is_last or time_s >= self._emit_at:
            self._emit_at = time_s + max(LEAST_S, report_interval_s(time_s - self._began))
            self._emit_usage(prepare_cpu_s)

    def training_begins(self, prepare_cpu_s: float) -> float:
        """Count CPU time under the role "train" from here on; returns the CPU-seconds of the start-up."""
        self._prepare_last += self._cpu.move("prepare", prepare_cpu_s - self._prepare_last)
        self._cpu.switch("train")
        self._emit_usage(prepare_cpu_s)  # the role is known even if no other event follows
        return self._cpu.count("startup") - self._startup_before_s

    def _emit_usage(self, prepare_cpu_s: float) -> None:
        self._prepare_last += self._cpu.move("prepare", prepare_cpu_s - self._prepare_last)
        for role in ("startup", "train", "prepare"):
            if self._cpu.has_news(role):
                used = self._cpu.report(self._job.node, role, self._job.identity.member, self._job.rank)
                self._emit({**used, **(describe_gpu_busy(self._job.gpu) if role == "train" else {})})

    def log(self, text: str, *, any_rank: bool = False) -> None:
        """Append lines to the member's log; only rank 0 does, unless `any_rank`."""
        if self._job.rank == 0 or any_rank:
            append_log(self._log, f"attempt {self._job.attempt} rank {self._job.rank}: {text.rstrip()}")


def _open_own(path: str, flags: int) -> int:
    return os.open(path, flags, 0o644)


def append_log(path: Path, text: str) -> None:
    """Append lines, with the time, to a member's log."""
    line = f"{datetime.datetime.now(datetime.UTC).isoformat(timespec='milliseconds')} {text}"
    try:
        make_directory(path.parent)
        with open(path, "a", encoding="utf-8", errors="backslashreplace", opener=_open_own) as file:
            file.write(line + "\n")
    except OSError as error:  # a full disk: the member still has to report its outcome
        print(f"cannot write {path}: {error}\n{line}", file=sys.stderr)


def _format_value(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{name}={_format_value(item)}" for name, item in value.items()) + "}"
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def to_json_metrics(metrics: Mapping[str, float]) -> dict[str, float | None]:
    """Metrics as JSON values: None for NaN and infinities."""
    return {name: value if math.isfinite(value) else None for name, value in metrics.items()}


class FailureNote:
    """A file in which a rank writes why it failed, before its connections close.

    Rank 0 sees a lost connection whatever happened to a peer; the note has the cause. If rank 0 itself is lost,
    the controller reads the note.
    """

    def __init__(self, run_dir: RunDir, member: str, attempt: int) -> None:
        self._path: Path = run_dir.member(member) / f"failure-{attempt}.json"

    def write(self, error: str, reason: str, retry: bool, rank: int) -> None:
        """Write the note, unless another rank was first, or the disk is full."""
        with contextlib.suppress(OSError):
            make_directory(self._path.parent)
            with open(self._path, "x", encoding="utf-8") as file:
                json.dump({"error": error, "reason": reason, "retry": retry, "rank": rank}, file)

    def pop(self) -> dict[str, Any] | None:
        """Read and delete the note."""
        note = self.read()
        self._path.unlink(missing_ok=True)
        return note

    def read(self) -> dict[str, Any] | None:
        """Read the note; None where there is none, or it is incomplete."""
        try:
            note: dict[str, Any] = json.loads(self._path.read_text(encoding="utf-8"))
        except (FileNotFoundError, ValueError):
            return None
        return note
