"""Weights by index: their statistics, and that the stream does not know of them."""

from __future__ import annotations

import tracemalloc
from typing import Any

import core_pipes as pipes
import numpy as np
import pytest
from core_pipes import Feeder, leaves_nothing  # noqa: F401 - a fixture
from hypothesis import given
from hypothesis import strategies as st

from pipelines import Pipeline, PipelineError, attach, sources, weights

seeds = st.integers(-(2**70), 2**70)


LABELLED = sources.arrays(x=np.zeros(8), label=np.array([0, 0, 0, 0, 0, 0, 1, 1]))
NAMED = sources.arrays(x=np.zeros(4), kind=np.array(["cat", "cat", "cat", "dog"]))


def test_bootstrap_counts_are_those_of_poisson() -> None:
    n = 200_000
    own = weights.bootstrap(seed=4)(np.arange(n))
    counts = np.round(own / (1 - np.exp(-1)))
    assert own.dtype == np.float32 and own == pytest.approx(counts * (1 - np.exp(-1)))
    assert own[own > 0].mean() == pytest.approx(1, rel=0.01)
    # e^-1 / k!; the last class is "5 and more". Chi-square with 5 degrees of freedom: P(> 20.5) = 0.001.
    masses = np.exp(-1) / np.array([1, 1, 2, 6, 24])
    expected = n * np.array([*masses, 1 - masses.sum()])
    found = np.bincount(np.minimum(counts.astype(int), 5), minlength=6)
    assert ((found - expected) ** 2 / expected).sum() < 20.5
    assert abs(counts.sum() - n) < 4 * np.sqrt(n)


def test_bootstrap_samples_of_neighbours_and_of_members_are_independent() -> None:
    n = 100_000
    tables = np.stack([weights.bootstrap(seed)(np.arange(n)) for seed in range(8)])
    shifted = np.stack([tables[0][:-1], tables[0][1:], *tables[1:, 1:]])
    correlations = np.corrcoef(shifted)[np.triu_indices(len(shifted), 1)]
    assert np.abs(correlations).max() < 4.5 / np.sqrt(n)


@given(n=st.integers(2, 2000), seed=seeds, data=st.data())
def test_folds_part_the_samples_evenly(n: int, seed: int, data: st.DataObject) -> None:
    k = data.draw(st.integers(2, min(n, 20)))
    index = np.arange(n)
    tables = np.stack([weights.fold(n, k, held_out, seed)(index) for held_out in range(k)])
    assert tables.dtype == np.float32
    assert ((tables == 0).sum(axis=0) == 1).all(), "each sample is left out once"
    sizes = (tables == 0).sum(axis=1)
    assert sizes.max() - sizes.min() <= 1
    assert set(np.unique(tables)) == {0.0, 1.0}
    some = data.draw(st.lists(st.integers(0, n - 1), max_size=20))
    picked = np.array(some, np.int64)
    assert np.array_equal(weights.fold(n, k, 0, seed)(picked), tables[0][picked]), "a function of the index alone"


def test_folds_are_drawn_at_random() -> None:
    number, other = (weights.fold(1000, 5, 0, seed).number(np.arange(1000)) for seed in (1, 2))
    assert 0.1 < (np.diff(number) == 0).mean() < 0.3 and (number != other).mean() > 0.5


def test_a_billion_samples_have_weights_without_an_array() -> None:
    index = np.random.default_rng(0).integers(0, 10**9, 64)
    tracemalloc.start()
    assert weights.bootstrap(0)(index).shape == weights.fold(10**9, 5, 3)(index).shape == (64,)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 100_000


WRONG: list[tuple[Any, str]] = [
    *((lambda given=given: weights.assigned(given), "assigned: weights") for given in ([0, 0], [1, -1], [[1.0]])),
    (lambda: weights.assigned([1, np.inf]), "assigned: weights"),
    *((lambda k=k: weights.fold(5, k, 0), f"k must be between 2 and .* samples, 5; got {k}") for k in (1, 6)),
    (lambda: weights.fold(5, 2, 2), r"held_out must be in 0\.\.1, got 2"),
    (lambda: weights.fold(5, 2, 0)(np.array([4, 5])), "folds of 5 samples have no sample 4 to 5"),
    (lambda: weights.bootstrap(0.5), "bootstrap: seed must be an integer"),  # type: ignore[arg-type]
    (lambda: LABELLED.weigh_classes("label", {0: 1}), "the class 1 of the field 'label' has no weight"),
    (lambda: LABELLED.weigh_classes("label", {0: 1, 1: 1, 2: 1}), "no record has the class 2 in the field"),
    (lambda: LABELLED.weigh_classes("label", "rare"), "weights are 'balanced' or class -> weight, got 'rare'"),
]


@pytest.mark.parametrize(("make", "words"), WRONG)
def test_weights_that_cannot_be_are_refused(make: Any, words: str) -> None:
    with pytest.raises(PipelineError, match=words):
        make()


def test_members_weigh_one_stream_each_in_its_own_way() -> None:
    """Shared or private, a batch has the rows of weight above 0 of its part of the stream, bit by bit."""
    made, pipe = [weights.bootstrap(1), weights.fold(pipes.N, 4, 2), None], pipes.pipe("skip")

    def read(number: int, address: str | None = None) -> list[Any]:
        own, arguments = made[number], {"batch_size": (8, 5, 8)[number], "epochs": 2, "weights": made[number]}
        loader = attach(address, pipe, name=f"{number}", **arguments) if address else pipe.loader(**arguments)
        records = []
        for batch in loader:
            if own is not None:
                assert np.array_equal(batch["weight"].numpy(), own(batch["index"].numpy()))
                assert (batch["weight"] > 0).all() and batch.global_size == len(batch["index"])
            records.append(pipes.record(batch))  # looks at the alignment of all fields
        assert not address or loader.stats()["shared_batches"] == len(records)
        return records

    with pytest.warns(UserWarning, match="left out"):
        private = [read(number) for number in range(3)]
    with Feeder(pipe, capacity=64, expect=3) as feeder:
        shared = pipes.together([lambda number=number: read(number, feeder.address) for number in range(3)])
    assert shared == private
    assert all("weight" in record[-1] for record in shared[0])
    drawn = {(epoch, step): index for epoch, step, _, index, _ in shared[0]}
    for epoch, step, _, index, _ in shared[2]:
        assert drawn.get((epoch, step), []) == [i for i in index if made[0](np.array([i]))[0] > 0]


@pytest.mark.filterwarnings("ignore:.*left out")
@pytest.mark.parametrize("workers", [0, 1])
def test_ranks_agree_on_what_is_left_of_a_batch_and_an_empty_one_is_passed_over(workers: int) -> None:
    """A rank without a sample gets its empty part, as it takes part in collectives."""
    own, pipe = weights.fold(pipes.N, 3, 1), pipes.pipe("skip")
    whole = {(b.epoch, b.step): b["index"].tolist() for b in pipe.loader(2, 2)}
    some = {place: [i for i in index if own(np.array([i]))[0]] for place, index in whole.items()}
    wanted = {place: index for place, index in some.items() if index}
    assert len(wanted) < len(whole)
    loaders = [pipe.loader(2, 2, rank, 2, weights=own, workers=workers) for rank in range(2)]
    ranks, union = [list(loader) for loader in loaders], {}
    assert any(not len(batch["index"]) for batch in ranks[0])
    for one, other in zip(*ranks, strict=True):
        union[one.epoch, one.step] = one["index"].tolist() + other["index"].tolist()
        assert one.global_size == other.global_size == len(union[one.epoch, one.step])
    assert union == wanted
    stats = [loader.stats() for loader in loaders]
    assert sum(one["samples"] for one in stats) == sum(map(len, wanted.values()))
    assert stats[0]["skipped"] == 2 * pipes.N - sum(map(len, whole.values())), "left out is not skipped"
    loader = pipe.loader(2, 2, weights=own, workers=workers)
    every = [batch.global_size for epoch in loader.epochs() for batch in epoch.all_batches()]
    assert len(every) == len(loader) and every.count(0) == len(every) - len(wanted)


def test_a_table_of_ones_own_serves_as_weights_and_what_is_no_weight_is_refused() -> None:
    pipe, table = Pipeline(sources.arrays(x=np.arange(8))), np.random.default_rng(0).random(8)
    for batch in pipe.loader(4, weights=lambda index: table[index]):
        assert batch["weight"].tolist() == table.astype(np.float32)[batch["index"]].tolist()
    for odd in (lambda i: i[:-1], lambda i: i - 5.0, lambda i: i * np.nan, lambda i: 1.0):
        with pytest.raises(PipelineError, match="weights= must map indices"):
            next(iter(pipe.loader(4, weights=odd)))
    with pytest.raises(PipelineError, match="'weight' of a batch, which the samples have already"):
        Pipeline(sources.arrays(weight=np.arange(8))).loader(4, weights=weights.bootstrap(0))


def test_classes_are_weighed_by_label_or_by_name_and_balanced_ones_have_the_same_sum_and_a_mean_of_1() -> None:
    numbered = NAMED.number_classes("kind", ["bird", "dog", "cat"])
    for source, classes in ((NAMED, ("dog", "cat")), (numbered, ("dog", "cat")), (numbered, (1, 2))):
        given = dict(zip(classes, (6, 2), strict=True))
        own = weights.assigned(source.weigh_classes("kind", given))(np.arange(4))
        np.testing.assert_allclose(own, [2 / 3, 2 / 3, 2 / 3, 2])
    np.testing.assert_allclose(weights.assigned([0, 1, 3])(np.arange(3)), [0, 0.5, 1.5])  # of those that are read
    own = weights.assigned(LABELLED.weigh_classes("label"))(np.arange(8))
    assert own.dtype == np.float32 and own.mean() == pytest.approx(1)
    assert own[:6].sum() == pytest.approx(own[6:].sum())


@pytest.mark.parametrize("world", [1, 2])
def test_alone_no_sample_of_weight_0_is_prepared(world: int) -> None:
    prepared: list[int] = []

    def note(sample: dict[str, Any]) -> dict[str, Any]:
        prepared.append(int(sample["x"]))
        return sample

    own = weights.fold(24, 3, 1)
    pipe = Pipeline(sources.arrays(x=np.arange(24)), seed=0).map(note, fields={"x": ((), "int64")})
    loaders = [pipe.loader(4, 2, rank, world, weights=own) for rank in range(world)]
    prepared.clear()
    read = [index for loader in loaders for batch in loader for index in batch["index"].tolist()]
    assert sorted(prepared) == sorted(read) and len(read) == 2 * 16
