"""What every source offers: records by index, split, take, identity; and the errors of samples."""

from __future__ import annotations

import json
import pickle

import cloudpickle
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelines import sources
from pipelines.errors import PipelineError, SampleError
from pipelines.samples.fields import Field


def numbers(n: int) -> sources.Source:
    return sources.arrays(number=np.arange(n))


def all_of(source: sources.Source) -> list[int]:
    return [int(source[i]["number"]) for i in range(len(source))]


def test_a_sample_error_survives_pickling_and_says_index_file_and_reason() -> None:
    error = pickle.loads(pickle.dumps(SampleError(17, "photos/a.tar:n01440764.jpg", "cannot decode JPEG: no")))
    assert str(error) == "sample 17 (photos/a.tar:n01440764.jpg): cannot decode JPEG: no"
    assert (error.index, error.where, error.reason) == (17, "photos/a.tar:n01440764.jpg", "cannot decode JPEG: no")
    assert isinstance(error, PipelineError)


def test_a_field_is_a_pair() -> None:
    assert Field((3, 8, 8), "uint8") == ((3, 8, 8), "uint8")


@given(
    n=st.integers(2, 300), fraction=st.floats(0.01, 0.99), seed=st.integers(0, 2**40), other=st.integers(0, 2**40)
)
def test_split_parts_hold_every_record_once_in_order_and_depend_on_the_seed_alone(
    n: int, fraction: float, seed: int, other: int
) -> None:
    first = round(n * fraction)
    if not 0 < first < n:
        with pytest.raises(PipelineError, match="empty"):
            numbers(n).split(fraction, seed)
        return
    one, two = map(all_of, numbers(n).split(fraction, seed))
    assert len(one) == first
    assert sorted(one + two) == list(range(n))
    assert (one, two) == (sorted(one), sorted(two))
    assert [one, two] == [all_of(part) for part in numbers(n).split(fraction, seed)]
    if n > 100 and 20 < first < n - 20 and seed != other:
        assert all_of(numbers(n).split(fraction, other)[0]) != one


def test_split_never_changes_between_versions() -> None:
    assert all_of(numbers(10).split(0.5, seed=0)[0]) == SPLIT_OF_TEN


SPLIT_OF_TEN = [0, 3, 7, 8, 9]


@given(n=st.integers(1, 50), data=st.data())
def test_take_keeps_the_first_records(n: int, data: st.DataObject) -> None:
    k = data.draw(st.integers(1, n))
    assert all_of(numbers(n).take(k)) == list(range(k))


@pytest.mark.parametrize("n", [0, -1, 11])
def test_take_refuses_what_is_not_there(n: int) -> None:
    with pytest.raises(PipelineError, match=r"take\(.*\) of a source of 10 records"):
        numbers(10).take(n)


@pytest.mark.parametrize(("fraction", "seed"), [(0.0, 0), (1.0, 0), (1.5, 0), (0.5, -1), (0.5, 0.5)])
def test_split_refuses_impossible_arguments(fraction: float, seed: int) -> None:
    with pytest.raises(PipelineError):
        numbers(10).split(fraction, seed)


def test_parts_of_parts_read_the_first_source_and_its_errors_carry_the_index_in_the_part() -> None:
    class Odd:
        def __len__(self) -> int:
            return 100

        def __getitem__(self, index: int) -> dict[str, int]:
            if index % 2:
                raise ValueError("odd")
            return {"number": index}

    whole = sources.dataset(Odd(), id="odd")
    part = whole.split(0.5, seed=1)[0].take(20)
    assert isinstance(part, sources.Subset)
    assert part.source is whole
    bad = next(i for i in range(len(part)) if part.indices[i] % 2 and part.indices[i] != i)
    with pytest.raises(SampleError) as caught:
        part[bad]
    assert caught.value.index == bad
    assert caught.value.where == part.where(bad) == f"Odd[{part.indices[bad]}]"
    assert "odd" in caught.value.reason
    assert isinstance(caught.value.__cause__, ValueError)


def test_identities_are_json_and_tell_parts_apart() -> None:
    one, two = numbers(50).split(0.5, seed=0)
    same = numbers(50).split(0.5, seed=0)[0]
    assert one.identity() == same.identity() == json.loads(json.dumps(one.identity()))
    assert len({json.dumps(s.identity()) for s in (one, two, numbers(50), numbers(50).take(25))}) == 4


def test_records_are_reached_by_integers_within_range() -> None:
    source = numbers(5)
    assert source[np.int64(3)]["number"] == source[-2]["number"] == 3
    for index in (5, -6):
        with pytest.raises(IndexError, match="of a source of 5"):
            source[index]
    with pytest.raises(TypeError):
        source["3"]  # type: ignore[index]
    assert [int(record["number"]) for record in source] == list(range(5))


def test_a_part_pickles() -> None:
    part = numbers(50).split(0.3, seed=4)[1]
    assert all_of(pickle.loads(cloudpickle.dumps(part))) == all_of(part)


def test_a_source_says_what_it_is() -> None:
    assert repr(numbers(5)) == "arrays(5 records)"
    assert repr(numbers(5).take(2)) == "2 of arrays(5 records)"
