"""The preparation workers of a feeder: started, given runs, replaced when they die.

Every call comes from the feeder's one thread.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from pipelines import ipc, memory_pickle
from pipelines.cache.manager import CacheManager
from pipelines.child_processes import child_environment
from pipelines.errors import PipelineError
from pipelines.feeder.record_trial import START_S
from pipelines.feeder.suspects import Record, Suspects
from pipelines.pipeline import Pipeline
from pipelines.prepare.deadly_records import Note
from pipelines.stream import Run

_IN_FLIGHT = 2
_TRIES = 10
_MOST_DEADLY = 20
_SAID = 10  # records left out that are named in warnings
_NEWER = 0.2  # the weight of the newest measurement of a worker's rate


@dataclass
class Target:
    """Memory to be filled: the ring, or a resident set.

    Attributes:
        key: its name.
        number: of its pipeline, among those that the workers are handed when they start.
        capacity: samples in it.
        fd, shown_fd: the memory, for those that fill it and for those that only read it.
        todo, left: of a resident set, the runs that nobody has yet, and how many are not done.
    """

    key: str
    number: int
    pipeline: Pipeline
    capacity: int
    fd: int
    shown_fd: int
    todo: list[Run] = field(default_factory=list)
    left: int = 0


@dataclass(eq=False)
class _Worker:
    connection: socket.socket
    process: subprocess.Popen[bytes]
    note: Note
    runs: list[tuple[int, Run]] = field(default_factory=list)
    cpu_s: float = 0.0
    since: float = 0.0
    rate: float = 0.0
    ready: bool = False  # it has started, which takes long
    skipped: list[dict[str, Any]] = field(default_factory=list)  # in the run that it is at
    at: tuple[Any, ...] = ()  # what it was at when it was last looked at, and since when
    at_since: float = field(default_factory=time.monotonic)
    hangs: bool = False


class Crew:
    """Preparation workers.

    Args:
        targets: number -> memory that they fill.
        selector: where their sockets are registered, each with a function that takes what is there.
        next_run: the next (target, run) to prepare, None while there is none.
        done, lost: called with the target and the run that is prepared, or has to be prepared again.
        threads: whether the workers are threads of one process.
        kept: the cache of pipeline 0, the ring's.
        timeout_s: how long a worker may be at one sample.

    Attributes:
        deadly: the records that end or hang who prepares them: `set` (its target's key), `index`, `where`, `code`
            (`pipelines.prepare.deadly_records`), `reason`.
        skipped, bad: how many records could not be prepared, and index -> why.
        restarts: workers that were replaced.
    """

    def __init__(
        self,
        targets: dict[int, Target],
        selector: selectors.BaseSelector,
        next_run: Callable[[], tuple[int, Run] | None],
        done: Callable[[int, Run], None],
        lost: Callable[[int, Run], None],
        *,
        threads: bool = False,
        kept: CacheManager | None = None,
        timeout_s: float = 300.0,
    ) -> None:
        self._kept = kept
        self.skipped = 0
        self.bad: dict[int, str] = {}
        self.restarts = 0
        self._targets = targets
        self._selector = selector
        self._next_run, self._done, self._lost = next_run, done, lost
        self._threads = threads
        self._workers: list[_Worker] = []
        self._in_vain = self._deadly_in_a_row = 0
        self._ended_cpu_s = 0.0
        self._payload = memory_pickle.dump({target.number: target.pipeline for target in targets.values()})
        self.deadly: list[dict[str, Any]] = []
        self._timeout_s = timeout_s
        self._look_at = 0.0
        self._suspects = Suspects(self._payload, selector, self._judge, timeout_s)
        self._held: dict[Record, list[tuple[int, Run]]] = {}  # what waits for a verdict

    @property
    def cpu_s(self) -> float:
        """CPU-seconds of all workers, of those too that have ended."""
        return self._ended_cpu_s + sum(worker.cpu_s for worker in list(self._workers))

    @property
    def pids(self) -> list[int]:
        """The living workers' processes."""
        return list(dict.fromkeys(worker.process.pid for worker in list(self._workers)))

    def start(self, count: int) -> None:
        """Start that many more."""
        if self._threads:
            self._start(count)
        else:
            for _ in range(count):
                self._start(1)

    def dispatch(self) -> None:
        """Give every worker that has room its next run; the least busy first."""
        while True:
            # One that only starts gets nothing yet: the others would be done with it long before.
            ready = (worker for worker in self._workers if worker.ready)
            worker = min(ready, key=lambda w: len(w.runs), default=None)
            if worker is None or len(worker.runs) >= _IN_FLIGHT:
                return
            found = self._next_run()
            if found is None:
                return
            number, run = found
            if not worker.runs:
                worker.since = time.monotonic()
            worker.runs.append(found)
            # A worker that has just died is noticed at its end-of-file, which gives the run to another.
            with contextlib.suppress(ipc.Lost):
                ipc.send(worker.connection, ipc.RUN.pack(b"R", number, *run))

    def replace_target(self, old: int, new: int) -> None:
        """Fill another of the targets in place of one; runs of the old one still come back as done."""
        for worker in self._workers:
            self._show(worker, new)
            with contextlib.suppress(ipc.Lost):  # as in `dispatch`
                ipc.send(worker.connection, ipc.pack("forget", target=old))

    @property
    def rate(self) -> float:
        """Samples/s that the workers prepare when they have enough to do; 0 while unknown."""
        known = [worker.rate for worker in self._workers if worker.rate]
        return len(self._workers) * sum(known) / len(known) if known else 0.0

    @property
    def busy(self) -> float:
        """The share of workers that have something to prepare."""
        return sum(bool(worker.runs) for worker in self._workers) / max(1, len(self._workers))

    def close(self) -> None:
        """End them all."""
        self._suspects.close()
        for worker in self._workers:
            worker.connection.close()
        for worker in self._workers:
            try:
                worker.process.wait(timeout=2.0)
            except subprocess.TimeoutExpired:
                worker.process.kill()
                worker.process.wait()
        os.close(self._payload)

    def _start(self, threads: int) -> None:
        """Start a process that is so many workers."""
        pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(threads)]
        with contextlib.ExitStack() as theirs:
            for pair in pairs:
                for end in pair:
                    ipc.keep_from_children(end)
                theirs.enter_context(pair[1])
            handed = [self._payload, *(end.fileno() for _, end in pairs)]
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "pipelines.feeder.worker_main", *map(str, handed)],
                pass_fds=handed,
                stdin=subprocess.DEVNULL,
                env=child_environment(),
            )
        for ours, _ in pairs:
            worker = _Worker(ours, process, self._hand_note(ours))
            for number, pipeline in {t.number: t.pipeline for t in self._targets.values()}.items():
                for index, code in pipeline.hazards.deadly.items():
                    self._forbid(worker, number, index, code)
            if self._kept is not None:  # before the targets of its pipeline
                with contextlib.suppress(ipc.Lost):  # as in `dispatch`
                    ipc.send(ours, ipc.pack("cache", pipeline=0, **self._kept.worker_arguments()), self._kept.fd)
            for number in self._targets:
                self._show(worker, number)
            self._workers.append(worker)
            self._selector.register(ours, selectors.EVENT_READ, lambda _, w=worker: self._hear(w))

    def _hand_note(self, connection: socket.socket) -> Note:
        """Where the worker at the other end is to say which sample it is at."""
        descriptor = os.memfd_create("note", os.MFD_CLOEXEC)
        try:
            note = Note(descriptor)
            with contextlib.suppress(ipc.Lost):  # as in `dispatch`
                ipc.send(connection, ipc.pack("note"), descriptor)
        finally:
            os.close(descriptor)
        return note

    def _forbid(self, worker: _Worker, number: int, index: int, code: int) -> None:
        with contextlib.suppress(ipc.Lost):  # as in `dispatch`
            ipc.send(worker.connection, ipc.pack("deadly", pipeline=number, index=index, code=code))

    def _show(self, worker: _Worker, number: int) -> None:
        target = self._targets[number]
        said = ipc.pack("target", target=number, pipeline=target.number, capacity=target.capacity)
        with contextlib.suppress(ipc.Lost):  # as in `dispatch`
            ipc.send(worker.connection, said, target.fd)

    def _hear(self, worker: _Worker) -> None:
        if worker not in self._workers:
            return  # it went with another thread of its process
        try:
            message = ipc.receive(worker.connection)
        except ipc.Lost:
            self._replace(worker.process)
            return
        if self._kept is not None and ipc.is_struct(message, ipc.CACHED, b"C"):
            self._kept.add_counts(*ipc.CACHED.unpack(message)[1:])
            return
        if not ipc.is_struct(message, ipc.DONE, b"D"):
            said = ipc.unpack(message)
            if said["kind"] == "ready":
                worker.ready = True
            else:
                worker.skipped.append(said)
            return
        _, number, start, stop, cpu_ns = ipc.DONE.unpack(message)
        worker.runs.remove((number, (start, stop)))
        if number in self._targets:  # a run that is prepared again is counted then
            self._left_out(worker.skipped, told=self._targets[number].pipeline.on_error == "skip")
        good = stop - start > len(worker.skipped)
        worker.skipped.clear()
        worker.cpu_s = cpu_ns / 1e9
        now = time.monotonic()
        rate = (stop - start) / max(1e-9, now - worker.since)
        worker.rate = rate if not worker.rate else worker.rate + _NEWER * (rate - worker.rate)
        worker.since = now
        self._in_vain = 0
        if good:
            self._deadly_in_a_row = 0
        self._done(number, (start, stop))

    def _left_out(self, records: list[dict[str, Any]], *, told: bool) -> None:
        """Count records that could not be prepared; `told`: they are left out, else their readers fail."""
        self.skipped += len(records)
        for said in records:
            if told and said["index"] not in self.bad and len(self.bad) < _SAID:
                last = "; stats()['bad'] has those that follow" if len(self.bad) == _SAID - 1 else ""
                where = f"sample {said['index']} ({said['where']})"
                warnings.warn(f"left out for all: {where}: {said['reason']}{last}", stacklevel=2)
            self.bad[said["index"]] = f"{said['where']}: {said['reason']}"

    def _replace(self, process: subprocess.Popen[bytes]) -> None:
        gone = [worker for worker in self._workers if worker.process is process]
        for worker in gone:
            self._selector.unregister(worker.connection)
            worker.connection.close()
            self._workers.remove(worker)
        process.kill()  # its socket has ended, by which it is of no use, whatever it may still wait for
        process.wait()
        one_hangs = any(worker.hangs for worker in gone)
        for worker in gone:
            self._ended_cpu_s += worker.cpu_s
            for place, (number, run) in enumerate(worker.runs):
                at = worker.note.at if place == 0 and worker.hangs == one_hangs else None
                if at is None or not self._accuse(worker, number, run, *at):
                    self._lost(number, run)
        self.restarts += 1
        if any(worker.runs for worker in gone) or not any(worker.cpu_s for worker in gone):
            self._in_vain += 1
        if self._in_vain >= _TRIES:
            raise PipelineError(
                f"{_TRIES} preparation workers in a row ended before they had prepared anything; "
                "see their output above"
            )
        self._start(len(gone))

    # --- records that end or hang workers ---------------------------------------------------------------

    def tick(self) -> float | None:
        """End workers that hang; in how many seconds to look again, None where nobody has anything to do."""
        tried_s = self._suspects.tick()
        if all(worker.ready and not worker.runs for worker in self._workers):
            return tried_s
        now = time.monotonic()
        if now >= self._look_at:
            self._look_at = now + self._timeout_s / 4
            for worker in self._workers:
                at = (worker.ready, worker.runs[:1], worker.note.at)
                if at != worker.at:
                    worker.at, worker.at_since = at, now
                limit_s = self._timeout_s if worker.ready else max(self._timeout_s, START_S)
                if now - worker.at_since >= limit_s and (worker.runs or not worker.ready):
                    worker.hangs = True
            # Several threads of one process may hang: it is replaced once.
            for process in dict.fromkeys(worker.process for worker in self._workers if worker.hangs):
                self._replace(process)
        left_s = self._look_at - now
        return left_s if tried_s is None else min(left_s, tried_s)

    def _accuse(self, worker: _Worker, number: int, run: Run, index: int, epoch: int) -> bool:
        """A worker ended or hung at a sample; whether that is being tried, and its run with it."""
        target = self._targets.get(number)
        if target is None or index in target.pipeline.hazards.deadly:
            return False
        record = (target.number, index, epoch)
        if not self._suspects.accuse(record, hung=worker.hangs):
            return False
        self._held.setdefault(record, []).append((number, run))
        if worker.hangs:
            warnings.warn(
                f"sample {index} ({target.pipeline.source.where(index)}) has been in preparation for more than "
                f"{self._timeout_s:g} s: the worker is ended, and the sample tried once more by itself",
                stacklevel=2,
            )
        return True

    def _judge(self, record: Record, code: int | None) -> None:
        number, index, _ = record
        target = next((target for target in self._targets.values() if target.number == number), None)
        if code is not None and target is not None:
            hazards = target.pipeline.hazards
            hazards.deadly[index] = code
            where = target.pipeline.source.where(index)
            reason = hazards.error(index, where).reason
            self.deadly.append({"set": target.key, "index": index, "where": where, "code": code, "reason": reason})
            for worker in self._workers:
                self._forbid(worker, number, index, code)
            self._in_vain = 0
            self._deadly_in_a_row += 1
            if self._deadly_in_a_row >= _MOST_DEADLY:
                raise PipelineError(
                    f"{_MOST_DEADLY} records in a row ended or hung every process that prepared them, the last "
                    f"of them sample {index} ({where})"
                )
        for held in self._held.pop(record, []):
            self._lost(*held)
