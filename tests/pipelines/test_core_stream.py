"""The stream's bookkeeping, driven through all it may meet: no slot is lost, nobody waits for ever."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from kit.property_examples import examples

from pipelines.order.stream import Block, Stream, default_block_size, min_capacity


@dataclass
class Consumer:
    position: int
    stop: int
    batch: int
    n: int
    ends_there: bool

    @property
    def end(self) -> int:
        """Where its next batch ends: batches do not span epochs."""
        return min(self.position + self.batch, (self.position // self.n + 1) * self.n, self.stop)


BOUNDS = ((0, 6), (0, 3), (0, 40), (1, 48))  # of the first epoch, epochs, the place, the batch size


class Simulation(RuleBasedStateMachine):
    """Workers that prepare and may be lost, consumers that come and go, over a ring of remembered positions."""

    @initialize(n=st.integers(1, 40), capacity=st.integers(2, 48), block_size=st.integers(1, 8))
    def begin(self, n: int, capacity: int, block_size: int) -> None:
        self.n = n
        self.stream = Stream(capacity, min(block_size, capacity - 1))
        self.slots: dict[int, int | None] = {}
        self.under_way: list[Block] = []
        self.consumers: dict[int, Consumer] = {}
        self.names = 0

    @rule(of=st.tuples(*(st.integers(*b) for b in BOUNDS)), stays=st.booleans(), next_boundary=st.booleans())
    def join(self, of: tuple[int, int, int, int], stays: bool, next_boundary: bool) -> None:
        (epoch, epochs, place, size), stream, n = of, self.stream, self.n
        size = min(size, stream.max_batch_size(), n) or 1
        if next_boundary:
            epoch, place = stream.next_epoch(n), 0
        position, stop = epoch * n + min(place, n), (epoch + epochs) * n
        self.names += 1
        if stream.join(self.names, position, stop):
            self.consumers[self.names] = Consumer(position, stop, size, n, stays)
        else:
            assert not next_boundary, "whoever leaves it to the stream is never refused"
            assert stream.has_started and position < stream.floor, "only what is overwritten is refused"

    @rule()
    def dispatch(self) -> None:
        self.moves_on()

    def moves_on(self) -> bool:
        block = self.stream.next_block()
        if block is None:
            return False
        start, stop = block
        assert 0 < stop - start <= self.stream.block_size
        for other in self.under_way:
            assert stop <= other[0] or other[1] <= start, "no position is prepared twice at a time"
        for consumer in self.consumers.values():
            if consumer.position < consumer.stop:
                assert stop <= consumer.position + self.stream.capacity, "a slot in use is overwritten"
        for position in range(start, stop):
            self.slots[position % self.stream.capacity] = None
        self.under_way.append(block)
        return True

    @precondition(lambda self: self.under_way)
    @rule(which=st.integers(0, 99), is_lost=st.booleans())
    def finish(self, which: int, is_lost: bool) -> None:
        block = self.under_way.pop(which % len(self.under_way))
        if is_lost:
            self.stream.requeue(block)
            assert not self.stream.is_idle
            return
        for position in range(*block):
            self.slots[position % self.stream.capacity] = position
        before = self.stream.ready
        assert self.stream.complete(block) == (self.stream.ready > before)

    @precondition(lambda self: self.consumers)
    @rule(which=st.integers(0, 99), leaves=st.booleans())
    def read(self, which: int, leaves: bool) -> None:
        self.has_read(which, leaves)

    def has_read(self, which: int, leaves: bool = False) -> bool:
        name = list(self.consumers)[which % len(self.consumers)]
        consumer = self.consumers[name]
        if consumer.position >= consumer.stop:
            if not consumer.ends_there or leaves:
                self.leave(which)
                return True
            return False
        if not self.stream.has_started or consumer.end > self.stream.ready:
            return False
        for position in range(consumer.position, consumer.end):
            assert self.slots[position % self.stream.capacity] == position, "a consumer was shown another sample"
        consumer.position = consumer.end
        self.stream.release(name, consumer.position)
        return True

    @precondition(lambda self: self.consumers)
    @rule(which=st.integers(0, 99))
    def leave(self, which: int) -> None:
        name = list(self.consumers)[which % len(self.consumers)]
        del self.consumers[name]
        self.stream.leave(name)

    @invariant()
    def order_holds(self) -> None:
        if not hasattr(self, "stream"):
            return
        stream = self.stream
        assert stream.floor <= stream.ready <= stream.head
        assert stream.is_idle or stream.ready < stream.head
        for position in range(stream.floor, stream.ready):
            assert self.slots[position % stream.capacity] == position
        if stream.has_started:
            assert all(c.position >= stream.floor for c in self.consumers.values() if c.position < c.stop)

    def teardown(self) -> None:
        """Whatever has happened: those who go on get all that they came for, ones at their end linger or not."""
        moved = hasattr(self, "stream")
        while moved:
            moved = self.moves_on()
            while self.under_way:
                self.finish(0, False)
                moved = True
            for which in range(len(self.consumers)):
                if which < len(self.consumers):
                    moved = self.has_read(which) or moved
        if hasattr(self, "stream"):
            assert [c for c in self.consumers.values() if c.position < c.stop] == []
            assert self.stream.next_block() is None and self.stream.is_idle, "nothing is prepared for nobody"


TestSimulation = Simulation.TestCase
TestSimulation.settings = settings(examples(60), stateful_step_count=40)


@pytest.mark.parametrize("unit", [1, 16, 31, 64, 100])
def test_every_ring_from_the_least_capacity_on_holds_a_batch_beside_a_block(unit: int) -> None:
    for batch in range(1, 1200, 13):
        least = min_capacity(batch, None, unit)
        assert all(ring - default_block_size(ring, unit) >= batch for ring in range(least, least + 1200))


def test_a_newcomer_takes_the_stream_where_it_wants_when_nobody_reads_any_more() -> None:
    stream = Stream(capacity=8, block_size=4)
    stream.join("first", 0, 40)
    for _ in range(10):
        block = stream.next_block()
        assert block is not None
        stream.complete(block)
        stream.release("first", block[1])
    assert stream.join("second", 0, 40), "the first one has read all, though it has not left"
    assert stream.next_block() == (0, 4)


def test_a_slot_is_not_given_to_a_second_worker_while_the_first_still_writes() -> None:
    stream = Stream(capacity=4, block_size=2)
    stream.join("gone", 0, 100)
    assert stream.next_block() == (0, 2) and stream.next_block() == (2, 4)
    stream.leave("gone")
    assert stream.join("further", 3, 100)
    assert stream.next_block() is None, "(4, 6) lies where (0, 2) is still being written"
    stream.complete((0, 2))
    assert stream.next_block() == (4, 6)
