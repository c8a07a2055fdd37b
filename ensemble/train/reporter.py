"""What a worker tells: events, CPU usage, lines of the member's log."""

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

from ensemble.store import RunDir
from ensemble.store.files import make_directory, share_file_with_group
from ensemble.train.job import Job

#: CPU-seconds of this process by role, over all members that it has trained: `usage` events are cumulative.
_SPENT: dict[str, float] = {}


class Reporter:
    """Events of one rank; those about the member are rank 0's to tell.

    Args:
        job: whose.
        emit: takes an event, without `v` and `t`.
        startup_cpu_s: CPU-seconds that the process spent for this job before it was made: imports.
    """

    def __init__(self, job: Job, emit: Callable[[dict[str, Any]], None], startup_cpu_s: float = 0.0) -> None:
        self._job = job
        self._emit = emit
        self._log = RunDir(job.run_dir).log(job.identity.member)
        self._last_progress = 0.0
        self._cpu_last = time.process_time() - startup_cpu_s
        self._prepare_last = 0.0
        self._role = "startup"
        self._startup_cpu_s = 0.0

    def event(self, type: str, **fields: Any) -> None:
        """Tell something about the member; ranks other than 0 keep still."""
        if self._job.rank != 0:
            return
        self._emit({"type": type, "member": self._job.identity.member, "attempt": self._job.attempt, **fields})
        if type != "progress":
            self.log(" ".join([type, *(f"{name}={_short(value)}" for name, value in fields.items())]))

    def progress(self, fields: Callable[[], Mapping[str, Any]]) -> None:
        """Tell how far it is, at most once a second."""
        now = time.monotonic()
        if self._job.rank == 0 and now - self._last_progress >= 1.0:
            self._last_progress = now
            self.event("progress", **fields())

    def usage(self, prepare_cpu_s: float = 0.0) -> None:
        """Tell the CPU time of this process by role.

        Args:
            prepare_cpu_s: what of it went into preparing batches here, cumulative in this job.
        """
        self._count(prepare_cpu_s)
        self._tell(prepare_cpu_s)

    def training_begins(self, prepare_cpu_s: float) -> float:
        """The first batch is there: what follows is role "train". Returns the CPU-seconds of the start-up."""
        self._count(prepare_cpu_s)
        self._role = "train"
        _SPENT.setdefault("train", 0.0)
        self._tell(prepare_cpu_s)  # should nothing be heard of it any more, it is known what it did last
        return self._startup_cpu_s

    def _count(self, prepare_cpu_s: float) -> None:
        used, prepared = time.process_time() - self._cpu_last, prepare_cpu_s - self._prepare_last
        self._cpu_last += used
        self._prepare_last = prepare_cpu_s
        for role, cpu_s in ((self._role, used - prepared), ("prepare", prepared)):
            _SPENT[role] = _SPENT.get(role, 0.0) + max(0.0, cpu_s)
        self._startup_cpu_s += max(0.0, used - prepared) if self._role == "startup" else 0.0

    def _tell(self, prepare_cpu_s: float) -> None:
        told = ("startup", self._role, "prepare") if prepare_cpu_s > 0 else ("startup", self._role)
        for role in dict.fromkeys(told):
            self._emit(
                {
                    "type": "usage",
                    "node": self._job.node,
                    "role": role,
                    "member": self._job.identity.member,
                    "rank": self._job.rank,
                    "pid": os.getpid(),
                    "cpu_s": _SPENT[role],
                    "origin": "measured",
                }
            )

    def log(self, text: str, *, any_rank: bool = False) -> None:
        """A line, or several, in the member's log; from rank 0, or from any."""
        if self._job.rank != 0 and not any_rank:
            return
        append_log(self._log, f"attempt {self._job.attempt} rank {self._job.rank}: {text.rstrip()}")


def append_log(path: Path, text: str) -> None:
    """Add a line, or several, with the time, to a member's log."""
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
    line = f"{now} {text}"
    try:
        make_directory(path.parent)
        with open(path, "a", encoding="utf-8", errors="backslashreplace") as file:
            share_file_with_group(path.parent, file.fileno())
            file.write(line + "\n")
    except OSError as error:  # a full disk: the member still has to say how it ended
        print(f"cannot write {path}: {error}\n{line}", file=sys.stderr)


def _short(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{name}={_short(item)}" for name, item in value.items()) + "}"
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def finite(metrics: Mapping[str, float]) -> dict[str, float | None]:
    """Metrics as JSON can hold them: None for NaN and infinities."""
    return {name: value if math.isfinite(value) else None for name, value in metrics.items()}


class FailureNote:
    """How a rank tells rank 0 why it failed: a file, written before its connections close.

    Rank 0 sees a lost connection whatever happened to a peer; the note says what it was. Where rank 0 is lost
    itself, the controller takes the note.

    Args:
        run_dir, member, attempt: whose.
    """

    def __init__(self, run_dir: RunDir, member: str, attempt: int) -> None:
        self._path: Path = run_dir.member(member) / f"failure-{attempt}.json"

    def write(self, error: str, reason: str, retry: bool) -> None:
        """Leave the note, unless another rank was first: its failure is the cause then.

        Without room for it rank 0 can only say that a peer was lost.
        """
        with contextlib.suppress(OSError):
            make_directory(self._path.parent)
            with open(self._path, "x", encoding="utf-8") as file:
                json.dump({"error": error, "reason": reason, "retry": retry}, file)

    def take(self) -> dict[str, Any] | None:
        """The note, which is then gone; None where there is none, or there was no room for all of it."""
        note = self.read()
        self._path.unlink(missing_ok=True)
        return note

    def read(self) -> dict[str, Any] | None:
        """The note, which stays."""
        try:
            note: dict[str, Any] = json.loads(self._path.read_text())
        except (FileNotFoundError, ValueError):
            return None
        return note
