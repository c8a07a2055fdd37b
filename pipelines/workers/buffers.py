"""Holds the memory that a feeder's workers fill: the ring and the resident sets."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from pipelines.description import PipelineDescription
from pipelines.environment.machine_limits import fits_in_memory
from pipelines.order.stream import Block, Stream, default_capacity
from pipelines.samples.fields import GOOD, ODD, OK
from pipelines.shm import ring

_LEAST_FREE = 4  # times the memory that a ring of all samples takes, of the half of what is free


@dataclass
class Buffer:
    """Memory to be filled: the ring, or a resident set.

    Attributes:
        key: its name.
        pipeline_id: the number of its pipeline among those that the workers receive when they start.
        capacity: samples in it.
        fd, read_only_fd: descriptors of the memory, for writers and for readers.
        pending, unfinished: of a resident set, the blocks that no worker has, and how many are not prepared.
    """

    key: str
    pipeline_id: int
    pipeline: PipelineDescription
    capacity: int
    fd: int
    read_only_fd: int
    pending: list[Block] = field(default_factory=list)
    unfinished: int = 0


class Buffers:
    """A feeder's buffers by number. The ring gets a new number with new memory.

    Args:
        pipeline: the ring's pipeline.
        stream: the ring's state.
        resident: name -> pipeline without randomness.

    Attributes:
        buffers: number -> buffer.
        ring: number of the ring.
        too_large: resident sets that memory does not hold.
    """

    def __init__(
        self,
        pipeline: PipelineDescription,
        stream: Stream,
        resident: Mapping[str, PipelineDescription],
    ) -> None:
        self.buffers: dict[int, Buffer] = {}
        self.too_large: set[str] = set()
        self.ring = held = 0
        self._pipeline = pipeline
        self._stream = stream
        self._ok: npt.NDArray[np.uint8] | None = None  # the ring's status column, if records may be skipped
        try:
            self.buffers[0] = _create_buffer("ring", 0, pipeline, stream.capacity)
            for number, (key, pipe) in enumerate(resident.items(), start=1):
                still = pipe.without_randomness()
                held += ring.Layout(still.fields, len(still)).nbytes
                if not fits_in_memory(held):
                    self.too_large.add(key)
                    continue
                buffer = self.buffers[number] = _create_buffer(key, number, still, len(still))
                buffer.pending = [
                    (i, min(i + stream.block_size, len(still))) for i in range(0, len(still), stream.block_size)
                ]
                buffer.unfinished = len(buffer.pending)
            self._map_status()
        except BaseException:
            self.close()
            raise

    @property
    def ring_buffer(self) -> Buffer:
        """The ring's memory."""
        return self.buffers[self.ring]

    @property
    def residents(self) -> dict[str, Buffer]:
        """Resident sets by name."""
        return {buffer.key: buffer for number, buffer in self.buffers.items() if number != self.ring}

    def next_resident(self, wanted: Callable[[str], bool]) -> tuple[int, Block] | None:
        """The next (buffer number, block) to prepare for a resident set, or None.

        Args:
            wanted: whether the set of this name is to be prepared now.
        """
        for number, buffer in self.buffers.items():
            if buffer.pending and wanted(buffer.key):
                return number, buffer.pending.pop(0)
        return None

    def requeue(self, buffer_id: int, block: Block) -> None:
        """Prepare a block again, because its worker has ended."""
        if buffer_id == self.ring:
            self._stream.requeue(block)
        elif buffer_id in self.buffers:  # else a ring that was replaced
            self.buffers[buffer_id].pending.insert(0, block)

    def create_ring(self) -> Buffer:
        """New memory for the ring, of the same size.

        Raises:
            MemoryError: there is not enough memory for a second ring.
        """
        ring = self.ring_buffer
        return _create_buffer(ring.key, ring.pipeline_id, ring.pipeline, ring.capacity)

    def replace_ring(self, new: Buffer) -> int:
        """Continue the ring in new memory; returns its old number.

        Consumers that were detached may still read the old memory.
        """
        before, old = self.ring, self.ring_buffer
        start, stop = self._stream.renew()
        ring.copy_slots(old.fd, new.fd, self._layout(), start, stop)
        del self.buffers[before]
        self.ring = max((before, *self.buffers)) + 1
        self.buffers[self.ring] = new
        _close_buffer(old)
        self._map_status()
        return before

    def count_good(self, start: int, stop: int) -> int:
        """How many of the positions [start, stop) hold a sample: all but the skipped records."""
        if self._ok is None:
            return stop - start
        stream = self._stream
        last = stop if stream.kept else min(stop, stream.head)  # of what is kept, epochs have the same samples
        slots = np.arange(start, last) % (stream.kept or stream.capacity)
        return int(np.count_nonzero(self._ok[slots] & (ODD if self._pipeline.is_cut else GOOD)))

    def close(self) -> None:
        """Close all descriptors; memory that is mapped stays."""
        self._ok = None
        for buffer in self.buffers.values():
            _close_buffer(buffer)
        self.buffers = {}

    def _map_status(self) -> None:
        if self._pipeline.on_error == "skip":
            self._ok = ring.map_writable(self.ring_buffer.fd, self._layout())[OK]

    def _layout(self) -> ring.Layout:
        return ring.Layout(self._pipeline.fields, self._stream.capacity)


def choose_capacity(pipeline: PipelineDescription, *, repeats: bool) -> int:
    """The default capacity of a ring: all samples, if each epoch has the same and they are small."""
    sample_bytes, n = ring.sample_bytes(pipeline.fields), len(pipeline)
    if repeats and fits_in_memory(_LEAST_FREE * sample_bytes * n):
        return max(2, n)
    return default_capacity(sample_bytes)


def _create_buffer(key: str, number: int, pipeline: PipelineDescription, capacity: int) -> Buffer:
    fd = ring.create(ring.Layout(pipeline.fields, capacity), f"{key}-{len(pipeline)}")
    try:
        return Buffer(key, number, pipeline, capacity, fd, ring.reopen_read_only(fd))
    except OSError:
        os.close(fd)
        raise


def _close_buffer(buffer: Buffer) -> None:
    os.close(buffer.fd)
    os.close(buffer.read_only_fd)
