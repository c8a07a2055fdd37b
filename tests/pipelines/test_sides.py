"""How many records of divided data have changed sides is found from samples of them."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelines import sources
from pipelines.sources._origin import sketch_parts
from pipelines.sources._sides import ENOUGH, MOST, Sketch, find_moves, sketch_keys, sketch_numbers


def divide(names: list[int], fraction: float = 0.9, seed: int = 0, *, by_key: bool = True) -> dict[str, Any]:
    source = sources.arrays(name=np.array(names))
    train, valid = source.split(fraction, seed, key="name") if by_key else source.split(fraction, seed)
    return {"train": train, "valid": valid}


def find_sides(parts: dict[str, Any]) -> dict[str, Sketch]:
    """As they are read from a log."""
    found = {name: sketch.as_json() for name, sketch in sketch_parts(parts).items()}
    return {name: Sketch.from_json(each) for name, each in json.loads(json.dumps(found)).items()}


def list_keys(part: Any) -> set[int]:
    return set(part.column("name").tolist())


@given(st.sets(st.integers(0, 400), min_size=30), st.sets(st.integers(0, 400), min_size=30), st.floats(0.3, 0.7))
def test_all_records_of_small_data_are_compared(before: set[int], now: set[int], fraction: float) -> None:
    old, new = divide(sorted(before), 0.5), divide(sorted(now), fraction)
    moves = find_moves(find_sides(old), find_sides(new))
    if not before & now:
        assert moves is None
        return
    assert moves is not None and moves.is_exact
    assert moves.counts == {(a, b): len(list_keys(old[a]) & list_keys(new[b])) for a in old for b in new}
    assert moves.sizes == {name: len(part) for name, part in new.items()}


@pytest.mark.parametrize("fraction", [0.5, 0.9, 0.99])
def test_the_share_that_has_changed_sides_is_near_in_large_data(fraction: float) -> None:
    old, new = divide(list(range(60_000)), fraction), divide(list(range(20_000, 80_000)), fraction, seed=1)
    moves = find_moves(find_sides(old), find_sides(new))
    assert moves is not None and not moves.is_exact
    seen = moves.counts["train", "valid"] / moves.sizes["valid"]
    truth = len(list_keys(old["train"]) & list_keys(new["valid"])) / len(new["valid"])
    assert seen == pytest.approx(truth, abs=0.25 if fraction == 0.99 else 0.08)
    assert moves.sizes["valid"] >= (40 if fraction == 0.99 else ENOUGH * 0.9)
    assert all(len(sketch.hashes) <= MOST for sketch in find_sides(old).values()), "the log stays small"


def test_without_keys_records_of_the_same_data_are_known_by_their_numbers() -> None:
    names = list(range(300))
    old, new = divide(names, by_key=False), divide(names, seed=1, by_key=False)
    moves = find_moves(find_sides(old), find_sides(new))
    assert moves is not None and moves.is_exact
    assert moves.counts["train", "valid"] == len(list_keys(old["train"]) & list_keys(new["valid"]))
    assert find_moves(find_sides(old), find_sides(divide([*names, 300], by_key=False))) is None, "other data"


def test_what_is_known_by_other_things_is_not_compared() -> None:
    by_key, by_number = divide(list(range(300))), divide(list(range(300)), by_key=False)
    assert find_moves(find_sides(by_key), find_sides(by_number)) is None
    assert find_moves({}, find_sides(by_key)) is None
    source, names = sources.arrays(name=np.arange(300)), ("train", "valid")
    numbered = dict(zip(names, source.split(0.9, key=np.arange(300)), strict=True))
    reverse = dict(zip(names, source.split(0.9, key=np.arange(300)[::-1]), strict=True))
    moves = find_moves(find_sides(numbered), find_sides(reverse))
    assert moves is not None and moves.counts["train", "valid"] > 0, "by their numbers: an array names nothing"


def test_splits_of_different_data_have_no_sides() -> None:
    assert sketch_parts({"train": sources.arrays(x=np.arange(9)), "valid": sources.arrays(x=np.arange(5))}) == {}
    one, other = divide(list(range(30))), divide(list(range(30, 60)))
    assert sketch_parts({"train": one["train"], "valid": other["valid"]}) == {}


@pytest.mark.parametrize("n", [MOST - 1, MOST, MOST + 1, 5_000_000])
def test_a_range_an_array_and_keys_are_sampled_alike(n: int) -> None:
    one = sketch_numbers(range(n), "x")
    other = sketch_numbers(np.random.default_rng(0).permutation(n), "x")
    keyed = sketch_keys(np.arange(n, dtype=np.uint64), "key")
    assert one.hashes.tolist() == other.hashes.tolist() == keyed.hashes.tolist()
    assert (one.limit == 2**64 - 1) == (n <= MOST) and len(one.hashes) == min(n, MOST)
