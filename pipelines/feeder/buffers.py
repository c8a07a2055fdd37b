"""The memory that a feeder has filled: the ring, and resident sets."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt

from pipelines.feeder.worker_pool import Target
from pipelines.pipeline import Pipeline
from pipelines.prepare.fields import GOOD, ODD, OK, Columns
from pipelines.shm import ring
from pipelines.stream import Run, Stream

_POISON = 0xA5


class Memories:
    """Memory by number. The ring's number changes when it goes on in new memory.

    Args:
        pipeline: of the ring.
        stream: the ring's bookkeeping.
        resident: pipelines without randomness by name.
        poison: overwrite what was given back.

    Attributes:
        targets: number -> memory.
        ring: number of the ring.
    """

    def __init__(
        self, pipeline: Pipeline, stream: Stream, resident: Mapping[str, Pipeline], *, poison: bool
    ) -> None:
        self.targets: dict[int, Target] = {}
        self.ring = 0
        self._pipeline = pipeline
        self._stream = stream
        self._poisoned: Columns | None = None
        self._ok: npt.NDArray[np.uint8] | None = None  # of the ring, where records may be left out
        try:
            self.targets[0] = _memory("ring", 0, pipeline, stream.capacity)
            for number, (key, pipe) in enumerate(resident.items(), start=1):
                still = pipe.without_randomness()
                target = self.targets[number] = _memory(key, number, still, len(still))
                target.todo = [(i, min(i + stream.block, len(still))) for i in range(0, len(still), stream.block)]
                target.left = len(target.todo)
            self._map_ring(poison=poison)
        except BaseException:
            self.close()
            raise

    @property
    def residents(self) -> dict[str, Target]:
        """Resident sets by name."""
        return {target.key: target for number, target in self.targets.items() if number != self.ring}

    def next_resident(self, wanted: Callable[[str], bool]) -> tuple[int, Run] | None:
        """What to prepare next for a resident set that is wanted."""
        for number, target in self.targets.items():
            if target.todo and wanted(target.key):
                return number, target.todo.pop(0)
        return None

    def another_ring(self) -> Target:
        """Memory in which the ring could go on.

        Raises:
            MemoryError: there is not enough for a second one.
        """
        ring = self.targets[self.ring]
        return _memory(ring.key, ring.number, ring.pipeline, ring.capacity)

    def renew_ring(self, new: Target) -> int:
        """Let the ring go on in new memory; returns its old number.

        Somebody who is no consumer any more may still read in the old one.
        """
        before, old = self.ring, self.targets[self.ring]
        start, stop = self._stream.renew()
        ring.copy_slots(old.fd, new.fd, self._layout(), start, stop)
        del self.targets[before]
        self.ring = max((before, *self.targets)) + 1
        self.targets[self.ring] = new
        _close(old)
        self._map_ring(poison=self._poisoned is not None)
        return before

    def kept(self, start: int, stop: int) -> int:
        """Samples at the positions [start, stop) of the ring: all but the records that were left out."""
        if self._ok is None:
            return stop - start
        slots = np.arange(start, min(stop, self._stream.head)) % self._stream.capacity
        return int(np.count_nonzero(self._ok[slots] & (ODD if self._pipeline.is_cut else GOOD)))

    def poison_released(self) -> None:
        """Overwrite what nobody needs any more, if that was asked for; who joins later does not find it."""
        stream = self._stream
        if self._poisoned is None or not stream.started:
            return
        low = stream.kept
        for position in range(max(stream.floor, low - stream.capacity), low):
            slot = position % stream.capacity
            for column in self._poisoned.values():
                column[slot : slot + 1].view("uint8")[...] = _POISON
        stream.base = max(stream.base, low)

    def close(self) -> None:
        """Let go of it all; it lives on where it is mapped."""
        self._poisoned = self._ok = None
        for target in self.targets.values():
            _close(target)
        self.targets = {}

    def _map_ring(self, *, poison: bool) -> None:
        skipping = self._pipeline.on_error == "skip"
        if not (poison or skipping):
            return
        columns = ring.map_shared(self.targets[self.ring].fd, self._layout())
        self._poisoned = columns if poison else None
        self._ok = columns[OK] if skipping else None

    def _layout(self) -> ring.Layout:
        return ring.Layout(self._pipeline.fields, self._stream.capacity)


def _memory(key: str, number: int, pipeline: Pipeline, capacity: int) -> Target:
    fd = ring.create(ring.Layout(pipeline.fields, capacity), f"{key}-{len(pipeline)}")
    try:
        return Target(key, number, pipeline, capacity, fd, ring.read_only(fd))
    except OSError:
        os.close(fd)
        raise


def _close(target: Target) -> None:
    os.close(target.fd)
    os.close(target.shown_fd)
