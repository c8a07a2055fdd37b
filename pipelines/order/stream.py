"""Keeps the state of a shared stream: reader positions, reusable slots, and the next block to prepare.

A pure state machine over integers. A *position* counts samples along the stream (epoch * n + place in the epoch)
and is stored in the ring's slot `position % capacity`. A *block* is a range of consecutive positions that one
worker prepares.

    floor <= every reader's position;  floor <= ready <= head <= min(ready, smallest position) + capacity

The positions [floor, ready) are in the ring; [ready, head) are being prepared.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable
from dataclasses import dataclass, field

Block = tuple[int, int]


@dataclass
class Reader:
    """A consumer: it has released all positions below `position` and reads up to `stop`."""

    position: int
    stop: int


@dataclass
class Stream:
    """The state of one stream; the module describes `floor`, `ready` and `head`.

    Attributes:
        capacity: slots in the ring.
        block_size: samples in a block, at most.
        kept: samples of an epoch that the ring holds for good, where all epochs have the same: readers take each
            epoch from them. 0: slots are reused.
        max_lead: how many samples ahead of the stream a reader may wait for it; one epoch allows a reader to join
            at the next epoch.
        readers: consumer -> its range.
        base: the lowest position that the ring's memory may hold.
        sending: blocks that are still to be sent to other nodes.
        advertised_floor: the floor that was sent to other nodes; no reader may join below it.
        is_group_led: whether a group of nodes decides how far the stream advances (`extend`).
    """

    capacity: int
    block_size: int
    kept: int = 0
    max_lead: int = 1 << 62
    readers: dict[Hashable, Reader] = field(default_factory=dict)
    base: int = 0
    head: int = 0
    ready: int = 0
    has_started: bool = False
    sending: set[Block] = field(default_factory=set)
    advertised_floor: int = 0
    is_group_led: bool = False
    _in_progress: set[Block] = field(default_factory=set)
    _lost_blocks: list[Block] = field(default_factory=list)
    _completed: dict[int, int] = field(default_factory=dict)

    @property
    def floor(self) -> int:
        """The lowest position in the ring."""
        return 0 if self.kept else max(self.base, self.head - self.capacity, self.advertised_floor)

    @property
    def is_idle(self) -> bool:
        """Whether no block is being prepared, repeated or sent."""
        return not self._in_progress and not self._lost_blocks and not self.sending

    @property
    def is_complete(self) -> bool:
        """Whether the ring holds every sample that will ever be prepared."""
        return 0 < self.kept <= self.ready

    @property
    def active_readers(self) -> list[Reader]:
        """The readers that have positions left to read; the others limit nobody. Of a complete ring none has."""
        if self.is_complete:
            return []
        return [reader for reader in self.readers.values() if reader.position < reader.stop]

    @property
    def low(self) -> int:
        """All readers have released the positions below this one."""
        # A list is quicker than a generator, and this is asked for at each message of each reader.
        positions = [reader.position for reader in self.readers.values() if reader.position < reader.stop]
        return min(positions) if positions else self.ready

    @property
    def retained_from(self) -> int:
        """The positions from here on are needed or being written: the ring has room for `capacity` of them."""
        if self.kept:
            return 0
        # Not past `ready`: a worker may still be writing there, even if no reader is left.
        low = min(self.low, self.ready)
        return min(low, *(start for start, _ in self.sending)) if self.sending else low

    @property
    def limit(self) -> int:
        """What lies below can be prepared before readers release more."""
        return (self.retained_from + self.capacity) // self.block_size * self.block_size

    def max_batch_size(self) -> int:
        """The largest global batch for which the ring always has room, in samples."""
        return self.kept or self.capacity - self.block_size

    def join(self, name: Hashable, position: int, stop: int) -> bool:
        """Add a reader of [position, stop); of what is `kept` it reads all, from 0 on.

        If there is no other reader the stream moves to that position.

        Returns:
            False if the stream has passed the position, or will not reach it soon (`max_lead`).
        """
        if self.kept:
            position, stop = 0, self.kept
        elsewhere = position < self.floor or (position > self.head and not self.is_group_led)
        if self.has_started and not self.active_readers and self.is_idle and elsewhere:
            self.base = self.head = self.ready = position
            self._completed.clear()
        if self.has_started and position < self.floor:
            return False
        if (
            self.has_started
            and (self.active_readers or self.is_group_led)
            and position > self.head + self.max_lead
        ):
            return False
        self.readers[name] = Reader(position, stop)
        return True

    def next_epoch(self, n: int) -> int:
        """The epoch (of n samples) that a new reader joins: the next one that the slowest reader begins."""
        if self.kept:
            return 0
        if not self.has_started:
            return min((r.position for r in self.active_readers), default=0) // n
        slowest = min((r.position for r in self.active_readers), default=self.head)
        return -(-max(slowest, self.floor) // n)

    def readers_too_far_ahead(self) -> list[Hashable]:
        """The readers that are more than `max_lead` ahead of the slowest one."""
        slowest = min((r.position for r in self.active_readers), default=0)
        return [
            name
            for name, r in self.readers.items()
            if r.position < r.stop and r.position > slowest + self.max_lead
        ]

    def release(self, name: Hashable, position: int) -> None:
        reader = self.readers[name]
        reader.position = max(reader.position, min(position, reader.stop))

    def leave(self, name: Hashable) -> None:
        """Remove a reader."""
        self.readers.pop(name, None)

    def next_lost_block(self) -> Block | None:
        if not self._lost_blocks:
            return None
        block = self._lost_blocks.pop(0)
        self._in_progress.add(block)
        return block

    def next_block(self, until: int | None = None) -> Block | None:
        """The next block to prepare, or None if no reader needs one or the ring is full.

        Args:
            until: the block ends at or before this position.
        """
        if self._lost_blocks:
            return self.next_lost_block()
        active_readers = self.active_readers
        if not active_readers:
            return None
        slowest = min([r.position for r in active_readers])
        end = max([r.stop for r in active_readers])
        if not self.has_started:
            self.base = self.head = self.ready = slowest
            self.has_started = True
        if slowest > self.head:
            if self._in_progress:
                return None
            self.base = self.head = self.ready = slowest
            self._completed.clear()
        # Blocks end at multiples of the block size: they never wrap around a ring of whole blocks.
        stop = min((self.head // self.block_size + 1) * self.block_size, end if until is None else min(end, until))
        if stop <= self.head or stop > self.retained_from + self.capacity:
            return None
        block = (self.head, stop)
        self.head = stop
        self._in_progress.add(block)
        return block

    def extend(self, start: int, stop: int) -> bool:
        """Advance the stream over [start, stop), as several nodes have agreed.

        The stream first moves to `start` if it has no reader, or if its slowest reader waits further on.

        Returns:
            False if the stream is not at `start`, or the ring has no room.
        """
        free = not self.active_readers or self.low >= start > self.head
        if not self.has_started or (free and self.is_idle and self.head != start):
            self.base = self.head = self.ready = start
            self._completed.clear()
            self.has_started = True
        if self.head != start or stop > self.retained_from + self.capacity:
            return False
        self._in_progress.update(split_blocks(start, stop, self.block_size))
        self.head = stop
        return True

    def blocking_readers(self) -> list[Hashable]:
        """The readers that block the stream: the ring is full of samples that they have not released."""
        if self._lost_blocks or not self.has_started:
            return []
        end = max((r.stop for r in self.active_readers), default=0)
        stop = min((self.head // self.block_size + 1) * self.block_size, end)
        if stop <= self.head or stop > self.ready + self.capacity:
            return []
        return [
            name for name, r in self.readers.items() if r.position < r.stop and stop > r.position + self.capacity
        ]

    def renew(self) -> Block:
        """Continue in new memory.

        Returns:
            The positions [start, stop) to copy; blocks in progress will be prepared again.
        """
        self._lost_blocks = sorted({*self._lost_blocks, *self._in_progress, *self._completed.items()})
        self._in_progress.clear()
        self._completed.clear()
        self.base = max(self.floor, min(self.low, self.ready))
        return self.base, self.ready

    def complete(self, block: Block) -> bool:
        """Record that a block is prepared; returns whether `ready` has moved."""
        self._in_progress.discard(block)
        self._completed[block[0]] = block[1]
        before = self.ready
        while self.ready in self._completed:
            self.ready = self._completed.pop(self.ready)
        return self.ready > before

    def requeue(self, block: Block) -> None:
        """Prepare a block again, before all others: its worker has ended."""
        self._in_progress.discard(block)
        self._lost_blocks.append(block)


def split_blocks(start: int, stop: int, block_size: int) -> list[Block]:
    pieces = []
    while start < stop:
        end = min(stop, (start // block_size + 1) * block_size)
        pieces.append((start, end))
        start = end
    return pieces


def default_capacity(sample_bytes: int, needed: int | None = None) -> int:
    """The default number of slots: what 64 MiB hold, between 64 and 4096; more if more are needed.

    A larger ring would not fit the processor's cache, and all of it is memory that is written once a lap. The
    number is a multiple of a power of two, so that most columns consist of whole pages, which readers can map
    twice in a row.

    Args:
        needed: slots that there must be; None where the readers' batches are not known: 512 if 256 MiB hold them.
    """
    some, many = 64 * 2**20 // max(1, sample_bytes), 256 * 2**20 // max(1, sample_bytes)
    capacity = min(4096, max(64, some, min(512, many) if needed is None else 0))
    return max(needed or 0, capacity - capacity % (1 << (capacity // 8).bit_length() - 1))


def default_block_size(capacity: int, unit: int = 1) -> int:
    """The default number of samples in a block: where the ring is large enough, a multiple of `unit`."""
    block = min(32, max(1, capacity // 8))
    return block if unit > capacity // 8 else max(1, block // unit) * unit


def min_capacity(batch: int, block_size: int | None = None, unit: int = 1) -> int:
    """The size from which on a ring holds a global batch beside a block; None for the default block size."""
    if block_size is None and unit > 1:
        return batch + max(32, unit)  # no default block is larger, whatever the ring
    return next(c for c in itertools.count(batch + 1) if c - (block_size or default_block_size(c, unit)) >= batch)
