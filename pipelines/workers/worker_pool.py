"""Runs a feeder's preparation workers: starts them, assigns blocks, replaces those that end or hang.

Every call comes from the feeder's one thread.
"""

from __future__ import annotations

import contextlib
import dataclasses
import selectors
import socket
import subprocess
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from pipelines.cache.manager import CacheManager
from pipelines.errors import PipelineError
from pipelines.ipc import messages
from pipelines.ipc.child_processes import START_S
from pipelines.order.rank_rows import RankRows
from pipelines.order.stream import Block
from pipelines.samples.poison_records import PreparationNote
from pipelines.workers.buffers import Buffers
from pipelines.workers.record_trial import RecordKey, Suspects
from pipelines.workers.start_limit import StartLimit
from pipelines.workers.starting import Process, Starter, has_message, send_progress_note

_MAX_BLOCKS_IN_FLIGHT = 2
_MAX_FRUITLESS_RESTARTS = 10
_MAX_CONSECUTIVE_POISON = 20
_MAX_WARNINGS = 10  # skipped records that are named in warnings
# A forked worker begins within milliseconds, unless another thread held a lock at the fork which it now waits for.
# The limit grows if workers are late (`StartLimit`): they may have a large source to copy.
_FORK_START_S = 15.0
_RATE_WEIGHT = 0.2  # weight of the newest measurement in a worker's mean rate


@dataclass(eq=False)
class _Worker:
    connection: socket.socket
    process: Process
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
        threads: whether the workers are threads of one process instead of processes.
        cache: the sample cache of pipeline 0, the ring's.
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
        threads: bool = False,
        cache: CacheManager | None = None,
        timeout_s: float = 300.0,
        is_forked: bool = False,
        blocks_in_flight: int = _MAX_BLOCKS_IN_FLIGHT,
        rows: RankRows | None = None,
    ) -> None:
        self._cache = cache
        self._blocks_in_flight, self._rows = blocks_in_flight, rows
        self.skipped = 0
        self.bad: dict[int, str] = {}
        self.restarts = 0
        self._buffers, self._requeue = buffers.buffers, buffers.requeue
        self._selector = selector
        self._next_block, self._on_done = next_block, on_done
        self._threads = threads
        self._workers: list[_Worker] = []
        self._fruitless_restarts = self._consecutive_poison = 0
        self._ended_cpu_s = 0.0
        pipelines = {buffer.pipeline_id: buffer.pipeline for buffer in self._buffers.values()}
        self._starter = Starter(pipelines, is_forked=is_forked)
        self.poison: list[dict[str, Any]] = []
        self._timeout_s = timeout_s
        self._next_check = 0.0
        self._start_limit = StartLimit(min(timeout_s, _FORK_START_S))
        self._suspects = Suspects(self._starter.get_payload, selector, self._handle_outcome, timeout_s)
        self._awaiting_outcome: dict[RecordKey, list[tuple[int, Block]]] = {}

    @property
    def cpu_s(self) -> float:
        """CPU-seconds of all workers, including those that have ended."""
        return self._ended_cpu_s + sum(worker.cpu_s for worker in list(self._workers))

    @property
    def pids(self) -> list[int]:
        """The ids of the workers' processes."""
        return list(dict.fromkeys(worker.process.pid for worker in list(self._workers)))

    def start(self, count: int) -> None:
        """Start so many more workers."""
        if self._threads:
            self._start(count)
        else:
            for _ in range(count):
                self._start(1)

    def dispatch(self) -> None:
        """Assign blocks to workers until each has enough, the least busy worker first."""
        while True:
            # A starting worker gets no block: the others would finish it long before.
            is_ready = (worker for worker in self._workers if worker.is_ready)
            worker = min(is_ready, key=lambda w: len(w.blocks), default=None)
            if worker is None or len(worker.blocks) >= self._blocks_in_flight:
                return
            found = self._next_block()
            if found is None:
                return
            buffer_id, block = found
            if not worker.blocks:
                worker.busy_since = time.monotonic()
            worker.blocks.append(found)
            # If the worker has just ended, its end-of-file returns the block to another worker.
            with contextlib.suppress(messages.ConnectionLost):
                messages.send(worker.connection, messages.PREPARE.pack(b"R", buffer_id, *block))

    def replace_buffer(self, old: int, new: int) -> None:
        """Fill buffer `new` instead of `old`; blocks of the old one may still be reported as done."""
        for worker in self._workers:
            self._send_buffer(worker, new)
            with contextlib.suppress(messages.ConnectionLost):  # as in `dispatch`
                messages.send(worker.connection, messages.pack("forget", target=old))

    @property
    def rate(self) -> float:
        """Samples/s that the workers can prepare together; 0 while unknown."""
        known = [worker.rate for worker in self._workers if worker.rate]
        return len(self._workers) * sum(known) / len(known) if known else 0.0

    @property
    def busy_fraction(self) -> float:
        """The fraction of workers that have a block to prepare."""
        return sum(bool(worker.blocks) for worker in self._workers) / max(1, len(self._workers))

    def describe_progress(self) -> list[str]:
        """What each worker is doing, for an error message."""
        return [self._describe_worker(worker) for worker in self._workers]

    def _describe_worker(self, worker: _Worker) -> str:
        said, at = f"worker {worker.process.pid}", worker.note.at
        if at is None:
            return f"{said} is between two samples" if worker.blocks else f"{said} has nothing to prepare"
        buffer = self._buffers.get(worker.blocks[0][0]) if worker.blocks else None
        where = "" if buffer is None else f" ({buffer.pipeline.source.where(at[0])})"
        return f"{said} is preparing sample {at[0]}{where}"

    def close(self) -> None:
        """End all workers."""
        self._suspects.close()
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

    def _start(self, threads: int) -> None:
        """Start a process with so many workers, each a thread if there are several."""
        pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(threads)]
        with contextlib.ExitStack() as theirs:
            for pair in pairs:
                for end in pair:
                    messages.close_in_children(end)
                theirs.enter_context(pair[1])
            process = self._starter.start([end for _, end in pairs])
        for ours, _ in pairs:
            # A forked worker begins at once: it needs no time to import anything.
            worker = _Worker(ours, process, send_progress_note(ours), is_ready=self._starter.is_forked)
            for pipeline_id, pipeline in {t.pipeline_id: t.pipeline for t in self._buffers.values()}.items():
                for index, code in pipeline.poison_records.codes.items():
                    self._send_poison(worker, pipeline_id, index, code)
            if self._cache is not None:  # before the buffers of its pipeline
                with contextlib.suppress(messages.ConnectionLost):  # as in `dispatch`
                    messages.send(
                        ours, messages.pack("cache", pipeline=0, **self._cache.worker_arguments()), self._cache.fd
                    )
            for buffer_id in self._buffers:
                self._send_buffer(worker, buffer_id)
            self._workers.append(worker)
            self._next_check = min(self._next_check, worker.started_at + self._limit_s(worker))
            self._selector.register(ours, selectors.EVENT_READ, lambda _, w=worker: self._handle_message(w))

    def _send_poison(self, worker: _Worker, pipeline_id: int, index: int, code: int) -> None:
        with contextlib.suppress(messages.ConnectionLost):  # as in `dispatch`
            messages.send(worker.connection, messages.pack("poison", pipeline=pipeline_id, index=index, code=code))

    def _send_buffer(self, worker: _Worker, buffer_id: int) -> None:
        buffer = self._buffers[buffer_id]
        rows = None if self._rows is None else dataclasses.asdict(self._rows)
        message = messages.pack(
            "target", target=buffer_id, pipeline=buffer.pipeline_id, capacity=buffer.capacity, rows=rows
        )
        with contextlib.suppress(messages.ConnectionLost):  # as in `dispatch`
            messages.send(worker.connection, message, buffer.fd)

    def _handle_message(self, worker: _Worker) -> None:
        if worker not in self._workers:
            return  # already removed with another thread of its process
        try:
            message = messages.receive(worker.connection)
        except messages.ConnectionLost:
            self._replace(worker.process)
            return
        if self._cache is not None and messages.is_struct(message, messages.CACHED, b"C"):
            self._cache.add_counts(*messages.CACHED.unpack(message)[1:])
            return
        if not messages.is_struct(message, messages.DONE, b"D"):
            report = messages.unpack(message)
            if report["kind"] == "ready":
                worker.is_ready = worker.has_begun = True
                self._start_limit.report_begun(worker.started_at, time.monotonic())
            else:
                worker.skipped.append(report)
            return
        _, buffer_id, start, stop, cpu_ns = messages.DONE.unpack(message)
        worker.blocks.remove((buffer_id, (start, stop)))
        if buffer_id in self._buffers:  # else the block will be prepared again, and counted then
            self._record_skipped(worker.skipped, warn=self._buffers[buffer_id].pipeline.on_error == "skip")
        good = stop - start > len(worker.skipped)
        worker.skipped.clear()
        worker.cpu_s = cpu_ns / 1e9
        now = time.monotonic()
        rate = (stop - start) / max(1e-9, now - worker.busy_since)
        worker.rate = rate if not worker.rate else worker.rate + _RATE_WEIGHT * (rate - worker.rate)
        worker.busy_since = now
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
                message = f"sample {index} ({record['where']}): {record['reason']}{last}"
                warnings.warn(f"left out for all: {message}", stacklevel=2)
            self.bad[index] = reason

    def _replace(self, process: Process) -> None:
        ended = [worker for worker in self._workers if worker.process is process]
        for worker in ended:
            self._selector.unregister(worker.connection)
            worker.connection.close()
            self._workers.remove(worker)
        process.kill()  # it cannot be used without its socket
        process.wait()
        any_hung = any(worker.is_hung for worker in ended)
        for worker in ended:
            self._ended_cpu_s += worker.cpu_s
            for place, (buffer_id, block) in enumerate(worker.blocks):
                progress = worker.note.at if place == 0 and worker.is_hung == any_hung else None
                if progress is None or not self._report_suspect(worker, buffer_id, block, *progress):
                    self._requeue(buffer_id, block)
        self.restarts += 1
        has_blocks = any(worker.blocks for worker in ended)
        if not ended[0].is_late and (has_blocks or not any(worker.cpu_s for worker in ended)):
            self._fruitless_restarts += 1
        if self._fruitless_restarts >= _MAX_FRUITLESS_RESTARTS:
            raise PipelineError(
                f"{_MAX_FRUITLESS_RESTARTS} preparation workers in a row ended before they had prepared a sample; "
                "see their output above"
            )
        self._start(len(ended))

    # --- records that end or hang workers ---------------------------------------------------------------

    def tick(self) -> float | None:
        """Replace hung workers; returns the seconds until the next check, None while no worker has a block."""
        tried_s = self._suspects.tick()
        if all(worker.is_ready and not worker.blocks for worker in self._workers):
            return tried_s
        now = time.monotonic()
        if now >= self._next_check:
            self._next_check = now + min(map(self._limit_s, self._workers)) / 4
            for worker in self._workers:
                progress = (worker.has_begun, worker.blocks[:1], worker.note.at)
                if progress != worker.progress:
                    worker.progress, worker.progress_since = progress, now
                since = worker.progress_since if worker.has_begun else worker.started_at
                if now - since < self._limit_s(worker) or (worker.is_ready and not worker.blocks):
                    continue
                # Nobody may have read for as long what it has sent meanwhile.
                worker.is_hung = not has_message(worker.connection)
            if late := [worker.process.pid for worker in self._workers if worker.is_late]:
                self._start_limit.report_late(late, now)
            # Several hung threads share one process, which is replaced once.
            for process in dict.fromkeys(worker.process for worker in self._workers if worker.is_hung):
                self._replace(process)
        left_s = self._next_check - now
        return left_s if tried_s is None else min(left_s, tried_s)

    def _limit_s(self, worker: _Worker) -> float:
        """How long a worker may be without progress."""
        if worker.has_begun:
            return self._timeout_s
        if self._starter.is_forked:
            return self._start_limit.limit_s
        return max(self._timeout_s, START_S)

    def _report_suspect(self, worker: _Worker, buffer_id: int, block: Block, index: int, epoch: int) -> bool:
        """Report the sample at which a worker ended or hung.

        Returns:
            Whether the sample is being tried now; its block waits for the outcome.
        """
        buffer = self._buffers.get(buffer_id)
        if buffer is None or index in buffer.pipeline.poison_records.codes:
            return False
        record = (buffer.pipeline_id, index, epoch)
        if not self._suspects.report(record, hung=worker.is_hung):
            return False
        self._awaiting_outcome.setdefault(record, []).append((buffer_id, block))
        if worker.is_hung:
            warnings.warn(
                f"sample {index} ({buffer.pipeline.source.where(index)}) has been in preparation for more than "
                f"{self._timeout_s:g} s: its worker is ended, and the sample tried once more by itself",
                stacklevel=2,
            )
        return True

    def _handle_outcome(self, record: RecordKey, code: int | None) -> None:
        pipeline_id, index, _ = record
        buffer = next((buffer for buffer in self._buffers.values() if buffer.pipeline_id == pipeline_id), None)
        if code is not None and buffer is not None:
            poison_records = buffer.pipeline.poison_records
            poison_records.codes[index] = code
            where = buffer.pipeline.source.where(index)
            reason = poison_records.error(index, where).reason
            self.poison.append({"set": buffer.key, "index": index, "where": where, "code": code, "reason": reason})
            for worker in self._workers:
                self._send_poison(worker, pipeline_id, index, code)
            self._fruitless_restarts = 0
            self._consecutive_poison += 1
            if self._consecutive_poison >= _MAX_CONSECUTIVE_POISON:
                raise PipelineError(
                    f"{_MAX_CONSECUTIVE_POISON} records in a row ended or hung every process that prepared them; "
                    f"the last is sample {index} ({where})"
                )
        for buffer_id, block in self._awaiting_outcome.pop(record, []):
            self._requeue(buffer_id, block)
