"""Prepares the batches of one loader ahead of it, in worker processes of its own.

It is what a `Feeder` is to many consumers, without the thread, the socket and the handshake: the loader's own
thread assigns blocks to workers and receives their reports, whenever it asks for a batch. Between two batches the
workers have enough blocks to fill the ring. The memory is anonymous and the sockets have no names, so nothing is
left of them, however the process ends.

Positions count the rows of this rank alone (`pipelines.order.rank_rows`), over all epochs.
"""

from __future__ import annotations

import os
import selectors
import weakref
from typing import TYPE_CHECKING

import numpy as np

from pipelines.description import PipelineDescription
from pipelines.loader.ring_reader import RingReader
from pipelines.order.rank_rows import RankRows
from pipelines.order.stream import Block, Stream
from pipelines.shm import ring
from pipelines.workers.buffers import Buffers
from pipelines.workers.worker_pool import WorkerPool

if TYPE_CHECKING:
    import torch

_READER = "loader"
_LAST_POSITION = 1 << 62
_BLOCK_ROWS = (4, 64)  # at least and at most, if the batch is not smaller
_PREFETCH_BYTES = 256 << 20  # above this the default is two batches
_MAX_BLOCKS_IN_FLIGHT = 64  # whose messages fit a socket's buffer, so that no send waits


class PrivateFeeder:
    """The preparation workers of one loader, and the ring that they fill.

    Args:
        rows: the rows that the loader reads, of each epoch at least one.
        workers: how many processes, at least 1.
        prefetch: batches prepared ahead of the one in use; None for `default_prefetch`.
        stop_epoch: the epoch before which reading ends; None: there is no last one.
        prepare_timeout_s: the longest time for one sample (`pipelines.Feeder`).

    Attributes:
        rows: the same.
        prefetch: as requested, or the default.

    Raises:
        PipelineError: the pipeline cannot be prepared, or cannot be given to workers.
        MemoryError: the ring does not fit in memory.
    """

    def __init__(
        self,
        pipeline: PipelineDescription,
        rows: RankRows,
        workers: int,
        prefetch: int | None,
        stop_epoch: int | None = None,
        prepare_timeout_s: float = 300.0,
    ) -> None:
        batch = rows.per_batch or rows.per_epoch
        sample_bytes = ring.sample_bytes(pipeline.fields)
        self.rows = rows
        self.prefetch = default_prefetch(workers, batch * sample_bytes) if prefetch is None else prefetch
        self._poison_records = pipeline.poison_records
        self._pid = os.getpid()
        self._stop = _LAST_POSITION if stop_epoch is None else stop_epoch * rows.per_epoch
        if pipeline.shuffle is True:  # each worker is going to read everywhere
            pipeline.source.load_for_forks()
        block = choose_block(batch, workers, pipeline.batch_unit)
        capacity = choose_capacity(batch, block, self.prefetch)
        stream = self._stream = Stream(capacity, block)
        self._selector = selectors.DefaultSelector()
        buffers = Buffers(pipeline, stream, {})

        def next_block() -> tuple[int, Block] | None:
            block = stream.next_block()
            return None if block is None else (buffers.ring, block)

        def on_done(_buffer_id: int, block: Block) -> None:
            stream.complete(block)

        try:
            self._layout = ring.Layout(pipeline.fields, capacity)
            self._fd = buffers.ring_buffer.read_only_fd
            self._reader: RingReader | None = None
            self._pool = WorkerPool(
                buffers, self._selector, next_block, on_done, timeout_s=prepare_timeout_s,
                is_forked=not pipeline.needs_gpu, blocks_in_flight=_MAX_BLOCKS_IN_FLIGHT, rows=rows,
            )  # fmt: skip
        except BaseException:
            buffers.close()
            self._selector.close()
            raise
        # Not a method: a loader that is dropped ends its workers with its last reference.
        self._close = weakref.finalize(self, _close, self._pid, self._pool, buffers, self._selector)
        try:
            self._pool.start(workers)
        except BaseException:
            self._close()
            raise

    @property
    def is_inherited(self) -> bool:
        """Whether this process was forked from the one that made this: the workers are not its own."""
        return os.getpid() != self._pid

    @property
    def cpu_s(self) -> float:
        """CPU-seconds that the workers have used."""
        return self._pool.cpu_s

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers."""
        return self._pool.pids

    def read(self, epoch: int, step: int, *, copy: bool) -> tuple[bytes, dict[str, torch.Tensor]]:
        """The rows of a batch, when they are prepared; what was read before is released.

        Returns:
            The status of each row (`pipelines.samples.fields`), and the fields: views, valid until the next call,
            or copies (`RingReader.read_batch`).

        Raises:
            PipelineError: the workers end before they have prepared anything.
        """
        first, last = self.rows.bounds(step)
        start, stop = (epoch * self.rows.per_epoch + row for row in (first, last))
        self._move_to(start)
        self._wait(stop)
        if self._reader is None:
            view = ring.RingView(self._fd, self._layout, wraps=True)
            self._reader = RingReader(view, self._poison_records)
        slot = start % self._stream.capacity
        slots = slot, slot + stop - start
        return self._reader.read_status(*slots), self._reader.read_batch(*slots, copy=copy)

    def keep_batch(self) -> None:
        """Let the batch that was read last stay valid: the ring is read through another mapping from now on."""
        if self._reader is not None and self._reader.keep():
            self._reader.view.close()
            self._reader = None

    def end_epoch(self, epoch: int) -> None:
        """Release all of an epoch; the next one is prepared meanwhile."""
        self._move_to((epoch + 1) * self.rows.per_epoch)
        self._handle_events(0.0)

    def close(self) -> None:
        """End the workers; the batch that was read last stays valid."""
        self._close()
        if self._reader is not None:
            self._reader.view.close()

    # --- the ring ---------------------------------------------------------------------------------------

    def _move_to(self, position: int) -> None:
        """Release all positions below this one; continue there if it is another than the next."""
        if self._reader is not None:
            self._reader.release()
        reader = self._stream.readers.get(_READER)
        if reader is not None and reader.position <= position <= self._stream.head:
            self._stream.release(_READER, position)
            return
        self._stream.leave(_READER)
        while not self._stream.is_idle:  # what is being prepared is not wanted any more, but is being written
            self._handle_events(None)
        self._stream.join(_READER, position, self._stop)

    def _wait(self, position: int) -> None:
        if self._stream.ready >= position:
            self._handle_events(0.0)
        while self._stream.ready < position:
            self._handle_events(None)

    def _handle_events(self, timeout_s: float | None) -> None:
        """Assign blocks, and wait so long for reports of workers."""
        self._pool.dispatch()
        due_s = self._pool.tick()
        limits = [seconds for seconds in (timeout_s, due_s) if seconds is not None]
        for key, _ in self._selector.select(max(0.0, min(limits)) if limits else None):
            key.data(key.fileobj)


def _close(pid: int, pool: WorkerPool, buffers: Buffers, selector: selectors.BaseSelector) -> None:
    """End the workers, unless this is a process that was forked from theirs."""
    if os.getpid() == pid:
        pool.close()
    buffers.close()
    selector.close()
    pool.forget_workers()  # their notes are mapped files: without this, open until a collection of garbage


def default_prefetch(workers: int, batch_bytes: int) -> int:
    """Batches ahead unless the user says: two for each worker, as torch's DataLoader has; fewer large ones."""
    return max(2, min(2 * workers, _PREFETCH_BYTES // max(1, batch_bytes)))


def choose_block(batch: int, workers: int, unit: int) -> int:
    """Rows that a worker prepares at a time: a batch's are divided among all workers, in multiples of `unit`."""
    low, high = _BLOCK_ROWS
    return -(-min(high, max(-(-batch // workers), min(low, batch))) // unit) * unit


def choose_capacity(batch: int, block: int, prefetch: int) -> int:
    """Slots of a ring in which a batch is in use and `prefetch` others are prepared."""
    # Batches need not begin where a block does. A multiple of 8 lets most columns be whole pages, which can be
    # mapped twice in a row.
    unit = block * 8 // np.gcd(block, 8)
    return int(-(-(batch * (prefetch + 1) + block) // unit) * unit)
