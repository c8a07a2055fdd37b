"""A batch is a function: of orders and generators, not of who shares, rings, passes or ranks."""

import dataclasses
import pickle
from functools import partial

import numpy as np
import pytest
from core_pipes import Feeder, Job, N, alone, leaves_nothing, pipe, read, record, shared, together  # noqa: F401
from hypothesis import given
from hypothesis import strategies as st

from pipelines import Loader, attach
from pipelines.loader.batch import ReadRange
from pipelines.order import epoch_order
from pipelines.order.epoch_order import Generators, batch_bounds, epoch_indices, rank_bounds, steps_per_epoch
from pipelines.order.rank_rows import RankRows
from pipelines.order.stream import min_capacity

seeds = st.integers(-(2**70), 2**70)
epochs = st.integers(0, 2**40)


@given(data=st.data(), n=st.integers(1, 3000), seed=seeds, epoch=epochs)
def test_each_epoch_has_every_index_once_and_a_piece_equals_that_piece_of_the_whole(
    data: st.DataObject, n: int, seed: int, epoch: int
) -> None:
    order = epoch_indices(n, seed, epoch, 0, n)
    assert order.dtype == np.int64 and np.array_equal(np.sort(order), np.arange(n))
    start = data.draw(st.integers(0, n))
    stop = data.draw(st.integers(start, n))
    assert np.array_equal(epoch_indices(n, seed, epoch, start, stop), order[start:stop])


def test_epochs_and_seeds_have_orders_of_their_own_that_keep_no_neighbours_together() -> None:
    assert epoch_indices(10, 1, 2, 3, 7, shuffle=False).tolist() == [3, 4, 5, 6]
    orders = {tuple(epoch_indices(100, seed, epoch, 0, 100)) for seed in range(20) for epoch in range(20)}
    assert len(orders) == 400
    assert np.mean([np.diff(epoch_indices(1000, 3, e, 0, 1000)) == 1 for e in range(50)]) < 5 / 1000


def test_a_small_source_comes_in_every_order_and_each_index_at_every_place_about_equally_often() -> None:
    orders, count = np.unique([epoch_indices(5, 7, e, 0, 5) for e in range(1500)], axis=0, return_counts=True)
    expected, freedom, rounds, table = 1500 / 120, 32**2, 1000, np.zeros((33, 33))
    # Chi-square: its mean is the degrees of freedom d, its deviation sqrt(2 d).
    assert len(orders) == 120 and ((count - expected) ** 2 / expected).sum() < 120 + 5 * np.sqrt(240)
    for epoch in range(rounds):
        table[np.arange(33), epoch_indices(33, 5, epoch, 0, 33)] += 1
    expected = rounds / 33
    assert abs(((table - expected) ** 2 / expected).sum() - freedom) < 5 * np.sqrt(2 * freedom)


@given(n=st.integers(1, 2000), batch=st.integers(1, 300), world=st.integers(1, 17), drop_last=st.booleans())
def test_ranks_share_each_batch_out_and_batches_the_epoch(n: int, batch: int, world: int, drop_last: bool) -> None:
    places: list[int] = []
    for step in range(steps_per_epoch(n, batch, drop_last=drop_last)):
        start, stop = batch_bounds(n, batch, step)
        parts = [rank_bounds(start, stop, rank, world) for rank in range(world)]
        assert [a for a, _ in parts] == [start, *(b for _, b in parts[:-1])] and parts[-1][1] == stop
        sizes = [b - a for a, b in parts]
        assert max(sizes) - min(sizes) <= 1
        places += range(start, stop)
    assert places == list(range(n // batch * batch if drop_last else n))


@pytest.mark.parametrize("rank", range(5))
def test_a_rank_reads_its_rows_in_any_pieces_also_where_its_share_of_the_last_batch_is_larger(rank: int) -> None:
    rows, whole = RankRows(n=15, batch_size=8, rank=rank, world=5), list[int]()
    for step in range(2):
        whole += range(*rank_bounds(*batch_bounds(15, 8, step), rank, 5))
    for start in range(rows.per_epoch + 1):
        for stop in range(start, rows.per_epoch + 1):
            assert [at for piece in rows.places(start, stop) for at in range(*piece)] == whole[start:stop]


def _numbers(rng: np.random.Generator) -> tuple[float, ...]:
    return (rng.random(), float(rng.integers(1 << 30)), rng.normal(), float(rng.random(dtype=np.float32)))


keys = st.tuples(st.integers(0, 2**40), st.integers(0, 2**40), st.integers(0, 50))


@given(seed=seeds, asked=st.lists(keys, min_size=2, max_size=10, unique=True), order=st.randoms())
def test_a_generator_depends_on_its_key_alone(seed: int, asked: list[tuple[int, int, int]], order: object) -> None:
    one, other = Generators(seed), Generators(seed)
    first = {key: _numbers(one.at(*key)) for key in asked}
    order.shuffle(asked)  # type: ignore[attr-defined]
    for key in asked:
        other.at(*key).random(3)  # what an earlier sample has drawn changes nothing
    assert {key: _numbers(other.at(*key)) for key in asked} == first
    assert len(set(first.values())) == len(asked)


@given(seed=seeds, asked=st.lists(keys, min_size=1, max_size=10))
def test_setting_a_generators_memory_is_setting_its_state(seed: int, asked: list[tuple[int, int, int]]) -> None:
    assert epoch_order._is_philox_known(), "this numpy has Philox in memory otherwise: samples take longer"
    generators = pickle.loads(pickle.dumps(Generators(seed)))
    for epoch, index, stage in asked:
        expected = epoch_order._StateStream(
            np.frombuffer(epoch_order.derive_bytes("sample", seed, stage, size=16), np.uint64)
        )
        expected.move(3, index, epoch)
        assert _numbers(generators.at(epoch, index, stage, 3)) == _numbers(expected.generator)
        assert generators.at(epoch, index, stage, 4).bit_generator.state["buffer_pos"] == 4
        generators.at(epoch, index, stage, 4).integers(1 << 32, dtype=np.uint32)  # half a word is left


def test_a_state_that_a_stage_assigns_is_gone_with_the_next_sample() -> None:
    expected = _numbers(Generators(1).at(0, 5, 0))
    generators = Generators(1)
    generators.at(0, 4, 0).bit_generator.state = np.random.Philox(key=7).state
    assert _numbers(generators.at(0, 5, 0)) == expected != _numbers(Generators(2).at(0, 5, 0))


@pytest.mark.filterwarnings("ignore:left out")
@pytest.mark.parametrize("kind", ["torch", *(pytest.param(k, marks=pytest.mark.more) for k in ("numpy", "skip"))])
def test_shared_batches_equal_private_ones_for_everyone(kind: str) -> None:
    """Members of many kinds: batch sizes, ranks, dropped last batches, resumes; each spoils what it got."""
    jobs = [Job(kind=kind, batch_size=16, epochs=(0, 3)), Job(kind=kind, batch_size=1)]
    jobs += [Job(kind=kind, batch_size=7, epochs=(0, 3), rank=r, world=2) for r in range(2)]
    jobs += [Job(kind=kind, batch_size=25, epochs=(0, 3), rank=r, world=3, drop_last=True) for r in range(3)]
    jobs += [Job(kind=kind, batch_size=2, epochs=(0, 1), rank=r, world=3) for r in range(3)]
    jobs += [Job(kind=kind, batch_size=10, epochs=(0, 3), start_step=4)]
    jobs += [Job(kind=kind, batch_size=16, epochs=(0, 3), name="slow", pause_s=0.02)]
    names = sum(job.rank == 0 for job in jobs)
    with Feeder(pipe(kind), workers=2, capacity=min_capacity(25, None), expect=names) as feeder:
        results = together([partial(shared, job, feeder.address) for job in jobs])
        prepared = feeder.stats()["prepared"]
    assert [records for records, _ in results] == [alone(dataclasses.replace(job, name="")) for job in jobs]
    assert all(counts["private_batches"] == 0 for _, counts in results)
    left_out = results[0][1]["skipped"] // 3
    assert prepared == 3 * (N - left_out) and (left_out > 0) == (kind == "skip"), "each is prepared once for all"


SMALLEST = min_capacity(N, None)


@pytest.mark.parametrize(("size", "capacity", "block"), [(3 * N, SMALLEST, None), (1, 2, 1)])
def test_neither_the_ring_nor_its_blocks_change_a_batch(size: int, capacity: int, block: int | None) -> None:
    job = Job(batch_size=size, epochs=(1, 3))
    with Feeder(pipe("numpy"), capacity=capacity, block=block, workers=2) as feeder:
        records, counts = shared(job, feeder.address)
        assert records == alone(job) and counts["private_batches"] == 0
        kept = list(attach(feeder.address, pipe("numpy"), size, range(2), copy=True))
    assert [record(b) for b in kept] == alone(Job(batch_size=size)), "copies stay valid"


def test_an_epoch_read_again_is_the_same_epoch() -> None:
    job = Job(batch_size=8, epochs=(0, 2))
    with Feeder(pipe("numpy"), capacity=16) as feeder:
        loader = job.attach(feeder.address)
        epochs = loader.epochs()
        first = next(epochs)
        assert len(first) == -(-N // 8) and first.epoch == 0
        beginning = [record(batch) for _, batch in zip(range(5), first, strict=False)]
        again = read(first, job)
        assert [*again, *read(next(epochs), job)] == alone(job)
        assert beginning == again[:5] and list(epochs) == []
        # From the beginning once more, by another loader: the stream goes back for its only reader.
        loader.close()
        assert read(job.attach(feeder.address), job) == alone(job)


def test_epochs_may_be_left_early_or_passed_over() -> None:
    with Feeder(pipe("numpy"), capacity=16) as feeder:
        loader = Job(epochs=(0, 4)).attach(feeder.address)
        got = []
        for epoch in loader.epochs():
            if epoch.epoch == 1:
                continue
            for batch in epoch:
                got.append(record(batch))
                if batch.step == 2:
                    break
    expected = [r for r in alone(Job(epochs=(0, 4))) if r[0] != 1 and r[1] <= 2]
    assert got == expected and loader.stats()["private_batches"] == 0


def test_a_batch_knows_its_place() -> None:
    loader = Loader(pipe("numpy"), ReadRange(N, 8, range(2, 3), rank=1, world=2))
    batch = list(loader)[-1]
    assert (batch.epoch, batch.step, batch.global_size) == (2, N // 8, N % 8)
    assert batch.to("cpu").global_size == N % 8
    assert loader.steps_per_epoch == -(-N // 8)
