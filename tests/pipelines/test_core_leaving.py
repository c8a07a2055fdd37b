"""What a consumer has in its hands when it leaves the stream stays what it was."""

from __future__ import annotations

import gc
import os
from typing import Any

import numpy as np
import pytest
from core_pipes import Feeder, leaves_nothing, wait_until  # noqa: F401

from pipelines import Batch, Pipeline, attach, sources
from pipelines.loader.loader import Epoch
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
