"""Several sources as one, in shares; records that are left out; records that become several."""

from __future__ import annotations

import functools
import pickle
from collections import Counter
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest
from core_pipes import count_shared_records, record, together
from hypothesis import given
from hypothesis import strategies as st

from pipelines import Feeder, Pipeline, PipelineError, attach, sampling, sources
from pipelines.sources._origin import find_shared_records, is_same_records
from pipelines.sources._subset import Subset


def numbers(*values: int, **columns: Any) -> Any:
    return sources.arrays(x=np.array(values), **columns)


def read_all(loader: Any) -> list[Any]:
    return [record(batch) for batch in loader]


def read(source: Any) -> list[Any]:
    return [int(one["x"]) for one in source]


# --- concat


@given(st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=6), min_size=1, max_size=4), st.data())
def test_a_concatenation_has_the_records_of_each_source_and_says_which(
    parts: list[Any], data: st.DataObject
) -> None:
    made = sources.concat({f"s{number}": numbers(*part) for number, part in enumerate(parts)}, field="of")
    expected = [(value, number) for number, part in enumerate(parts) for value in part]
    assert [(int(one["x"]), int(one["of"])) for one in made] == expected
    assert [(int(x), int(of)) for x, of in zip(made.column("x"), made.column("of"), strict=True)] == expected
    indices = np.array(data.draw(st.lists(st.integers(0, len(made) - 1), max_size=9)), np.int64)
    into = {"x": np.empty(len(indices), np.int64), "of": np.empty(len(indices), np.int64)}
    assert made.copy_records(indices, into)
    assert [*zip(into["x"].tolist(), into["of"].tolist(), strict=True)] == [expected[index] for index in indices]


def test_sources_of_several_kinds_are_mixed_by_the_names_that_they_have(tmp_path: Path) -> None:
    (tmp_path / "plots.csv").write_text("text,label\n" + "".join(f"plot {i},{i % 2}\n" for i in range(20)))
    reviews = sources.arrays(text=[f"review {i}" for i in range(30)], label=np.arange(30) % 2)
    both = sources.concat({"reviews": reviews, "plots": sources.csv(tmp_path / "plots.csv")})
    assert both.find_class_names("source").union == ("reviews", "plots") and both.is_text("text")  # type: ignore[union-attr]
    pipe = Pipeline(both, seed=1, sampling=sampling.mixed({"plots": 0.3, "reviews": 0.7})).map(len, field="text")
    assert len(pipe) == 42, "7/10 of 42 are all reviews, up to rounding"
    for batch in pipe.loader(10, epochs=range(1, 3)):
        share = float((batch["source"] == 0).float().mean())
        assert abs(share * len(batch["source"]) - 0.7 * len(batch["source"])) <= 1
        assert {len(both[int(index)]["text"]) for index in batch["index"]} == set(batch["text"].tolist())


def test_the_sources_of_a_concatenation_are_part_of_its_fingerprint_and_divided_with_it() -> None:
    a, b = numbers(*range(10), label=np.arange(10) % 2), numbers(*range(10, 15), label=np.ones(5, int))
    made = [
        sources.concat({"a": a, "b": b}),
        sources.concat({"a": b, "b": a}),
        sources.concat({"a": a, "c": b}),
        sources.concat({"a": a, "b": b}, field="of"),
        sources.concat({"a": a}),
    ]
    assert len({Pipeline(source).fingerprint for source in made}) == len(made)
    orders = [
        sampling.mixed(shares, samples)
        for shares, samples in (({0: 1, 1: 1}, 8), ({0: 1, 1: 3}, 8), ({0: 1, 1: 1}, 10))
    ]
    assert len({Pipeline(made[0], sampling=order).fingerprint for order in orders}) == 3
    copy = pickle.loads(cloudpickle.dumps(made[0]))
    assert Pipeline(copy).fingerprint == Pipeline(made[0]).fingerprint and read(copy) == [*range(15)]
    assert sources.concat({"a": sources.dataset([{"x": 1}], id=None)}).identity() is None
    train, valid = made[0].split(0.8, stratify="source")
    assert Counter(valid.column("source").tolist()) == {0: 2, 1: 1} and sorted(read(train) + read(valid)) == [
        *range(15)
    ]
    assert sorted(read(fold) for _, fold in made[0].folds(5)) == sorted(read(fold) for _, fold in made[0].folds(5))


def test_records_of_one_source_in_two_concatenations_are_seen() -> None:
    a, b, c = numbers(*range(10)), numbers(*range(4)), numbers(7)
    early, late = a.split(0.5, by=np.arange(10))
    inner = sources.concat({"b": b, "late": late}, field="inner")
    one, other = sources.concat({"early": early, "c": c}), sources.concat({"c": c, "a": a})
    nested = sources.concat({"inner": inner, "more": sources.concat({"b": early}, field="inner")})
    assert find_shared_records(one, other).tolist() == [True, *[True] * 5, *[False] * 5]
    assert (
        count_shared_records(one, late) == 0 == count_shared_records(one, inner)
        and count_shared_records(one, early) == 5
    )
    assert find_shared_records(a, nested).tolist() == [False] * 4 + [True] * 10
    assert find_shared_records(nested.take(6), a).tolist() == [False] * 5 + [True] * 2 + [False] * 3


def test_records_that_are_packed_or_cut_after_a_concatenation_are_seen() -> None:
    docs = numbers(*range(20))
    train, valid = docs.take(15), docs.split(0.5, by=np.arange(20))[1]
    both = sources.concat({"train": train, "c": numbers(99)})
    pack = functools.partial(sources.pack, tokens=lambda one: [int(one["x"])] * 4, length=4)
    assert count_shared_records(pack(both), pack(valid)) == 5 == count_shared_records(valid, pack(both))
    pieces = [sources.flat_map(part, lambda one: [one, one]) for part in (both, valid)]
    assert count_shared_records(*pieces) == 10 == count_shared_records(*map(pack, pieces))
    left, right = (Subset(pieces[0], np.arange(side, 32, 2)) for side in (0, 1))
    assert is_same_records(left, left) and not is_same_records(left, right), "they are of the same documents"


def test_windows_over_a_concatenation_are_of_one_source_each() -> None:
    both = sources.concat({"a": numbers(*range(5)), "b": numbers(*range(10, 15))})
    made = sources.windows(both, 3, inputs=["x"], target="x")
    assert [int(one["x"][0, 0]) for one in made] == [0, 1, 10, 11]


class Opened(type(numbers(1))):  # type: ignore[misc]
    """A user's, of a kind of ours."""


def test_forks_may_read_a_concatenation_of_parts_but_not_of_sources_of_the_users() -> None:
    part, theirs = numbers(1, 2).take(1), Opened({"x": np.arange(2)}, None)
    assert sources.concat({"a": part}).is_fork_safe
    assert not sources.concat({"a": part, "b": theirs}).is_fork_safe


# --- filter


@given(st.lists(st.integers(0, 9), min_size=1), st.integers(0, 9))
def test_a_filter_keeps_what_a_function_is_true_for(values: list[int], least: int) -> None:
    source = numbers(*values)
    if max(values) < least:
        with pytest.raises(PipelineError, match="true for none of the records of arrays"):
            source.filter(lambda one: one["x"] >= least)
        return
    kept = [value for value in values if value >= least]
    pipe = Pipeline(source, seed=least).filter(lambda one: one["x"] >= least)
    assert read(pipe.source) == kept and sorted(b["x"].item() for b in pipe.loader(1, epochs=1)) == sorted(kept)
    same = Pipeline(source, seed=least).filter(lambda one: not one["x"] < least)
    assert pipe.fingerprint == same.fingerprint, "it is of the records that are kept"
    assert len(kept) == len(values) or pipe.fingerprint != Pipeline(source, seed=least).fingerprint


def test_a_filter_is_given_records_and_can_be_divided() -> None:
    pipe = Pipeline(numbers(*range(20))).filter(lambda one: one["x"] % 2)
    assert [read(part) for part in pipe.source.split(0.5, by=np.arange(10))] == [
        [1, 3, 5, 7, 9],
        [11, 13, 15, 17, 19],
    ]
    assert read(pipe.take(3).source) == [1, 3, 5] == read(pickle.loads(cloudpickle.dumps(pipe.take(3))).source)
    assert pipe.source.where(1) == "arrays(x):row 3"
    named = Pipeline(numbers(*range(4)), id="mine")
    chosen = [named, named.take(2), named.filter(lambda one: one["x"] % 2), named.filter(lambda one: one["x"] > 1)]
    assert len({one.fingerprint for one in chosen}) == 4, "the id is of all records"
    with pytest.raises(
        PipelineError, match=r"filter\(\) is given the records of the source: put it before map\(\)"
    ):
        pipe.map(dict).filter(bool)


# --- flat_map


def cut(one: dict[str, Any]) -> Any:
    return ({"x": one["x"], "part": np.int64(number)} for number in range(int(one["x"])))


@given(st.lists(st.integers(0, 4), min_size=1, max_size=30).filter(any), st.data())
def test_pieces_are_read_at_random_as_they_are_made_in_turn(values: list[int], data: st.DataObject) -> None:
    made = sources.flat_map(numbers(*values), cut)
    expected = [(value, part) for value in values for part in range(value)]
    assert len(made) == len(expected)
    for index in data.draw(st.lists(st.integers(0, len(made) - 1), max_size=20)):
        assert (int(made[index]["x"]), int(made[index]["part"])) == expected[index]
    assert made.column("part").tolist() == [part for _, part in expected]


def test_pieces_of_a_record_stay_in_one_part() -> None:
    source = numbers(*[3] * 20, label=np.arange(20) % 2)
    made = sources.flat_map(source, cut)
    assert made.where(4) == "piece 1 of arrays(x, label):row 1"
    for divide in (lambda: made.split(0.5), lambda: made.folds(3), lambda: sources.concat({"a": made}).split(0.5)):
        with pytest.raises(PipelineError, match="split the records first, then make pieces"):
            divide()
    train, valid = made.split(0.75, group=np.repeat(np.arange(20), 3))
    assert (len(train), len(valid)) == (45, 15)
    early, late = (sources.flat_map(part, cut) for part in source.split(0.5, seed=1))
    assert count_shared_records(early, late) == 0 and count_shared_records(early, made) == 30
    assert count_shared_records(source, made.take(4)) == 4, "pieces of records of the source"


def test_pieces_are_known_by_what_they_hold() -> None:
    source = numbers(*[3] * 5)
    made = [sources.flat_map(source, function) for function in (cut, cut, lambda one: [{"x": one["x"]}] * 3)]
    same, again, other = (Pipeline(one).fingerprint for one in made)
    assert same == again != other


# --- all of them, shared


def test_members_share_a_mixture_of_packed_rows_and_pieces_and_a_cache_of_it() -> None:
    texts = numbers(*range(40)).filter(lambda one: one["x"] % 4)
    rows = sources.pack(texts, lambda one: [int(one["x"])] * int(one["x"] % 4), 8)
    small = sources.flat_map(numbers(*[2] * 6), lambda one: [{name: np.full(8, one["x"]) for name in rows[0]}] * 2)
    both = sources.concat({"rows": rows, "small": small})
    pipe = Pipeline(both, seed=2, sampling=sampling.mixed({"rows": 0.5, "small": 0.5}, samples=12)).map(dict)
    jobs: list[Any] = [{"batch_size": size, "epochs": range(3)} for size in (4, 5)]
    alone = [read_all(pipe.loader(**job)) for job in jobs]
    with Feeder(pipe, expect=2, workers=1, gate_timeout_s=600, cache="memory") as feeder:
        loaders = [attach(feeder.address, pipe, name=f"m{number}", **job) for number, job in enumerate(jobs)]
        shared = together([functools.partial(read_all, loader) for loader in loaders])
        assert shared == alone and all(loader.stats()["shared_batches"] for loader in loaders)
