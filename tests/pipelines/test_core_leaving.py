"""Who leaves a stream, stands still in it or comes back to it; and what its ranks agree on."""

from __future__ import annotations

import functools
import gc
import os
import signal
import threading
import time
from typing import Any

import core_pipes as pipes
import numpy as np
import pytest
from core_pipes import Feeder, Job, leaves_nothing, pipe  # noqa: F401

from pipelines import Batch, Pipeline, attach, sources
from pipelines.feeder.statistics import QueueLevels, bottleneck
from pipelines.order.stream import Stream
from pipelines.shm import ring

N, CAPACITY = 96, 32


def large() -> Pipeline:
    """Batches that are views of the ring: of whole pages, and of rows that lie across page bounds."""
    rows = np.arange(N, dtype=np.float32)[:, None]
    return Pipeline(sources.arrays(page=rows + np.zeros(2048, np.float32), odd=rows + np.zeros(272, np.float32)))


def right(batch: Batch) -> bool:
    """Whether all of a batch is what its samples are."""
    return all(bool((batch[name] == batch["index"][:, None]).all()) for name in ("page", "odd"))


@pytest.mark.parametrize("way", ["break", "close", "no reference"])
def test_a_batch_in_the_hand_of_one_who_leaves_is_not_overwritten(way: str) -> None:
    with Feeder(large(), capacity=CAPACITY, block=8, expect=2, overwrite_released=True) as feeder:
        loader, other = (attach(feeder.address, large(), 8, range(3), name=name) for name in ("leaves", "stays"))
        for batch in loader if way == "break" else next(loader.epochs()):
            if way != "break" or batch.step == 2:
                break
        if way == "close":
            loader.close()
        if way == "no reference":
            del loader
            gc.collect()
        batch["odd"][0] += 1  # what was written into it stays, too
        assert sum(right(batch) for batch in other) == 3 * N // 8 == other.stats()["shared_batches"]
        batch["odd"][0] -= 1
        assert right(batch)


def test_one_who_reads_on_elsewhere_is_no_longer_prepared_for() -> None:
    """Between two epochs it leaves one feeder for another: nothing is lost, doubled or prepared for nobody."""
    options: dict[str, Any] = {"capacity": CAPACITY, "block": 8}
    with Feeder(large(), **options) as first, Feeder(large(), **options) as other:
        leaves = attach(first.address, large(), 8, range(4), name="moves")
        read = [pipes.record(batch) for batch in next(leaves.epochs())]
        leaves.close()
        pipes.wait_until(lambda: first.stats()["members"] == 0)
        joins = attach(other.address, large(), 8, range(1, 4), name="moves")
        read += map(pipes.record, joins)
        pipes.wait_until(lambda: other.stats()["members"] == 0)
        assert read == list(map(pipes.record, large().loader(8, range(4))))
        assert leaves.stats()["private_batches"] == joins.stats()["private_batches"] == 0
        assert other.stats()["prepared"] == other.stats()["consumed"] == 3 * N
        assert first.stats()["prepared"] <= N + CAPACITY and first.stats()["consumed"] == N


@pytest.mark.parametrize(("ranks", "policy"), [((0, 1), "wait"), ((1, 0), "wait"), ((0, 1), "detach")])
def test_ranks_begin_together_though_one_was_restarted_before_the_other_came_or_was_sent_on_alone(
    ranks: Any, policy: Any
) -> None:
    with Feeder(pipe("numpy"), capacity=16, policy=policy) as feeder:
        member = functools.partial(attach, feeder.address, pipe("numpy"), 8, 2, name="member", world=2)
        others = iter(Job(epochs=(0, 40), name="goes on").attach(feeder.address))
        next(others)
        early = member(rank=0)
        if policy == "wait":
            early.close()  # dies before its other rank has asked
        for _ in range(16):
            next(others)
        assert feeder.stats()["detached"] == (policy == "detach")
        loaders = [member(rank=rank) for rank in ranks] if policy == "wait" else [early, member(rank=1)]
        starts = [loader.reading.epochs for loader in loaders]
        assert starts == [range(2, 4) if policy == "wait" else early.reading.epochs] * 2
        for loader in (others, *loaders):
            loader.close()


SLOW, QUICK = (Job(batch_size=size, epochs=(0, 3), name=f"of {size}") for size in (8, 5))


def test_who_was_detached_comes_back_where_the_ring_is_new_memory_and_its_workers_were_replaced() -> None:
    late, other = (Job(batch_size=8, epochs=(0, 12), name=name) for name in ("late", "other"))
    read_late: list[Any] = []
    with Feeder(pipe("numpy"), capacity=24, policy="detach", expect=2, workers=2) as feeder:
        loader = late.attach(feeder.address)
        batches = iter(loader)

        def hold() -> None:
            read_late.append(pipes.record(next(batches)))
            pipes.wait_until(lambda: feeder.stats()["detached"])
            for pid in feeder.stats()["workers"]:
                os.kill(pid, signal.SIGKILL)
            read_late.extend(map(pipes.record, batches))

        def is_back() -> bool:
            return (loader.stats()["private_batches"] > 0 and loader.shared) or len(read_late) == 12 * 8

        def go_on() -> list[Any]:
            """Five batches, which the ring does not have at a time, and the others when the late one is back."""
            records = []
            for batch in other.attach(feeder.address):
                records.append(pipes.record(batch))
                if len(records) >= 5:
                    pipes.wait_until(is_back)
            return records

        _, records = pipes.together([hold, go_on])
        assert feeder.stats()["restarts"] == 2
    assert read_late == pipes.alone(late) and records == pipes.alone(other)
    assert loader.stats()["private_batches"] > 0 and loader.stats()["shared_batches"] > 1


@pytest.mark.parametrize(("second", "stop", "holding"), [(0, 1000, ["a", "b"]), (30, 32, []), (30, 1000, ["a"])])
def test_only_those_hold_a_stream_whose_samples_fill_the_ring(second: int, stop: int, holding: list[str]) -> None:
    stream = Stream(32, 8)
    for name in "ab":
        stream.join(name, 0, stop)
    for _ in range(3):
        while (block := stream.next_block()) is not None:
            stream.complete(block)
        stream.release("b", min(second, stream.ready))
    assert stream.blocking_readers() == holding
    stream.release("a", 8)
    assert stream.blocking_readers() == holding[1:]


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


def test_levels_count_for_as_long_as_they_last() -> None:
    now_s = [0.0]
    fullness = QueueLevels(lambda: now_s[0])
    fullness.record(ring=1.0, workers=0.0)
    now_s[0] = 3.0
    fullness.record(ring=0.0, workers=1.0)
    now_s[0] = 4.0
    assert fullness.means() == {"ring": 0.75, "workers": 0.25}
    fullness.record()
    now_s[0] = 9.0
    assert fullness.recorded_s == 4.0, "without levels nothing is recorded"
    fullness.record(ring=0.0)
    now_s[0] = 14.0
    fullness.record(11.0, ring=1.0)
    assert fullness.recorded_s == 9.0 and fullness.seconds("ring") == 6.0, "it has lasted for a while already"
    now_s[0] = 15.0
    fullness.record(2.0, ring=0.0)
    assert fullness.seconds("ring") == 6.0, "not before the last record"


def test_levels_that_are_noted_while_another_reads_are_not_lost() -> None:
    fullness = QueueLevels(lambda: 0.0)
    fullness.record(ring=0.0)
    noting = threading.Thread(target=fullness.record, kwargs={"ring": 1.0})

    def interrupted() -> float:
        fullness._clock = lambda: 0.0
        noting.start()
        noting.join(0.2)  # it waits for the reader, or else has come in between
        return 0.0

    fullness._clock = interrupted
    fullness.means()
    noting.join()
    fullness._clock = lambda: 1.0
    assert fullness.means() == {"ring": 1.0}


def test_a_feeder_names_its_bottleneck_which_is_what_the_others_wait_for() -> None:
    assert bottleneck({}) is None
    assert bottleneck({"ring": 0.1, "workers": 0.3, "link": 0.9, "waiting": 0.9}) == "links"
    with Feeder(pipe("plain"), capacity=24) as feeder:
        batches: Any = iter(Job(kind="plain").attach(feeder.address))
        next(batches)  # and takes no other
        pipes.wait_until(lambda: bottleneck(feeder.stats()["fullness"]) == "members")
        batches.close()
    with Feeder(pipe("slow"), capacity=24) as feeder:
        batches = iter(Job(kind="slow", epochs=(0, 1000)).attach(feeder.address))
        while bottleneck(feeder.stats()["fullness"]) != "preparation":
            next(batches)
        batches.close()


def test_without_memory_for_a_second_ring_the_others_wait_after_all(monkeypatch: pytest.MonkeyPatch) -> None:
    with Feeder(pipe("numpy"), capacity=24, policy="detach", expect=2) as feeder:
        batches = iter(SLOW.attach(feeder.address))
        monkeypatch.setattr(ring, "available_bytes", lambda: 0)

        def hold() -> list[Any]:
            first = pipes.record(next(batches))
            pipes.wait_until(lambda: feeder.stats()["consumed"] >= 15)
            time.sleep(0.3)
            return [first, *pipes.read(batches, SLOW)]

        held, (records, stats) = pipes.together([hold, functools.partial(pipes.shared, QUICK, feeder.address)])
        assert (held, records) == (pipes.alone(SLOW), pipes.alone(QUICK))
        assert feeder.stats()["detached"] == stats["private_batches"] == 0
        assert feeder.stats()["failure"] is None
