"""Runs a feeder's preparation workers: starts them, assigns blocks, replaces those that end or hang.

Every call comes from the feeder's one thread.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import select
import selectors
import socket
import subprocess
import time
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from pipelines.errors import PipelineError
from pipelines.ipc import messages
from pipelines.ipc.child_processes import START_S
from pipelines.order.rank_rows import RankRows
from pipelines.order.stream import Block
from pipelines.samples.poison_records import HUNG, KILLED, PreparationNote
from pipelines.workers.buffers import Buffers
from pipelines.workers.processes import ForkedProcess, Starter

_MAX_BLOCKS_IN_FLIGHT = 2
_MAX_FRUITLESS_RESTARTS = 10
# A record is poison after so many workers have ended at it (anybody may kill one), or have hung at it.
_MOST_ENDS, _MOST_HANGS = 3, 2
_MAX_CONSECUTIVE_POISON = 20
_MAX_WARNINGS = 10  # skipped records that are named in warnings
# A forked worker begins within milliseconds, unless it waits for a lock that another thread held at the fork, or
# has a large source to copy. The limit doubles for each that replaces a late one.
_FORK_START_S = 60.0
_MAX_LATE = 5  # times in a row, half an hour
_RATE_WEIGHT = 0.2  # weight of the newest measurement in a worker's mean rate


@dataclass(eq=False)
class _Worker:
    connection: socket.socket
    process: subprocess.Popen[bytes] | ForkedProcess
    note: PreparationNote
    blocks: list[tuple[int, Block]] = field(default_factory=list)
    cpu_s: float = 0.0
    busy_since: float = 0.0
    rate: float = 0.0
    is_ready: bool = False  # is given blocks
    has_begun: bool = False  # has said so
    skipped: list[dict[str, Any]] = field(default_factory=list)  # in its present block
    progress: tuple[Any, ...] = ()  # at the last check
    progress_since: float = 0.0
    started_at: float = field(default_factory=time.monotonic)
    late: int = 0  # how many in a row before it, which it replaces, have not begun in time
    is_hung: bool = False

    @property
    def is_late(self) -> bool:
        """Whether it was forked and is replaced before it has begun."""
        return self.is_hung and self.is_ready and not self.has_begun


class WorkerPool:
    """A feeder's preparation workers.

    Args:
        buffers: the memory to fill; a block whose worker has ended is requeued there.
        selector: where the workers' sockets are registered, each with its handler.
        next_block: returns the next (buffer number, block) to prepare, or None.
        on_done: called with (buffer number, block) when it is prepared.
        cache: of pipeline 0, the ring's (`pipelines.cache.manager.CacheManager`).
        timeout_s: the longest time for one sample.
        is_forked: whether workers are forked from this process instead of started as new interpreters.
        blocks_in_flight: how many blocks a worker is given at a time.
        rows: the rows of each epoch that the ring holds; None: all.

    Attributes:
        poison: the records that end or hang every process that prepares them: `set` (the buffer's key), `index`,
            `where`, `code` (`pipelines.samples.poison_records`), `reason`.
        skipped: how many records could not be prepared.
        bad: index -> reason, of those records.
        restarts: how many workers were replaced.
    """

    def __init__(
        self,
        buffers: Buffers,
        selector: selectors.BaseSelector,
        next_block: Callable[[], tuple[int, Block] | None],
        on_done: Callable[[int, Block], None],
        *,
        cache: Any = None,
        timeout_s: float = 300.0,
        is_forked: bool = False,
        blocks_in_flight: int = _MAX_BLOCKS_IN_FLIGHT,
        rows: RankRows | None = None,
    ) -> None:
        self.poison: list[dict[str, Any]] = []
        self.bad: dict[int, str] = {}
        self.skipped = self.restarts = 0
        self._cache, self._blocks_in_flight, self._rows = cache, blocks_in_flight, rows
        self._buffers, self._requeue = buffers.buffers, buffers.requeue
        self._selector, self._next_block, self._on_done = selector, next_block, on_done
        self._workers: list[_Worker] = []
        self._fruitless_restarts = self._consecutive_poison = 0
        self._reads_alone = False
        self._ended_cpu_s = self._batch_cpu_s = 0.0
        pipelines = {buffer.pipeline_id: buffer.pipeline for buffer in self._buffers.values()}
        self._has_batch_stages = any(pipeline.batched for pipeline in pipelines.values())
        self._starter = Starter(pipelines, is_forked=is_forked)
        self._timeout_s, self._next_check = timeout_s, 0.0
        # Of each block that is not done: how many workers have failed at (index, whether it hung).
        self._failures: defaultdict[tuple[int, Block], Counter[tuple[int, bool]]] = defaultdict(Counter)

    @property
    def cpu_s(self) -> float:
        """CPU-seconds of all workers, including those that have ended."""
        return self._ended_cpu_s + sum(worker.cpu_s for worker in list(self._workers))

    @property
    def cpu_by_role(self) -> dict[str, float]:
        """The same by role: `prepare`, and of a pipeline with batch stages what these have used, `batch`."""
        batch = {"batch": self._batch_cpu_s} if self._has_batch_stages else {}
        return {"prepare": self.cpu_s - self._batch_cpu_s, **batch}

    @property
    def pids(self) -> list[int]:
        """The ids of the workers' processes."""
        return [worker.process.pid for worker in list(self._workers)]

    def start(self, count: int) -> None:
        """Start so many more workers."""
        for _ in range(count):
            self._start()

    def dispatch(self) -> None:
        """Assign blocks to workers until each has enough, the least busy worker first."""
        while True:
            # A starting worker gets no block: the others would finish it long before.
            is_ready = (worker for worker in self._workers if worker.is_ready)
            worker = min(is_ready, key=lambda w: len(w.blocks), default=None)
            if worker is None or len(worker.blocks) >= self._blocks_in_flight:
                return
            if (following := self._next_block()) is None:
                return
            if not worker.blocks:
                worker.busy_since = time.monotonic()
            worker.blocks.append(following)
            _send(worker, messages.PREPARE.pack(b"R", following[0], *following[1]))

    def replace_buffer(self, old: int, new: int) -> None:
        """Fill buffer `new` instead of `old`; blocks of the old one may still be reported as done."""
        for worker in self._workers:
            self._send_buffer(worker, new)
            _send(worker, messages.pack("forget", target=old))

    @property
    def rate(self) -> float:
        """Samples/s that the workers can prepare together; 0 while unknown."""
        rates = [worker.rate for worker in self._workers if worker.rate]
        return len(self._workers) * sum(rates) / len(rates) if rates else 0.0

    @property
    def busy_fraction(self) -> float:
        """The fraction of workers that have a block to prepare."""
        return sum(bool(worker.blocks) for worker in self._workers) / max(1, len(self._workers))

    def close(self) -> None:
        """End all workers."""
        for worker in self._workers:
            worker.connection.close()
        for worker in self._workers:
            try:
                worker.process.wait(timeout=2.0)
            except subprocess.TimeoutExpired:
                worker.process.kill()
                worker.process.wait()
        self._starter.close()

    def forget_workers(self) -> None:
        """Free what is held of ended workers, except for the CPU-seconds that they have used."""
        self._ended_cpu_s = self.cpu_s
        self._workers.clear()

    def _start(self, late: int = 0) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            messages.close_in_children(ours)
            messages.close_in_children(theirs)
            process = self._starter.start(theirs)
        note = os.memfd_create("note", os.MFD_CLOEXEC)
        try:
            # A forked worker begins at once: it needs no time to import anything.
            worker = _Worker(ours, process, PreparationNote(note), is_ready=self._starter.is_forked, late=late)
            _send(worker, messages.pack("note", alone=self._reads_alone), note)
        finally:
            os.close(note)
        for buffer in self._buffers.values():
            records = buffer.pipeline.poison_records
            for index, code in {**dict.fromkeys(records.suspects, 0), **records.codes}.items():
                self._send_poison(worker, buffer.pipeline_id, index, code)
        if self._cache is not None:  # before the buffers of its pipeline
            _send(worker, messages.pack("cache", pipeline=0, **self._cache.worker_arguments()), self._cache.fd)
        for buffer_id in self._buffers:
            self._send_buffer(worker, buffer_id)
        self._workers.append(worker)
        self._next_check = min(self._next_check, worker.started_at + self._limit_s(worker))
        self._selector.register(ours, selectors.EVENT_READ, lambda _: self._handle_message(worker))

    def _send_poison(self, worker: _Worker, pipeline_id: int, index: int, code: int) -> None:
        """Tell a worker of a poison record, or with code 0 of a suspect."""
        _send(worker, messages.pack("poison", pipeline=pipeline_id, index=index, code=code))

    def _send_buffer(self, worker: _Worker, buffer_id: int) -> None:
        buffer = self._buffers[buffer_id]
        rows = None if self._rows is None else dataclasses.asdict(self._rows)
        message = messages.pack(
            "target", target=buffer_id, pipeline=buffer.pipeline_id, capacity=buffer.capacity, rows=rows
        )
        _send(worker, message, buffer.fd)

    def _handle_message(self, worker: _Worker) -> None:
        try:
            message = messages.receive(worker.connection)
        except messages.ConnectionLost:
            self._replace(worker)
            return
        if self._cache is not None and messages.is_struct(message, messages.CACHED, b"C"):
            self._cache.add_counts(*messages.CACHED.unpack(message)[1:])
            return
        if not messages.is_struct(message, messages.DONE, b"D"):
            report = messages.unpack(message)
            if report["kind"] == "ready":
                worker.is_ready = worker.has_begun = True
            else:
                worker.skipped.append(report)
            return
        _, buffer_id, start, stop, cpu_ns, batch_ns = messages.DONE.unpack(message)
        worker.blocks.remove((buffer_id, (start, stop)))
        self._failures.pop((buffer_id, (start, stop)), None)
        if buffer_id in self._buffers:  # else the block will be prepared again, and counted then
            self._record_skipped(worker.skipped, warn=self._buffers[buffer_id].pipeline.on_error == "skip")
        good = stop - start > len(worker.skipped)
        worker.skipped.clear()
        worker.cpu_s = cpu_ns / 1e9
        self._batch_cpu_s += batch_ns / 1e9
        now_s = time.monotonic()
        rate = (stop - start) / max(1e-9, now_s - worker.busy_since)
        worker.rate = rate if not worker.rate else worker.rate + _RATE_WEIGHT * (rate - worker.rate)
        worker.busy_since = now_s
        self._fruitless_restarts = 0
        if good:
            self._consecutive_poison = 0
        self._on_done(buffer_id, (start, stop))

    def _record_skipped(self, records: list[dict[str, Any]], *, warn: bool) -> None:
        """Count records that could not be prepared.

        Args:
            warn: name the first few in warnings, because readers will not see an error.
        """
        self.skipped += len(records)
        for record in records:
            index, reason = record["index"], f"{record['where']}: {record['reason']}"
            if warn and index not in self.bad and len(self.bad) < _MAX_WARNINGS:
                last = "; stats()['bad'] lists further ones" if len(self.bad) == _MAX_WARNINGS - 1 else ""
                text = f"left out for all: sample {index} ({record['where']}): {record['reason']}{last}"
                warnings.warn(text, stacklevel=2)
            self.bad[index] = reason

    def _replace(self, worker: _Worker) -> None:
        self._selector.unregister(worker.connection)
        worker.connection.close()
        self._workers.remove(worker)
        worker.process.kill()  # it cannot be used without its socket
        worker.process.wait()
        self._ended_cpu_s += worker.cpu_s
        if worker.blocks and worker.note.at is not None:
            self._count_failure(worker, *worker.blocks[0], worker.note.at[0])
        self._reads_alone |= bool(worker.blocks) and worker.note.at is None
        for buffer_id, block in worker.blocks:
            self._requeue(buffer_id, block)
        self.restarts += 1
        if worker.is_late and worker.late + 1 >= _MAX_LATE:
            raise PipelineError(
                f"{_MAX_LATE} preparation workers in a row, forks of this process, did not start in time, the "
                f"last within {self._limit_s(worker):g} s: unpickling the stages or the source takes too long, or "
                "waits for something"
            )
        if not worker.is_late and (worker.blocks or not worker.cpu_s):
            self._fruitless_restarts += 1
        if self._fruitless_restarts >= _MAX_FRUITLESS_RESTARTS:
            raise PipelineError(
                f"{_MAX_FRUITLESS_RESTARTS} preparation workers in a row ended, or did not start in time, before "
                "they had prepared a sample; see their output above"
            )
        self._start(worker.late + 1 if worker.is_late else 0)

    # --- records that end or hang workers ---------------------------------------------------------------

    def tick(self) -> float | None:
        """Replace hung workers; returns the seconds until the next check, None while no worker has a block."""
        if all(worker.is_ready and not worker.blocks for worker in self._workers):
            return None
        now_s = time.monotonic()
        if now_s >= self._next_check:
            self._next_check = now_s + min(self._timeout_s, *map(self._limit_s, self._workers)) / 4
            for worker in self._workers:
                progress = (worker.has_begun, worker.blocks[:1], worker.note.at)
                if progress != worker.progress:
                    worker.progress, worker.progress_since = progress, now_s
                since = worker.progress_since if worker.has_begun else worker.started_at
                if now_s - since < self._limit_s(worker) or (worker.is_ready and not worker.blocks):
                    continue
                # Nobody may have read for as long what it has sent meanwhile.
                worker.is_hung = not _has_message(worker.connection)
            for worker in [worker for worker in self._workers if worker.is_hung]:
                if worker.is_late:
                    warnings.warn(
                        "a preparation worker, a fork of this process, did not start within "
                        f"{self._limit_s(worker):g} s (process {worker.process.pid}). Another one gets twice that "
                        "time. It waits for a lock that another thread held at the fork, or copies a large "
                        "source: make loaders before you start threads",
                        stacklevel=2,
                    )
                self._replace(worker)
        return self._next_check - now_s

    def _limit_s(self, worker: _Worker) -> float:
        """How long a worker may be without progress."""
        if worker.has_begun:
            return self._timeout_s
        return _FORK_START_S * 2**worker.late if self._starter.is_forked else max(self._timeout_s, START_S)

    def _count_failure(self, worker: _Worker, buffer_id: int, block: Block, index: int) -> None:
        """Count that a worker ended or hung at a sample; after a few times the record is poison."""
        buffer = self._buffers.get(buffer_id)
        if buffer is None or index in buffer.pipeline.poison_records.codes:
            return
        failures, where = self._failures[buffer_id, block], buffer.pipeline.source.where(index)
        failures[index, worker.is_hung] += 1
        if buffer.pipeline.batch_unit > 1:
            buffer.pipeline.poison_records.suspects.add(index)
            for other in self._workers:
                self._send_poison(other, buffer.pipeline_id, index, 0)
        if failures[index, worker.is_hung] < (_MOST_HANGS if worker.is_hung else _MOST_ENDS):
            if worker.is_hung:
                warnings.warn(
                    f"sample {index} ({where}) has been in preparation for more than {self._timeout_s:g} s: its "
                    "worker is ended, and the sample is tried once more",
                    stacklevel=2,
                )
            return
        code, poison_records = HUNG if worker.is_hung else KILLED, buffer.pipeline.poison_records
        poison_records.codes[index] = code
        reason = poison_records.error(index, where).reason
        self.poison.append({"set": buffer.key, "index": index, "where": where, "code": code, "reason": reason})
        for other in self._workers:
            self._send_poison(other, buffer.pipeline_id, index, code)
        self._fruitless_restarts = 0
        self._consecutive_poison += 1
        if self._consecutive_poison >= _MAX_CONSECUTIVE_POISON:
            raise PipelineError(
                f"{_MAX_CONSECUTIVE_POISON} records in a row ended or hung every process that prepared them; "
                f"the last is sample {index} ({where})"
            )


def _send(worker: _Worker, message: bytes, *descriptors: int) -> None:
    """Send a message; if the worker has just ended, its end of file returns its blocks to another one."""
    with contextlib.suppress(messages.ConnectionLost):
        messages.send(worker.connection, message, *descriptors)


def _has_message(connection: socket.socket) -> bool:
    """Whether a message of a worker, or its end, waits to be received."""
    waiting = select.poll()
    waiting.register(connection, select.POLLIN)
    return bool(waiting.poll(0))
