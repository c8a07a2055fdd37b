"""Block shuffle: an order that reads a source group by group; and orders over more than memory holds."""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import tarfile
import time
import tracemalloc
from pathlib import Path
from typing import Any

import core_pipes as pipes
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from core_pipes import Feeder, leaves_nothing  # noqa: F401 - a fixture
from hypothesis import given
from hypothesis import strategies as st

from pipelines import Pipeline, PipelineError, SampleError, attach, sources
from pipelines.order.epoch_order import BlockOrder

seeds = st.integers(-(2**70), 2**70)
epochs = st.integers(0, 2**40)
sizes = st.lists(st.integers(1, 40), min_size=1, max_size=30)
BILLION = 10**9


def bounds(sizes: list[int]) -> Any:
    return np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)


@given(sizes=sizes, seed=seeds, epoch=epochs, window=st.integers(1, 40), data=st.data())
def test_each_epoch_has_every_index_once_window_by_window(
    sizes: list[int], seed: int, epoch: int, window: int, data: st.DataObject
) -> None:
    n, edges = sum(sizes), bounds(sizes)
    whole = BlockOrder(edges, seed, window)(epoch, 0, n)
    assert whole.dtype == np.int64 and np.array_equal(np.sort(whole), np.arange(n))
    start = data.draw(st.integers(0, n))
    stop = data.draw(st.integers(start, n))
    fresh = BlockOrder(edges, seed, window)  # has seen nothing of what went before
    assert np.array_equal(fresh(epoch, start, stop), whole[start:stop])
    # The groups come in stretches of `window` groups (the last may be shorter), and a group in one of them only.
    group = np.searchsorted(edges, whole, side="right") - 1
    groups = list(dict.fromkeys(group.tolist()))
    assert sorted(groups) == list(range(len(sizes)))
    at = 0
    for first in range(0, len(groups), window):
        stretch = groups[first : first + window]
        length = sum(sizes[number] for number in stretch)
        assert set(group[at : at + length]) == set(stretch)
        at += length


def test_epochs_seeds_and_windows_have_orders_of_their_own() -> None:
    edges = bounds([3, 5, 2, 7, 4] * 4)
    keys = itertools.product(range(5), range(5), (1, 2, 8, 20))
    orders = [tuple(BlockOrder(edges, seed, window)(epoch, 0, 84)) for seed, epoch, window in keys]
    assert len(orders) == len(set(orders)) == 100


def test_within_a_window_all_places_are_as_likely() -> None:
    """Chi-square over where each of 12 indices comes: its mean is 121, its deviation sqrt(242)."""
    order, table, rounds = BlockOrder(bounds([4] * 3), 1, 3), np.zeros((12, 12)), 1000
    for epoch in range(rounds):
        table[np.arange(12), order(epoch, 0, 12)] += 1
    assert abs(((table - rounds / 12) ** 2 / (rounds / 12)).sum() - 121) < 5 * np.sqrt(242)


class Endless(sources.Source):
    """A billion records in a hundred thousand groups; each is its own index."""

    kind = "endless"
    groups = np.arange(0, BILLION + 1, 10_000)
    __len__ = staticmethod(lambda: BILLION)
    _read = staticmethod(lambda index: {"x": index})
    where = staticmethod(str)
    identity = staticmethod(lambda: "endless")


@pytest.mark.parametrize("shuffle", [True, False, "blocks"])
def test_a_resume_in_the_middle_of_a_billion_samples_takes_neither_memory_nor_time(shuffle: Any) -> None:
    next(iter(Pipeline(Endless(), seed=1, shuffle=shuffle).loader(64)))  # imports are not measured
    source, began = Endless(), time.process_time()
    tracemalloc.start()
    for whole in (source, source.take(BILLION - 1)):
        pipe = Pipeline(whole, seed=1, shuffle=shuffle)
        assert pipe.fingerprint is not None
        steps = -(-len(whole) // 64)
        loader = pipe.loader(64, epochs=range(7, 9), start_step=steps - 2)
        read = [batch["index"].tolist() for _, batch in zip(range(4), loader, strict=False)]
        assert [len(index) for index in read] == [64, len(whole) - (steps - 1) * 64, 64, 64]
        assert len({*read[0], *read[1]}) == len(read[0]) + len(read[1])
        assert all(0 <= i < len(whole) for index in read for i in index)
    took_s, (_, peak) = time.process_time() - began, tracemalloc.get_traced_memory()
    tracemalloc.stop()
    # A few numbers for each group; 8 bytes for each sample would be 8 GB, and take a minute to make.
    assert peak < (20 << 20 if shuffle == "blocks" else 1 << 20) and took_s < 10


def write(path: Path, groups: int, rows: int) -> Path:
    x = np.random.default_rng(0).integers(0, 255, groups * rows * 64, dtype=np.uint8)
    columns = {"x": pa.FixedSizeListArray.from_arrays(pa.array(x), 64), "label": np.arange(groups * rows)}
    pq.write_table(pa.table(columns), path, row_group_size=rows)
    return path


def test_groups_are_row_groups_ranges_of_archives_and_what_is_left_of_them(tmp_path: Path) -> None:
    for name in "ab":
        write(tmp_path / f"{name}.parquet", groups=3, rows=10)
    source = sources.parquet(str(tmp_path / "*.parquet"), columns="label")
    assert source.groups.tolist() == [0, 10, 20, 30, 40, 50, 60]
    assert source.take(25).groups.tolist() == [0, 10, 20, 25]
    assert source.take(25).take(5).groups.tolist() == [0, 5]
    part, other = source.split(0.5, seed=0)
    for some in (part, other, part.take(11)):
        of = np.array([int(record["label"]) % 30 // 10 for record in some])
        edges = some.groups.tolist()
        assert edges[0] == 0 and edges[-1] == len(some)
        assert all(len(set(of[a:b])) == 1 for a, b in itertools.pairwise(edges))
    whole = sources.arrays(x=np.arange(5))
    assert whole.groups is None and whole.take(3).groups is None


def decoded(pipe: Pipeline, batches: int | None = None, start_step: int = 0) -> tuple[list[int], int]:
    """The indices that a loader gives, and how many row groups were decoded for them."""
    pipe.fields  # noqa: B018 - found out by reading a row
    read, groups = list[int](), list[int]()
    decode = pipe.source._decode
    pipe.source._decode = lambda group: (groups.append(group), decode(group))[1]
    for batch in itertools.islice(pipe.loader(16, start_step=start_step), batches):
        read += batch["index"].tolist()
        assert np.array_equal(batch["label"], batch["index"])
    return read, len(groups)


def test_a_block_shuffle_decodes_each_row_group_once_where_a_full_one_thrashes_and_resumes(tmp_path: Path) -> None:
    groups, rows = 40, 64
    path, cache_bytes = write(tmp_path / "a.parquet", groups, rows), 5 * rows * (64 + 8) + 500  # five groups

    def made(shuffle: Any) -> Pipeline:
        return Pipeline(sources.parquet(path, cache_bytes=cache_bytes), shuffle=shuffle, shuffle_window=4)

    whole, blocks = decoded(made("blocks"))
    assert sorted(whole) == list(range(groups * rows)) and blocks == groups
    resumed, blocks = decoded(made("blocks"), start_step=112)  # at 70 %: the last 12 groups, three windows
    assert resumed == whole[112 * 16 :] and blocks <= 12
    _, full = decoded(made(True), batches=8)
    assert full > 0.6 * 8 * 16, "nearly one a row"


def test_a_feeder_shares_a_block_shuffle_to_the_last_bit(tmp_path: Path) -> None:
    source = sources.parquet(write(tmp_path / "a.parquet", groups=11, rows=7)).take(75)
    pipes.check_shared(Pipeline(source, seed=5, shuffle="blocks", shuffle_window=3), 3, workers=2, block=4)


def archive(path: Path, records: int) -> Any:
    with tarfile.open(path, "w") as out:
        for i in range(records):
            info = tarfile.TarInfo(f"{i:04}.bin")
            info.size = 2000
            out.addfile(info, io.BytesIO(bytes([i % 251]) * 2000))
    return sources.tar(path)


def test_ranges_of_archives_are_of_a_size_and_read_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from pipelines.sources import _file_records

    monkeypatch.setattr(_file_records, "GROUP_BYTES", 10 * 2560)
    archive(tmp_path / "a.tar", 25)
    archive(tmp_path / "b.tar", 5)
    source = sources.tar(str(tmp_path / "*.tar"))
    assert source.groups.tolist() == [0, 10, 20, 25, 30]
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "posix_fadvise", lambda fd, start, size, advice: asked.append((start, size)))
    source.will_read(np.array([3, 24, 4]))
    assert asked == [(512, 10 * 2560), (512 + 20 * 2560, 4 * 2560 + 2000)]
    source.will_read(np.array([25, 24]))
    assert asked[2:] == [(512, 4 * 2560 + 2000)], "what is on its way is not asked for again"
    gone = archive(tmp_path / "c.tar", 3)
    (tmp_path / "c.tar").unlink()
    gone.will_read(np.array([0]))  # a hint says nothing: the read does
    with pytest.raises(SampleError, match="cannot be opened"):
        gone[0]


def test_the_shuffle_is_part_of_the_fingerprint(tmp_path: Path) -> None:
    source, regrouped = (sources.parquet(write(tmp_path / f"{n}.parquet", n, 32 // n)) for n in (4, 8))
    made = [Pipeline(source, shuffle=shuffle) for shuffle in (True, False, "blocks")]
    made.append(Pipeline(source, shuffle="blocks", shuffle_window=3))
    assert len({pipe.fingerprint for pipe in made}) == 4
    assert Pipeline(source, shuffle="blocks").fingerprint == made[2].fingerprint
    # id= vouches for the records, not for how the file is cut
    named = [Pipeline(s, shuffle="blocks", id="mine") for s in (source, regrouped)]
    difference = named[0].find_difference(named[1].describe_for_peers())
    assert difference is not None and "shuffle" in difference.reason
    for wrong in ({"shuffle": "block"}, {"shuffle_window": 0}, {"shuffle_window": 1.5}):
        with pytest.raises(PipelineError, match=f"{next(iter(wrong))} must be "):
            Pipeline(source, **wrong)


class Counted(list[int]):
    """A Dataset that notes each read in a file, from whatever process."""

    def __init__(self, path: str) -> None:
        super().__init__(range(103))
        self.path = path

    def __getitem__(self, index: Any) -> Any:
        with open(self.path, "ab", buffering=0) as file:
            file.write(b"%d\n" % index)
        return {"x": np.full(3, index)}


@pytest.mark.parametrize(("rank", "world", "is_shared"), [(1, 2, False), (0, 1, True)])
def test_a_resume_in_the_middle_of_an_epoch_reads_nothing_of_what_went_before(
    tmp_path: Path, rank: int, world: int, is_shared: bool
) -> None:
    notes, options = tmp_path / "reads", {"rank": rank, "world": world, "epochs": range(4, 5), "start_step": 7}
    pipe = Pipeline(sources.dataset(Counted(str(notes)), id="counted"), seed=2)
    assert pipe.fields["x"].shape == (3,)  # which reads a record
    notes.unlink()
    with (
        Feeder(pipe, workers=2, capacity=32, block=4, expect=1)
        if is_shared
        else contextlib.nullcontext() as feeder
    ):
        loader = attach(feeder.address, pipe, 10, **options) if feeder else pipe.loader(10, **options)
        read = sorted(i for batch in loader for i in batch["index"].tolist())
        assert not is_shared or loader.stats()["shared_batches"] == 4
    assert sorted(map(int, notes.read_text().split())) == read and len(read) == (33 if world == 1 else 17)
