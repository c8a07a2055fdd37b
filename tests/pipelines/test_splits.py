"""Divisions of records: partitions, shares of classes, groups that stay together, folds, time."""

from __future__ import annotations

import itertools
import warnings
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelines import PipelineError, sources, weights
from pipelines.sources import Subset

FRACTIONS = st.lists(st.integers(1, 20), min_size=2, max_size=5).map(lambda w: [each / sum(w) for each in w])


def source(n: int, **columns: Any) -> Any:
    return sources.arrays(x=np.arange(n), **columns)


def parts_of(parts: Any, n: int) -> np.ndarray[Any, Any]:
    """The part of each record; every record is in exactly one, ascending within it."""
    found = np.full(n, -1)
    for number, part in enumerate(parts):
        assert isinstance(part, Subset) and (np.diff(part.indices) > 0).all()
        assert (found[part.indices] == -1).all()
        found[part.indices] = number
    assert (found >= 0).all()
    return found


@st.composite
def labelled(draw: st.DrawFn) -> tuple[Any, Any, list[float], int]:
    n = draw(st.integers(30, 200))
    rng = np.random.default_rng(draw(st.integers(0, 10**6)))
    labels = rng.choice(draw(st.integers(1, 5)), n, p=None)
    groups = rng.integers(0, draw(st.integers(6, 40)), n)
    return labels, groups, draw(FRACTIONS), draw(st.integers(0, 5))


def test_a_division_into_two_is_what_it_always_was() -> None:
    for n, fraction, seed in ((10, 0.7, 0), (1000, 0.9, 3), (7, 0.5, 1), (61, 1 / 3, 2)):
        order = np.argsort(np.random.Philox(seed).random_raw(n), kind="stable")
        parts = source(n).split(fraction=fraction, seed=seed)
        for part, wanted in zip(parts, np.split(order, [round(n * fraction)]), strict=True):
            assert np.array_equal(part.indices, np.sort(wanted))
        several = source(n).split((fraction, 1 - fraction), seed)
        assert [part.identity() for part in parts] == [part.identity() for part in several]


def test_the_divisions_are_those_of_every_machine_and_version() -> None:
    labels, groups = [0, 1, 0, 0, 1, 0, 1, 0, 0, 0], [3, 1, 1, 2, 2, 2, 0, 0, 0, 0]
    made = source(10, label=labels, group=groups)
    by: list[Any] = [{}, {"stratify": "label"}, {"group": "group"}, {"stratify": "label", "group": "group"}]
    divisions: list[Any] = [made.split((0.5, 0.3, 0.2), seed=5, **options) for options in by[:2]]
    divisions += [made.split(0.6, seed=5, **options) for options in by[2:]]
    divisions += [[valid for _, valid in made.folds(3, seed=5, **by[number])] for number in (0, 1, 3)]
    wanted = ["1200000121", "1200100021", "1001110000", "1001110000", "1200010122", "1010221002", "2221110000"]
    assert ["".join(map(str, parts_of(division, 10))) for division in divisions] == wanted
    groups = np.repeat(np.arange(40), np.arange(40) % 7 + 1)
    made = source(len(groups), patient=groups)
    assert len({tuple(made.split(0.8, seed, group="patient")[1].indices) for seed in range(8)}) > 4


@given(st.integers(10, 300), FRACTIONS, st.integers(0, 9))
def test_any_number_of_parts_are_a_partition_of_the_sizes_asked_for(
    n: int, shares: list[float], seed: int
) -> None:
    bounds = [0, *(round(n * sum(shares[:i])) for i in range(1, len(shares))), n]
    sizes = [b - a for a, b in itertools.pairwise(bounds)]
    if 0 in sizes:
        with pytest.raises(PipelineError, match="leaves one part empty"):
            source(n).split(shares, seed)
        return
    parts = source(n).split(shares, seed)
    assert all(abs(len(part) - size) <= 1 for part, size in zip(parts, sizes, strict=True))
    parts_of(parts, n)


@given(labelled())
def test_a_stratified_part_has_each_class_within_one_record_of_its_share(drawn: Any) -> None:
    labels, _, shares, seed = drawn
    if min(shares) * len(labels) < len(shares) + 1:
        return  # a part may be empty
    parts = source(len(labels), label=labels).split(shares, seed, stratify="label")
    found = parts_of(parts, len(labels))
    for label in np.unique(labels):
        counts = np.bincount(found[labels == label], minlength=len(shares))
        assert (np.abs(counts - np.count_nonzero(labels == label) * np.array(shares)) <= 1 + 1e-9).all()
    # The parts as a whole are near, too: what is rounded down in one class is rounded up in another.
    sizes = np.bincount(found, minlength=len(shares))
    assert (np.abs(sizes - len(labels) * np.array(shares)) <= len(shares)).all()


def test_a_stratified_split_of_many_small_classes_has_the_fractions_of_the_whole() -> None:
    parts = source(60).split((0.6, 0.3, 0.1), stratify=np.arange(60) // 2)
    assert [len(part) for part in parts] == [36, 18, 6]


@given(labelled())
def test_groups_stay_together_and_parts_come_near_their_shares(drawn: Any) -> None:
    labels, groups, shares, seed = drawn
    sizes, parts = np.bincount(groups), len(shares)
    if np.count_nonzero(sizes) < 3 * parts:
        return
    made = source(len(groups), patient=groups)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = parts_of(made.split(shares, seed, group="patient"), len(groups))
        stratified = parts_of(made.split(shares, seed, stratify=labels, group="patient"), len(groups))
    for group in np.unique(groups):
        assert len(set(found[groups == group])) == len(set(stratified[groups == group])) == 1, "a group leaks"
    assert set(stratified) == set(range(parts))
    over = np.bincount(found, minlength=parts) - len(groups) * np.array(shares)
    bound = sizes.max() / 2 * (1 + np.array(shares) * (parts - 2))
    assert (over <= np.maximum(bound, sizes.max() if min(shares) * len(groups) < sizes.max() else 0) + 1e-9).all()


def test_labels_may_be_a_field_an_array_or_a_function_of_the_record_and_groups_too_large_are_warned_of() -> None:
    labels = np.arange(60) % 3
    made = source(60, label=labels)
    ways = ("label", labels, labels.tolist(), [f"class {n}" for n in labels], lambda record: int(record["label"]))
    divisions = [made.split((0.5, 0.25, 0.25), stratify=given) for given in ways]
    assert len({str([part.indices.tolist() for part in parts]) for parts in divisions}) == 1
    with pytest.warns(UserWarning, match=r"split\(\(0.5, 0.3, 0.2\)\): the parts have 50, 5, 5 of 60 records"):
        made.split((0.5, 0.3, 0.2), group=[0] * 50 + [1] * 5 + [2] * 5)


def test_a_division_by_time_has_the_earlier_records_first() -> None:
    times = np.array(["2024-03-01", "2024-01-01", "2024-02-01", "2024-01-15", "2024-04-01"], "M8[D]")
    train, test = source(5, time=times).split(0.6, by="time")
    assert train.indices.tolist() == [1, 2, 3] and test.indices.tolist() == [0, 4]
    first, middle, last = source(6).split((1 / 3, 1 / 3, 1 / 3), by=lambda record: -float(record["x"]))
    assert [each.indices.tolist() for each in (first, middle, last)] == [[4, 5], [2, 3], [0, 1]]


@given(n=st.integers(30, 300), fractions=FRACTIONS, seed=st.integers(0, 10**30), data=st.data())
@settings(deadline=None)
def test_a_record_stays_in_its_part_whatever_becomes_of_the_others(
    n: int, fractions: list[float], seed: int, data: st.DataObject
) -> None:
    names = [f"scan-{number}" for number in range(n)]
    before = _divide(names, fractions, seed)
    after = data.draw(st.permutations(names).map(lambda moved: moved[: n // 2] + [f"new-{k}" for k in range(n)]))
    now = _divide(after, fractions, seed)
    for name in after:
        assert name not in before or name not in now or now[name] == before[name]
    wider = [fractions[0] + sum(fractions[1:]) / 2, sum(fractions[1:]) / 2]  # a larger first part loses nobody
    first = {name for name, part in before.items() if part == 0}
    widened = _divide(names, wider, seed)  # empty where a part would be
    assert first <= {name for name, part in widened.items() if part == 0} or not before or not widened


def _divide(names: list[str], fractions: list[float], seed: int) -> dict[str, int]:
    """The part of each name; empty where one of the parts would be."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # few keys
        try:
            parts = parts_of(source(len(names)).split(fractions, seed, key=names), len(names))
        except PipelineError as error:
            if "leaves one part empty" not in str(error):
                raise
            return {}
    return dict(zip(names, parts.tolist(), strict=True))


def test_keys_are_divided_alike_on_every_machine_by_what_they_say() -> None:
    shares, large = (0.8, 0.15, 0.05), np.arange(100_000) * 10 + 3  # neither dense nor random
    sizes = np.array([len(part) for part in source(len(large)).split(shares, 1, key=large)])
    spread = (len(large) * np.array(shares) * (1 - np.array(shares))) ** 0.5
    assert (np.abs(sizes - np.array(shares) * len(large)) < 4 * spread).all()
    one, two = (parts_of(source(len(large)).split(shares, seed, key=large), len(large)) for seed in (0, 1))
    assert (one == two).mean() == pytest.approx(0.8**2 + 0.15**2 + 0.05**2, abs=0.01), "seeds are independent"
    names = ["a", "b", "", "7", "-1", "\u00e4", "cat/1.jpg", "\ud800"]
    expected = [1, 2, 1, 1, 2, 1, 0, 1]  # computed apart from this code
    for keys in (names, [name.encode("utf-8", "surrogatepass") for name in names]):
        with pytest.warns(UserWarning, match="of 8 records: there are too few different keys"):
            parts = source(8).split((0.4, 0.4, 0.2), 2, key=keys)
        assert parts_of(parts, 8).tolist() == expected
    numbers = np.array([10, 700, -3, 2**62], np.int64)
    texts = source(4, name=["10", "700", "-3", str(2**62)]).split(0.5, 2, key="name")
    assert parts_of(source(4).split(0.5, 2, key=numbers), 4).tolist() == parts_of(texts, 4).tolist()
    patients = source(200, patient=np.repeat(np.arange(40), 5))
    train, valid = patients.split(0.7, key="patient")
    assert not set(train.column("patient")) & set(valid.column("patient"))
    other = patients.split(0.7)[0].identity()
    numbered, named = (patients.split(0.7, key=[kind(n) for n in range(200)])[0] for kind in (int, str))
    assert numbered.identity() == named.identity()
    assert train.identity() == patients.split(0.7, key="patient")[0].identity() not in (other, valid.identity())


@given(labelled(), st.integers(2, 7), st.sampled_from(["plain", "stratify", "group", "both"]))
def test_folds_are_exact_partitions(drawn: Any, k: int, how: str) -> None:
    labels, groups, _, seed = drawn
    n = len(labels)
    if len(set(groups)) < k:
        return
    options = {"stratify": labels} if how in ("stratify", "both") else {}
    options |= {"group": groups} if how in ("group", "both") else {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pairs = source(n).folds(k, seed, **options)
        numbers = source(n).number_folds(k, seed, **options)
    assert len(pairs) == k and np.array_equal(parts_of([valid for _, valid in pairs], n), numbers)
    for train, valid in pairs:
        assert sorted([*train.indices, *valid.indices]) == list(range(n))
        if "group" in options:
            assert not set(groups[train.indices]) & set(groups[valid.indices])
    if "group" not in options:
        sizes = np.bincount(numbers, minlength=k)
        assert sizes.max() - sizes.min() <= 1
        for label in np.unique(labels) if "stratify" in options else ():
            counts = np.bincount(numbers[labels == label], minlength=k)
            assert counts.max() - counts.min() <= 1


@pytest.mark.parametrize("k", [3, 5])
def test_folds_are_as_balanced_as_scikit_learns(k: int) -> None:
    from sklearn.model_selection import GroupKFold, StratifiedGroupKFold, StratifiedKFold

    def split_by(splitter: Any, groups: Any = None) -> Any:
        folds = np.empty(len(labels), int)
        for number, (_, held_out) in enumerate(splitter.split(np.zeros(len(labels)), labels, groups)):
            folds[held_out] = number
        return folds

    def imbalance(folds: Any) -> float:
        """The mean over classes of the standard deviation of a class's shares over folds."""
        counts = [np.bincount(folds[labels == c], minlength=k) for c in np.unique(labels)]
        return float(np.mean([np.std(count / count.sum()) for count in counts]))

    figures = []  # (ours, theirs) of classes, of groups, of both
    for trial in range(12):
        rng = np.random.default_rng(trial)
        groups = np.repeat(np.arange(60), rng.geometric(0.1, 60))
        own = rng.choice(3, 60, p=[0.7, 0.2, 0.1])  # a patient has mostly one class; classes are rare and frequent
        labels = np.where(rng.random(len(groups)) < 0.7, own[groups], rng.choice(3, len(groups)))
        number, options = source(len(labels)).number_folds, {"shuffle": True, "random_state": trial}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            by_class = number(k, trial, stratify=labels), split_by(StratifiedKFold(k, **options))
            by_group = number(k, trial, group=groups), split_by(GroupKFold(k), groups)
            splitter = StratifiedGroupKFold(k, **options)
            by_both = number(k, trial, stratify=labels, group=groups), split_by(splitter, groups)
        stratified, both = (list(map(imbalance, pair)) for pair in (by_class, by_both))
        spreads = [float(np.std(np.bincount(folds, minlength=k))) for folds in by_group]
        figures.append([stratified, spreads, both])
    stratified, spreads, both = np.median(figures, axis=0).tolist()
    assert stratified[0] <= stratified[1] + 1e-12, stratified
    assert spreads[0] <= max(2.0, 2 * spreads[1]), spreads
    assert both[0] <= 1.1 * both[1], both


@settings(max_examples=30, deadline=None)
@given(n=st.integers(12, 60), k=st.integers(2, 5), gap=st.integers(0, 3), seed=st.integers(0, 9))
def test_blocks_in_time_are_scikit_learns(n: int, k: int, gap: int, seed: int) -> None:
    from sklearn.model_selection import TimeSeriesSplit

    times = np.random.default_rng(seed).permutation(n)
    places = source(n, day=times).rank("day")
    assert np.array_equal(places, times)
    try:
        pairs = list(TimeSeriesSplit(k, gap=gap).split(np.zeros(n)))
    except ValueError:
        with pytest.raises(PipelineError, match="leave none to learn from before the first block"):
            weights.expanding_window(places, k, 0, gap)
        return
    for held_out, (before, block) in enumerate(pairs):
        weigh = weights.expanding_window(places, k, held_out, gap)
        given_weights = weigh(np.arange(n))
        assert np.array_equal(np.sort(places[given_weights > 0]), before)
        assert np.array_equal(np.sort(places[weigh.is_held_out(np.arange(n))]), block)
        assert set(given_weights.tolist()) <= {0, 1}


def test_weights_of_given_folds_leave_one_out_and_a_part_of_a_part_has_no_record_outside_of_it() -> None:
    folds = source(10).number_folds(3, stratify=np.arange(10) % 2)
    weigh = weights.assigned_fold(folds, held_out=1)
    assert weigh(np.arange(10)).dtype == np.float32 and np.array_equal(weigh(np.arange(10)), folds != 1)
    assert np.array_equal(weigh.number(np.arange(10)), folds)
    part = Subset(source(10), range(2, 8, 2))
    assert Subset(part, np.array([2, -3, 0])).indices.tolist() == [6, 2, 2]
    assert Subset(part, np.array([True, False, True])).indices.tolist() == [2, 6]
    for outside in (3, -4):
        with pytest.raises(IndexError):
            Subset(part, np.array([outside]))
