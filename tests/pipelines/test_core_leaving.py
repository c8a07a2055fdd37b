"""Who leaves a stream, stands still in it or comes back to it; and what its ranks agree on."""

from __future__ import annotations

import functools
import gc
import os
import signal
import threading
import time
from collections.abc import Hashable
from typing import Any

import numpy as np
import pytest
from core_pipes import (  # noqa: F401
    Feeder,
    Job,
    alone,
    leaves_nothing,
    pipe,
    read,
    record,
    shared,
    together,
    wait_until,
)
from hypothesis import given
from hypothesis import strategies as st

from pipelines import Batch, Pipeline, attach, sources
from pipelines.feeder import consumers
from pipelines.feeder.statistics import QueueLevels, bottleneck
from pipelines.loader.state import Epoch
from pipelines.order.stream import Stream
from pipelines.prepare.preparer import Preparer
from pipelines.samples.fields import Field
from pipelines.shm import ring

N, CAPACITY = 96, 32


def large() -> Pipeline:
    """Batches that are views of the ring: of whole pages, and of rows that lie across page bounds."""
    rows = np.arange(N, dtype=np.float32)[:, None]
    return Pipeline(sources.arrays(page=rows + np.zeros(2048, np.float32), odd=rows + np.zeros(272, np.float32)))


def right(batch: Batch) -> bool:
    """Whether all of a batch is what its samples are."""
    return all(bool((batch[name] == batch["index"][:, None]).all()) for name in ("page", "odd"))


def leaves(loader: Any, way: str) -> Batch:
    """Take some batches in turn, leave that way, return the last."""
    if way == "next":
        batch: Batch = next(iter(loader))
        return batch
    if way == "break":
        for batch in loader:
            if batch.step == 2:
                break
        return batch
    if way == "close":
        batch = next(iter(loader.epochs().__next__()))
        loader.close()
        return batch
    return next(iter(next(loader.epochs())))  # type: ignore[no-any-return]


@pytest.mark.parametrize("way", ["next", "break", "close", "no reference"])
def test_a_batch_in_the_hand_of_one_who_leaves_is_not_overwritten(way: str) -> None:
    with Feeder(large(), capacity=CAPACITY, block=8, expect=2, overwrite_released=True) as feeder:
        loader = attach(feeder.address, large(), 8, range(3), name="leaves")
        other = attach(feeder.address, large(), 8, range(3), name="stays")
        batch = leaves(loader, way)
        if way == "no reference":
            del loader
            gc.collect()
        batch["odd"][0] += 1  # what was written into it stays, too
        assert sum(right(each) for each in other) == 3 * N // 8
        assert other.stats()["private_batches"] == 0
        batch["odd"][0] -= 1
        assert right(batch)


def test_only_the_pages_under_the_lent_slots_become_the_readers_own() -> None:
    layout = ring.Layout({"wide": Field((1024,), "float32"), "odd": Field((272,), "float32")}, CAPACITY)
    fd = ring.create(layout, "test")
    writer, reader = ring.map_writable(fd, layout), ring.RingView(fd, layout, wraps=True)
    os.close(fd)
    for first, last in ((3, 7), (CAPACITY - 2, CAPACITY + 2)):  # the second goes on with slot 0
        writer["wide"][:] = 1
        reader.copy_pages(first, last, ["wide"])
        writer["wide"][:] = 2
        assert (reader.columns["wide"][first:last] == 1).all()
        assert reader.restore(0, 2 * CAPACITY, ["wide"]) == last - first
    reader.copy_pages(3, 4, ["odd"])
    assert reader.restore(0, CAPACITY, ["odd"]) == 2, "its 1088 bytes lie on two pages"
    reader.close()


def test_one_who_reads_on_elsewhere_is_no_longer_prepared_for() -> None:
    """Between two epochs it leaves one feeder for another: nothing is lost, doubled or prepared for nobody."""

    def told(epoch: Epoch) -> tuple[int, list[int]]:
        return epoch.epoch, [index for batch in epoch for index in batch["index"].tolist()]

    with (
        Feeder(large(), capacity=CAPACITY, block=8) as first,
        Feeder(large(), capacity=CAPACITY, block=8) as other,
    ):
        leaves = attach(first.address, large(), 8, range(4), name="moves")
        seen = [told(next(leaves.epochs()))]
        leaves.close()
        wait_until(lambda: first.stats()["members"] == 0)
        joins = attach(other.address, large(), 8, range(1, 4), name="moves")
        seen += map(told, joins.epochs())
        wait_until(lambda: other.stats()["members"] == 0)
        assert seen == list(map(told, large().loader(8, range(4)).epochs()))
        assert leaves.stats()["private_batches"] == joins.stats()["private_batches"] == 0
        assert other.stats()["prepared"] == other.stats()["consumed"] == 3 * N
        assert first.stats()["prepared"] <= N + CAPACITY and first.stats()["consumed"] == N


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_ranks_of_a_restarted_member_begin_together_though_the_first_life_was_never_complete(
    order: tuple[int, int],
) -> None:
    def member(rank: int) -> Any:
        return attach(feeder.address, pipe("numpy"), 8, 2, name="member", rank=rank, world=2)

    with Feeder(pipe("numpy"), capacity=16) as feeder:
        others = iter(Job(epochs=(0, 40), name="goes on").attach(feeder.address))
        next(others)
        member(0).close()  # dies before its other rank has asked
        for _ in range(16):
            next(others)
        ranks = [member(rank) for rank in order]
        assert [loader.reading.epochs for loader in ranks] == [range(2, 4)] * 2
        others.close()
        for loader in ranks:
            loader.close()


def test_a_rank_that_was_sent_on_alone_has_not_left_its_member() -> None:
    with Feeder(pipe("numpy"), capacity=16, policy="detach") as feeder:
        others = iter(Job(epochs=(0, 40), name="goes on").attach(feeder.address))
        early = attach(feeder.address, pipe("numpy"), 8, 9, name="member", rank=0, world=2)
        for _ in range(16):
            next(others)
        assert feeder.stats()["detached"] == 1
        late = attach(feeder.address, pipe("numpy"), 8, 9, name="member", rank=1, world=2)
        assert late.reading.epochs == early.reading.epochs
        for loader in (others, early, late):
            loader.close()


def test_members_whose_ranks_never_all_come_are_not_remembered_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(consumers, "_MAX_JOINING", 3)
    with Feeder(pipe("numpy"), capacity=64) as feeder:
        ranks = [attach(feeder.address, pipe("numpy"), 8, 1, name=f"m{i}", rank=0, world=2) for i in range(5)]
        assert list(feeder._consumers._joining) == ["m2", "m3", "m4"]
        for loader in ranks:
            loader.close()
        wait_until(lambda: not feeder._consumers._joining)


SLOW = Job(batch_size=8, epochs=(0, 3), name="slow")
QUICK = [Job(batch_size=size, epochs=(0, 3), name=f"quick-{size}") for size in (5, 7)]


def test_who_was_detached_comes_back_where_the_ring_is_new_memory_and_its_workers_were_replaced() -> None:
    late, other = (Job(batch_size=8, epochs=(0, 12), name=name) for name in ("late", "other"))
    read_late: list[Any] = []
    with Feeder(pipe("numpy"), capacity=24, policy="detach", expect=2, workers=2) as feeder:
        loader = late.attach(feeder.address)
        batches = iter(loader)

        def hold() -> None:
            read_late.append(record(next(batches)))
            wait_until(lambda: feeder.stats()["detached"])
            for pid in feeder.stats()["workers"]:
                os.kill(pid, signal.SIGKILL)
            read_late.extend(map(record, batches))

        def is_back() -> bool:
            return loader.stats()["private_batches"] > 0 and loader.shared

        def go_on() -> list[Any]:
            """Five batches, which the ring does not have at a time, and the rest when the late one is back."""
            records = []
            for batch in other.attach(feeder.address):
                records.append(record(batch))
                if len(records) >= 5:
                    wait_until(lambda: is_back() or len(read_late) == len(alone(late)))
            return records

        _, records = together([hold, go_on])
        assert feeder.stats()["restarts"] == 2
    assert read_late == alone(late)
    assert records == alone(other)
    assert loader.stats()["private_batches"] > 0 and loader.stats()["shared_batches"] > 1


@given(start=st.integers(0, 200), count=st.integers(0, 24))
def test_slots_are_copied_from_ring_to_ring(start: int, count: int) -> None:
    pipeline = pipe("plain")
    layout = ring.Layout(pipeline.fields, 24)
    old, new = (ring.create(layout, "ring") for _ in range(2))
    try:
        Preparer(pipeline).fill(ring.map_writable(old, layout), 0, 0, 0, 24)
        ring.copy_slots(old, new, layout, start, start + count)
        here, there = ring.map_writable(old, layout), ring.map_writable(new, layout)
        for name in here:
            for position in range(start, start + count):
                assert here[name][position % 24].tobytes() == there[name][position % 24].tobytes()
    finally:
        os.close(old)
        os.close(new)


def filled(capacity: int, block_size: int, positions: dict[Hashable, int], stop: int = 1000) -> Stream:
    """A stream that has prepared as far as it can for consumers at these positions."""
    stream = Stream(capacity, block_size)
    for name in positions:
        stream.join(name, 0, stop)
    for _ in range(2):
        while (block := stream.next_block()) is not None:
            stream.complete(block)
        for name, position in positions.items():
            stream.release(name, min(position, stream.ready))
    while (block := stream.next_block()) is not None:
        stream.complete(block)
    return stream


def test_only_those_hold_a_stream_whose_samples_fill_the_ring() -> None:
    assert filled(32, 8, {"a": 0, "b": 30}).blocking_readers() == ["a"]
    assert filled(32, 8, {"a": 0, "b": 0}).blocking_readers() == ["a", "b"]
    assert filled(32, 8, {"a": 0, "b": 30}, stop=32).blocking_readers() == []
    stream = filled(32, 8, {"a": 0, "b": 30})
    stream.release("a", 8)
    assert stream.blocking_readers() == []


def test_new_memory_keeps_what_is_prepared_and_prepares_the_rest_again() -> None:
    stream = Stream(32, 8)
    stream.join("a", 0, 100)
    stream.join("b", 0, 100)
    first, second, third, fourth = (stream.next_block() for _ in range(4))
    assert first and second and third and fourth
    stream.complete(first)
    stream.complete(third)
    stream.release("a", 4)
    stream.leave("b")
    assert stream.renew() == (4, 8)
    assert [stream.next_block() for _ in range(3)] == [second, third, fourth]
    assert not stream.join("late", 3, 100), "what was given back is not in the new memory"


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_levels_count_for_as_long_as_they_last() -> None:
    clock = Clock()
    fullness = QueueLevels(clock)
    fullness.record(ring=1.0, workers=0.0)
    clock.now = 3.0
    fullness.record(ring=0.0, workers=1.0)
    clock.now = 4.0
    assert fullness.means() == {"ring": 0.75, "workers": 0.25}
    fullness.record()
    clock.now = 9.0
    assert fullness.recorded_s == 4.0, "without levels nothing is recorded"
    fullness.record(ring=0.0)
    clock.now = 14.0
    fullness.record(11.0, ring=1.0)
    assert fullness.recorded_s == 9.0 and fullness.seconds("ring") == 3.0 + 3.0, (
        "it has lasted for a while already"
    )
    clock.now = 15.0
    fullness.record(2.0, ring=0.0)
    assert fullness.seconds("ring") == 6.0, "not before the last record"


def test_levels_that_are_noted_while_another_reads_are_not_lost() -> None:
    clock = Clock()
    fullness = QueueLevels(clock)
    fullness.record(ring=0.0)
    noting = threading.Thread(target=fullness.record, kwargs={"ring": 1.0})

    def interrupted() -> float:
        fullness._clock = clock
        noting.start()
        noting.join(0.2)  # it waits for the reader, or else has come in between
        return 0.0

    fullness._clock = interrupted
    fullness.means()
    noting.join()
    clock.now = 1.0
    assert fullness.means() == {"ring": 1.0}


def test_the_bottleneck_is_what_the_others_wait_for() -> None:
    assert bottleneck({}) is None
    assert bottleneck({"ring": 0.9, "workers": 0.1, "waiting": 0.1}) == "members"
    assert bottleneck({"ring": 0.1, "workers": 0.9, "waiting": 0.9}) == "preparation"
    assert bottleneck({"ring": 0.1, "workers": 0.3, "link": 0.9, "waiting": 0.9}) == "links"


def test_a_feeder_names_its_bottleneck() -> None:
    with Feeder(pipe("plain"), capacity=24) as feeder:
        batches = iter(Job(kind="plain").attach(feeder.address))
        next(batches)  # and takes no other
        wait_until(lambda: bottleneck(feeder.stats()["fullness"]) == "members")
        batches.close()  # type: ignore[attr-defined]
    with Feeder(pipe("slow"), capacity=24) as feeder:
        batches = iter(Job(kind="slow", epochs=(0, 1000)).attach(feeder.address))
        while bottleneck(feeder.stats()["fullness"]) != "preparation":
            next(batches)
        batches.close()  # type: ignore[attr-defined]


def test_without_memory_for_a_second_ring_the_others_wait_after_all(monkeypatch: pytest.MonkeyPatch) -> None:
    quick = QUICK[0]
    with Feeder(pipe("numpy"), capacity=24, policy="detach", expect=2) as feeder:
        batches = iter(SLOW.attach(feeder.address))
        monkeypatch.setattr(ring, "available_bytes", lambda: 0)

        def hold() -> list[Any]:
            first = record(next(batches))
            wait_until(lambda: feeder.stats()["consumed"] >= 15)
            time.sleep(0.3)
            return [first, *read(batches, SLOW)]

        held, (records, stats) = together([hold, functools.partial(shared, quick, feeder.address)])
        assert (held, records) == (alone(SLOW), alone(quick))
        assert feeder.stats()["detached"] == stats["private_batches"] == 0
        assert feeder.stats()["failure"] is None
