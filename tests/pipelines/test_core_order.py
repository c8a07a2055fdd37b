"""Which sample comes when: orders, bounds and generators, by property."""

import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelines.order import epoch_order
from pipelines.order.epoch_order import (
    Generators,
    batch_bounds,
    derive_bytes,
    epoch_indices,
    rank_bounds,
    steps_per_epoch,
)

seeds = st.integers(-(2**70), 2**70)
epochs = st.integers(0, 2**40)


@given(n=st.integers(1, 3000), seed=seeds, epoch=epochs)
def test_each_epoch_has_every_index_once(n: int, seed: int, epoch: int) -> None:
    order = epoch_indices(n, seed, epoch, 0, n)
    assert order.dtype == np.int64
    assert np.array_equal(np.sort(order), np.arange(n))


@given(data=st.data(), n=st.integers(1, 500), seed=seeds, epoch=epochs)
def test_a_piece_of_an_order_equals_that_piece_of_the_whole(
    data: st.DataObject, n: int, seed: int, epoch: int
) -> None:
    start = data.draw(st.integers(0, n))
    stop = data.draw(st.integers(start, n))
    whole = epoch_indices(n, seed, epoch, 0, n)
    assert np.array_equal(epoch_indices(n, seed, epoch, start, stop), whole[start:stop])


def test_without_shuffling_the_order_is_the_sources() -> None:
    assert epoch_indices(10, 1, 2, 3, 7, shuffle=False).tolist() == [3, 4, 5, 6]


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    orders = {tuple(epoch_indices(100, seed, epoch, 0, 100)) for seed in range(20) for epoch in range(20)}
    assert len(orders) == 400


@pytest.mark.parametrize("n", [3, 5])
def test_a_small_source_comes_in_every_order_about_equally_often(n: int) -> None:
    orders, count = np.unique([epoch_indices(n, 7, e, 0, n) for e in range(1500)], axis=0, return_counts=True)
    possible = [1, 1, 2, 6, 24, 120][n]
    assert len(orders) == possible
    expected = 1500 / possible
    # Chi-square: its mean is the degrees of freedom d, its deviation sqrt(2 d).
    assert ((count - expected) ** 2 / expected).sum() < possible + 5 * np.sqrt(2 * possible)


@pytest.mark.parametrize("n", [7, 33])
def test_each_index_stands_at_every_place_about_equally_often(n: int) -> None:
    rounds = 1000
    table = np.zeros((n, n))
    for epoch in range(rounds):
        table[np.arange(n), epoch_indices(n, 5, epoch, 0, n)] += 1
    expected = rounds / n
    freedom = (n - 1) ** 2
    assert abs(((table - expected) ** 2 / expected).sum() - freedom) < 5 * np.sqrt(2 * freedom)


def test_neighbours_are_not_kept_together() -> None:
    n = 1000
    following = sum(np.mean(np.diff(epoch_indices(n, 3, e, 0, n)) == 1) for e in range(50)) / 50
    assert following < 5 / n


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


def test_another_seed_draws_other_numbers() -> None:
    assert _numbers(Generators(1).at(0, 0, 0)) != _numbers(Generators(2).at(0, 0, 0))


@given(seed=seeds, asked=st.lists(keys, min_size=1, max_size=10))
def test_setting_a_generators_memory_is_setting_its_state(seed: int, asked: list[tuple[int, int, int]]) -> None:
    assert epoch_order._is_philox_known(), (
        f"numpy {np.__version__} has Philox in memory otherwise: samples take longer"
    )
    generators = pickle.loads(pickle.dumps(Generators(seed)))
    for epoch, index, stage in asked:
        expected = epoch_order._StateStream(np.frombuffer(derive_bytes("sample", seed, stage, size=16), np.uint64))
        expected.move(3, index, epoch)
        assert _numbers(generators.at(epoch, index, stage, 3)) == _numbers(expected.generator)
        assert generators.at(epoch, index, stage, 4).bit_generator.state["buffer_pos"] == 4
        generators.at(epoch, index, stage, 4).integers(1 << 32, dtype=np.uint32)  # half a word is left


def test_a_state_that_a_stage_assigns_is_gone_with_the_next_sample() -> None:
    expected = _numbers(Generators(1).at(0, 5, 0))
    generators = Generators(1)
    generators.at(0, 4, 0).bit_generator.state = np.random.Philox(key=7).state
    assert _numbers(generators.at(0, 5, 0)) == expected
