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

from pipelines import _payload, wire
from pipelines.errors import PipelineError
from pipelines.keep import Kept
from pipelines.pipeline import Pipeline
from pipelines.stream import Run

_IN_FLIGHT = 2
_TRIES = 10
_SAID = 10  # records left out that are named in warnings
_NEWER = 0.2  # the weight of the newest measurement of a worker's rate


@dataclass
class Target:
    """Memory to be filled: the ring, or a resident set.

    Attributes:
        key: its name.
        number: of its pipeline, among those that the workers are handed when they start.
        capacity: samples in it.
        fd: the memory.
        todo, left: of a resident set, the runs that nobody has yet, and how many are not done.
    """

    key: str
    number: int
    pipeline: Pipeline
    capacity: int
    fd: int
    todo: list[Run] = field(default_factory=list)
    left: int = 0


@dataclass(eq=False)
class _Worker:
    connection: socket.socket
    process: subprocess.Popen[bytes]
    runs: list[tuple[int, Run]] = field(default_factory=list)
    cpu_s: float = 0.0
    since: float = 0.0
    rate: float = 0.0
    ready: bool = False  # it has started, which takes long
    skipped: list[dict[str, Any]] = field(default_factory=list)  # in the run that it is at


class Crew:
    """Preparation workers.

    Args:
        targets: number -> memory that they fill.
        selector: where their sockets are registered, each with a function that takes what is there.
        next_run: the next (target, run) to prepare, None while there is none.
        done, lost: called with the target and the run that is prepared, or has to be prepared again.
        threads: whether the workers are threads of one process.
        kept: the cache of pipeline 0, the ring's.

    Attributes:
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
        kept: Kept | None = None,
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
        self._in_vain = 0
        self._ended_cpu_s = 0.0
        self._payload = _payload.dump({target.number: target.pipeline for target in targets.values()})

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
            with contextlib.suppress(wire.Lost):
                wire.send(worker.connection, wire.RUN.pack(b"R", number, *run))

    def replace_target(self, old: int, new: int) -> None:
        """Fill another of the targets in place of one; runs of the old one still come back as done."""
        for worker in self._workers:
            self._show(worker, new)
            with contextlib.suppress(wire.Lost):  # as in `dispatch`
                wire.send(worker.connection, wire.pack("forget", target=old))

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
                    wire.keep_from_children(end)
                theirs.enter_context(pair[1])
            handed = [self._payload, *(end.fileno() for _, end in pairs)]
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "pipelines.worker", *map(str, handed)],
                pass_fds=handed,
                stdin=subprocess.DEVNULL,
                env=child_environment(),
            )
        for ours, _ in pairs:
            worker = _Worker(ours, process)
            if self._kept is not None:  # before the targets of its pipeline
                with contextlib.suppress(wire.Lost):  # as in `dispatch`
                    wire.send(ours, wire.pack("cache", pipeline=0, **self._kept.message()), self._kept.fd)
            for number in self._targets:
                self._show(worker, number)
            self._workers.append(worker)
            self._selector.register(ours, selectors.EVENT_READ, lambda _, w=worker: self._hear(w))

    def _show(self, worker: _Worker, number: int) -> None:
        target = self._targets[number]
        said = wire.pack("target", target=number, pipeline=target.number, capacity=target.capacity)
        with contextlib.suppress(wire.Lost):  # as in `dispatch`
            wire.send(worker.connection, said, target.fd)

    def _hear(self, worker: _Worker) -> None:
        if worker not in self._workers:
            return  # it went with another thread of its process
        try:
            message = wire.receive(worker.connection)
        except wire.Lost:
            self._replace(worker.process)
            return
        if self._kept is not None and wire.is_struct(message, wire.CACHED, b"C"):
            self._kept.told(*wire.CACHED.unpack(message)[1:])
            return
        if not wire.is_struct(message, wire.DONE, b"D"):
            said = wire.unpack(message)
            if said["kind"] == "ready":
                worker.ready = True
            else:
                worker.skipped.append(said)
            return
        _, number, start, stop, cpu_ns = wire.DONE.unpack(message)
        worker.runs.remove((number, (start, stop)))
        if number in self._targets:  # a run that is prepared again is counted then
            self._left_out(worker.skipped)
        worker.skipped.clear()
        worker.cpu_s = cpu_ns / 1e9
        now = time.monotonic()
        rate = (stop - start) / max(1e-9, now - worker.since)
        worker.rate = rate if not worker.rate else worker.rate + _NEWER * (rate - worker.rate)
        worker.since = now
        self._in_vain = 0
        self._done(number, (start, stop))

    def _left_out(self, records: list[dict[str, Any]]) -> None:
        self.skipped += len(records)
        for said in records:
            if said["index"] not in self.bad and len(self.bad) < _SAID:
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
        for worker in gone:
            self._ended_cpu_s += worker.cpu_s
            for number, run in worker.runs:
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


def child_environment() -> dict[str, str]:
    """The environment of a child: one thread for every library, and this process's import path."""
    single = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    path = os.pathsep.join(p or os.getcwd() for p in sys.path)
    return {**os.environ, **single, "PYTHONPATH": path}
