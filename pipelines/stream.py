"""The bookkeeping of a shared stream: who is where, what may be overwritten, what is prepared next.

A pure state machine over integers. A *position* counts samples along the stream: epoch * n + place in the
epoch. It lies in the ring's slot `position % capacity`. A *run* is a stretch of consecutive positions that
one worker prepares (a block of the design).

    floor <= every consumer's position;  floor <= ready <= head <= min(ready, smallest position) + capacity

Everything in [floor, ready) is in the ring; [ready, head) is being prepared.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable
from dataclasses import dataclass, field

Run = tuple[int, int]


@dataclass
class Reader:
    """One consumer: everything below `position` it has given back, at `stop` it ends."""

    position: int
    stop: int


@dataclass
class Stream:
    """See the module.

    Attributes:
        capacity: slots of the ring.
        block: samples in a run.
        far: how far ahead of the stream, in samples, a consumer may wait for it: an epoch, for one that joins at
            the next boundary.
        base: nothing below it is in the ring.  head, ready: see the module.
        sending: runs that other nodes are still to get from here.
        promised: other nodes were told that the ring has room from here on: nobody may join below.
        led: whether several nodes agree on how far it goes (`extend`).
    """

    capacity: int
    block: int
    far: int = 1 << 62
    readers: dict[Hashable, Reader] = field(default_factory=dict)
    base: int = 0
    head: int = 0
    ready: int = 0
    started: bool = False
    sending: set[Run] = field(default_factory=set)
    promised: int = 0
    led: bool = False
    _outstanding: set[Run] = field(default_factory=set)
    _again: list[Run] = field(default_factory=list)
    _complete: dict[int, int] = field(default_factory=dict)

    @property
    def floor(self) -> int:
        """The lowest position that is still in the ring."""
        return max(self.base, self.head - self.capacity, self.promised)

    @property
    def idle(self) -> bool:
        """Whether no run is under way."""
        return not self._outstanding and not self._again and not self.sending

    @property
    def reading(self) -> list[Reader]:
        """The consumers that have something left to read: one at its stop holds nothing and paces nobody."""
        return [reader for reader in self.readers.values() if reader.position < reader.stop]

    @property
    def low(self) -> int:
        """Everything below it was given back by all, and may be overwritten."""
        return min((reader.position for reader in self.reading), default=self.ready)

    @property
    def kept(self) -> int:
        """Everything from here on is still needed, or being written: the ring has room up to `kept + capacity`."""
        # Not past `ready`: a run under way may still write there, though nobody reads it any more.
        return min([self.low, self.ready, *(start for start, _ in self.sending)])

    def largest_batch(self) -> int:
        """The largest global batch that cannot block itself."""
        return self.capacity - self.block

    def join(self, name: Hashable, position: int, stop: int) -> bool:
        """Let a consumer read [position, stop); False where the stream has gone past its position, or will
        not be there for long.

        Where nobody else reads, the stream goes wherever the newcomer wants it.
        """
        elsewhere = position < self.floor or (position > self.head and not self.led)
        if self.started and not self.reading and self.idle and elsewhere:
            self.base = self.head = self.ready = position
            self._complete.clear()
        if self.started and position < self.floor:
            return False
        if self.started and (self.reading or self.led) and position > self.head + self.far:
            return False
        self.readers[name] = Reader(position, stop)
        return True

    def boundary(self, n: int) -> int:
        """The epoch (of n samples) that a newcomer joins: the next to begin for the slowest reader."""
        if not self.started:
            return min((r.position for r in self.reading), default=0) // n
        slowest = min((r.position for r in self.reading), default=self.head)
        return -(-max(slowest, self.floor) // n)

    def too_far(self) -> list[Hashable]:
        """The consumers that would wait long for the stream, which begins with the slowest of them."""
        slowest = min((r.position for r in self.reading), default=0)
        return [
            name for name, r in self.readers.items() if r.position < r.stop and r.position > slowest + self.far
        ]

    def release(self, name: Hashable, position: int) -> None:
        """A consumer has given back everything below `position`."""
        reader = self.readers[name]
        reader.position = max(reader.position, min(position, reader.stop))

    def leave(self, name: Hashable) -> None:
        """A consumer is gone."""
        self.readers.pop(name, None)

    def next_again(self) -> Run | None:
        """A run that was lost and is to be prepared again."""
        if not self._again:
            return None
        run = self._again.pop(0)
        self._outstanding.add(run)
        return run

    def next_run(self, until: int | None = None) -> Run | None:
        """The next run to prepare, or None where nobody needs one or the ring is full.

        Args:
            until: nothing from there on.
        """
        if self._again:
            return self.next_again()
        reading = self.reading
        if not reading:
            return None
        slowest = min(r.position for r in reading)
        end = max(r.stop for r in reading)
        if not self.started:
            self.base = self.head = self.ready = slowest
            self.started = True
        if slowest > self.head:
            if self._outstanding:
                return None
            self.base = self.head = self.ready = slowest
            self._complete.clear()
        # Between multiples of the block, so that runs never wrap round the end of a ring of whole blocks.
        stop = min((self.head // self.block + 1) * self.block, end if until is None else min(end, until))
        if stop <= self.head or stop > self.kept + self.capacity:
            return None
        run = (self.head, stop)
        self.head = stop
        self._outstanding.add(run)
        return run

    def extend(self, start: int, stop: int) -> bool:
        """Let [start, stop) be prepared as several nodes have agreed; False where the stream is not at `start`.

        It goes there where nobody reads it, and forward to where its slowest reader waits.
        """
        free = not self.reading or self.low >= start > self.head
        if not self.started or (free and self.idle and self.head != start):
            self.base = self.head = self.ready = start
            self._complete.clear()
            self.started = True
        if self.head != start or stop > self.kept + self.capacity:
            return False
        self._outstanding.update(blocks(start, stop, self.block))
        self.head = stop
        return True

    def holding(self) -> list[Hashable]:
        """The consumers because of whom nothing more can be prepared: what is theirs fills the ring."""
        if self._again or not self.started:
            return []
        end = max((r.stop for r in self.reading), default=0)
        stop = min((self.head // self.block + 1) * self.block, end)
        if stop <= self.head or stop > self.ready + self.capacity:
            return []
        return [
            name for name, r in self.readers.items() if r.position < r.stop and stop > r.position + self.capacity
        ]

    def renew(self) -> Run:
        """The ring gets new memory: [start, stop) is to be copied, what is under way is prepared again."""
        self._again = sorted({*self._again, *self._outstanding, *self._complete.items()})
        self._outstanding.clear()
        self._complete.clear()
        self.base = max(self.floor, min(self.low, self.ready))
        return self.base, self.ready

    def done(self, run: Run) -> bool:
        """A run is prepared; returns whether `ready` has moved."""
        self._outstanding.discard(run)
        self._complete[run[0]] = run[1]
        before = self.ready
        while self.ready in self._complete:
            self.ready = self._complete.pop(self.ready)
        return self.ready > before

    def lost(self, run: Run) -> None:
        """Whoever prepared a run is gone: it is prepared again, first of all."""
        self._outstanding.discard(run)
        self._again.append(run)


def blocks(start: int, stop: int, block: int) -> list[Run]:
    """The pieces of [start, stop) between multiples of `block`."""
    runs = []
    while start < stop:
        end = min(stop, (start // block + 1) * block)
        runs.append((start, end))
        start = end
    return runs


def usual_capacity(sample_bytes: int) -> int:
    """Slots of a ring for which nothing else was asked: 64 MiB, or 512 samples if 256 MiB hold them; 64 to 4096.

    A ring that is larger than it needs to be costs its writers the processor's cache. It is a multiple of a power
    of two, so that the columns of most fields are of whole pages, which readers can map twice in a row.
    """
    some, many = 64 * 2**20 // max(1, sample_bytes), 256 * 2**20 // max(1, sample_bytes)
    capacity = min(4096, max(64, some, min(512, many)))
    return capacity - capacity % (1 << (capacity // 8).bit_length() - 1)


def usual_block(capacity: int) -> int:
    """Samples in a run for which nothing else was asked."""
    return min(32, max(1, capacity // 8))


def least_capacity(batch: int, block: int | None = None) -> int:
    """The smallest ring in which a global batch has room beside a block; None for the usual block."""
    return next(c for c in itertools.count(batch + 1) if c - (block or usual_block(c)) >= batch)
