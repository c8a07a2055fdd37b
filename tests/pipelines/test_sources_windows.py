"""Windows over series: which steps they have, that none goes across series, what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelines import Pipeline, PipelineError, sources
from pipelines.errors import SampleError


def table(n: int, **more: Any) -> Any:
    return sources.arrays(load=np.arange(n, dtype=np.float64), heat=10 * np.arange(n), **more)


@given(n=st.integers(2, 40), length=st.integers(1, 6), horizon=st.integers(1, 4), stride=st.integers(1, 5))
def test_each_window_has_its_steps_and_those_that_follow(n: int, length: int, horizon: int, stride: int) -> None:
    if n < length + horizon:
        with pytest.raises(PipelineError, match="no series has"):
            sources.windows(table(n), length, horizon, stride=stride, inputs=["load"], target="load")
        return
    made = sources.windows(table(n), length, horizon, stride=stride, inputs=["load", "heat"], target="load")
    assert len(made) == (n - length - horizon) // stride + 1
    for index, record in enumerate(made):
        start = index * stride
        np.testing.assert_array_equal(record["x"][:, 0], np.arange(start, start + length))
        np.testing.assert_array_equal(record["x"][:, 1], 10 * record["x"][:, 0])
        np.testing.assert_array_equal(record["target"], np.arange(start + length, start + length + horizon))
        assert record["x"].dtype == record["target"].dtype == np.float32


def test_no_window_goes_across_series_which_lie_together() -> None:
    plant = np.array(["a"] * 5 + ["b"] * 2 + ["c"] * 4)
    made = sources.windows(table(11, plant=plant), 2, 1, inputs=["load"], target=["load", "heat"], series="plant")
    assert [int(record["x"][0, 0]) for record in made] == [0, 1, 2, 7, 8]
    assert made[0]["target"].tolist() == [[2.0, 20.0]]
    with pytest.raises(PipelineError, match="by 'plant', must lie together"):
        sources.windows(
            table(3, plant=np.array(["a", "b", "a"])), 1, inputs=["load"], target="load", series="plant"
        )


def test_a_missing_value_is_an_error_of_its_windows_alone() -> None:
    steps = sources.arrays(load=np.array([0.0, 1, 2, np.nan, 4, 5, 6, 7]))
    made = sources.windows(steps, 2, 1, inputs=["load"], target="load")
    with pytest.raises(SampleError, match=r"steps 1 to 3.*missing or infinite"):
        made[1]
    left = next(iter(Pipeline(made, shuffle=False, on_error="skip", max_skipped=0.9).loader(9, epochs=1)))
    assert left["index"].tolist() == [0, 4, 5]


def test_a_part_that_was_split_by_time_has_windows_of_its_own() -> None:
    early, late = table(20, hour=np.arange(20)).split(0.5, by="hour")
    last = sources.windows(early, 3, 2, inputs=["load"], target="load")[-1]
    first = sources.windows(late, 3, 2, inputs=["load"], target="load")[0]
    assert last["target"].tolist() == [8.0, 9.0] and first["x"][0, 0] == 10.0


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"length": 0}, "length must be"),
        ({"stride": 0}, "stride must be"),
        ({"inputs": ["nothing"]}, "'nothing'"),
        ({"target": "name"}, "the field 'name' does not hold one number"),
        ({"inputs": []}, "inputs must name each field"),
    ],
)
def test_what_has_no_windows_is_refused(options: dict[str, Any], said: str) -> None:
    given_ = {"length": 2, "horizon": 1, "inputs": ["load"], "target": "load", **options}
    with pytest.raises(PipelineError, match=said):
        sources.windows(table(9, name=np.array(["a"] * 9)), **given_)
