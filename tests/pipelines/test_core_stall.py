"""Consumers that fall behind: the others wait for them so long and no longer, or not at all."""

from __future__ import annotations

import functools
import os
import signal
import threading
import time
from collections.abc import Hashable
from typing import Any

import pytest
from core_pipes import (
    Feeder,
    Job,
    alone,
    leaves_nothing,  # noqa: F401 - a fixture
    pipe,
    read,
    record,
    shared,
    spoil,
    together,
    wait_until,
)
from hypothesis import given
from hypothesis import strategies as st

from pipelines.feeder.statistics import QueueLevels, bottleneck
from pipelines.order.stream import Stream
from pipelines.prepare.preparer import Preparer
from pipelines.shm import ring

SLOW = Job(batch_size=8, epochs=(0, 3), name="slow")
QUICK = [Job(batch_size=size, epochs=(0, 3), name=f"quick-{size}") for size in (5, 7)]


@pytest.mark.parametrize("options", [{"policy": "detach"}, {"stall_limit_s": 0.3}], ids=str)
def test_who_holds_the_ring_goes_on_alone_with_the_batch_in_hand(options: dict[str, Any]) -> None:
    with Feeder(pipe("numpy"), capacity=24, overwrite_released=True, expect=3, **options) as feeder:
        slow = SLOW.attach(feeder.address)
        batches = iter(slow)
        finished: list[Job] = []

        def hold() -> list[Any]:
            in_hand = next(batches)
            first = record(in_hand)
            wait_until(lambda: len(finished) == len(QUICK))
            assert record(in_hand) == first, "a batch in hand has changed"
            spoil(in_hand)
            return [first, *read(batches, SLOW)]

        def run(job: Job) -> Any:
            result = shared(job, feeder.address)
            finished.append(job)
            return result

        held, *others = together([hold, *(functools.partial(run, job) for job in QUICK)])
        assert held == alone(SLOW)
        detached = feeder.stats()["detached"]
        assert detached >= 1
        for job, (records, stats) in zip(QUICK, others, strict=True):
            assert records == alone(job)
            if detached == 1:  # on a busy machine a quick one may have been behind for a moment, too
                assert stats["private_batches"] == 0
        assert slow.stats()["private_batches"] > 0


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
