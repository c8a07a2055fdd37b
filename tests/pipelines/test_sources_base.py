"""What every source offers: records by index, split, take, identity; and the errors of samples."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelines import sources
from pipelines.errors import PipelineError, SampleError


def numbers(n: int) -> sources.Source:
    return sources.arrays(number=np.arange(n))


def all_of(source: sources.Source) -> list[int]:
    return [int(source[i]["number"]) for i in range(len(source))]


def test_a_sample_error_survives_pickling_and_says_index_file_and_reason() -> None:
    error = pickle.loads(pickle.dumps(SampleError(17, "photos/a.tar:n01440764.jpg", "cannot decode JPEG: no")))
    assert str(error) == "sample 17 (photos/a.tar:n01440764.jpg): cannot decode JPEG: no"
    assert (error.index, error.where, error.reason) == (17, "photos/a.tar:n01440764.jpg", "cannot decode JPEG: no")
    assert isinstance(error, PipelineError)


@given(n=st.integers(1, 50), data=st.data())
def test_take_keeps_the_first_records(n: int, data: st.DataObject) -> None:
    k = data.draw(st.integers(1, n))
    assert all_of(numbers(n).take(k)) == list(range(k))


@pytest.mark.parametrize("n", [0, -1, 11])
def test_take_refuses_what_is_not_there(n: int) -> None:
    with pytest.raises(PipelineError, match=r"take\(.*\) of a source of 10 records"):
        numbers(10).take(n)


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


def test_records_are_reached_by_integers_within_range() -> None:
    source = numbers(5)
    assert source[np.int64(3)]["number"] == source[-2]["number"] == 3
    for index in (5, -6):
        with pytest.raises(IndexError, match="of a source of 5"):
            source[index]
    with pytest.raises(TypeError):
        source["3"]  # type: ignore[index]
    assert [int(record["number"]) for record in source] == list(range(5))


def test_a_source_says_what_it_is() -> None:
    assert repr(numbers(5)) == "arrays(5 records)"
    assert repr(numbers(5).take(2)) == "2 of arrays(5 records)"
