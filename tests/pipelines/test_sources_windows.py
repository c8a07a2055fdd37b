"""Windows over series: which steps they have, that none goes across series, what is refused."""

from __future__ import annotations

import pickle
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelines import Pipeline, PipelineError, SampleError, sources, stages


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
        assert record["x"].dtype == record["target"].dtype == np.float64


def test_no_window_goes_across_series_which_lie_together() -> None:
    plant = np.array(["a"] * 5 + ["b"] * 2 + ["c"] * 4)
    made = sources.windows(table(11, plant=plant), 2, 1, inputs=["load"], target=["load", "heat"], series="plant")
    assert [int(record["x"][0, 0]) for record in made] == [0, 1, 2, 7, 8]
    assert made[0]["target"].tolist() == [[2.0, 20.0]]


def test_a_missing_value_is_an_error_of_its_windows_alone() -> None:
    steps = sources.arrays(load=np.array([0.0, 1, 2, np.nan, 4, 5, 6, 7]))
    made = sources.windows(steps, 2, 1, inputs=["load"], target="load")
    left = next(iter(Pipeline(made, shuffle=False, on_error="skip", max_skipped=0.9).loader(9, epochs=1)))
    assert left["index"].tolist() == [0, 4, 5]


def forecast(steps: Any, **more: Any) -> Any:
    return sources.windows(steps, 4, 2, inputs=["load"], target="load", **more)


def test_windows_are_divided_by_series_or_where_they_have_no_steps_in_common() -> None:
    assert len(forecast(table(80), stride=6).split(0.8)[0]) == 10
    plant = np.repeat(["a", "b", "c", "d"], 20)
    made = forecast(table(80, plant=plant), series="plant")
    train, _ = made.split(0.75, group=np.repeat(np.arange(4), 15))
    assert len(train) == 45
    assert len(pickle.loads(pickle.dumps(made)).split(0.5)[0]) == 30, "where its steps are from goes to no process"


def hours(*parts: tuple[int, int]) -> Any:
    return np.concatenate([np.arange(*part) for part in parts])


DAYS = np.datetime64("2024-01-01") + hours((0, 120), (150, 270))


@pytest.mark.parametrize(
    ("times", "options", "said"),
    [
        (hours((0, 120), (150, 270)), {"time": "t"}, "from 119 to 150"),
        (DAYS, {}, "from 2024-04-29 to 2024-05-30"),
        (np.array([f"{day}T00:00" for day in DAYS]), {}, "from 2024-04-29T00:00"),
        (hours((0, 120), (0, 120)), {"time": "t", "series": "plant"}, None),
    ],
)
def test_no_window_goes_across_a_gap_in_time(times: Any, options: dict[str, Any], said: str | None) -> None:
    steps = table(240, t=times, plant=np.repeat([3, 4], 120))
    with warnings.catch_warnings() if said is None else pytest.warns(UserWarning, match=rf"1 gaps in 't'.*{said}"):
        made = forecast(steps, **options)
    assert len(made) == 230 and not any(record["x"][0] < 120 <= record["target"][-1] for record in made)


def test_a_field_that_counts_with_gaps_is_warned_of_unless_it_is_known_what_tells_the_time() -> None:
    steps = table(24, hour=hours((0, 10), (15, 29)))
    with pytest.warns(UserWarning, match=r"'hour' has gaps.*give time='hour', or gaps=False") as caught:
        assert len(forecast(steps)) == 19
    assert [Path(warning.filename).name for warning in caught] == [Path(__file__).name]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(forecast(steps, gaps=False)) == len(forecast(table(24, hour=hours((0, 24))))) == 19


def test_irregular_steps_working_days_and_months_have_no_gaps_unless_they_are_far_longer() -> None:
    def count(steps: Any, **options: Any) -> int:
        return len(forecast(table(240, t=steps[:240], weekday=np.arange(240) % 7), **options))

    events = np.random.default_rng(0).exponential(1000, 240).cumsum().astype(int)
    days = np.datetime64("2020-01-01") + np.arange(400)
    months = np.arange("2020-01", "2045-01", dtype="datetime64[M]").astype("datetime64[D]")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for times in (np.repeat(days, 24), np.repeat(days[:10], 24).astype(str), events):
            assert count(times, time=None) == 235
        assert count(events, time="t") == 235
        for times in (np.arange(600), days[np.is_busday(days)], months):  # which are as regular as time is
            assert count(times, time="t") == 235
    with pytest.warns(UserWarning, match="230 rows have the same 't'.*series="):
        assert count(np.repeat(days, 24), time="t") == 235
    late = events + 200_000 * (np.arange(240) >= 120)
    with pytest.warns(UserWarning, match="1 gaps in 't'.*unless gaps=False"):
        assert count(late, time="t") == 230
    assert count(late, time="t", gaps=False) == 235


def test_rows_that_a_split_left_out_are_a_gap_unless_it_was_by_time() -> None:
    early, late = table(20, hour=np.arange(20)).split(0.5, by="hour")
    assert forecast(early)[-1]["target"].tolist() == [8.0, 9.0] and forecast(late)[0]["x"][0] == 10.0
    early, _ = table(60).split(0.9, seed=3)
    with pytest.warns(UserWarning, match=r"gaps where the split of the table left rows out.*split the table"):
        made = sources.windows(early, 3, 1, inputs=["load"], target="load")
    assert all(record["target"][0] == record["x"][0, 0] + 3 for record in made)


def test_windows_keep_the_digits_of_their_columns_in_the_dtype_that_they_have() -> None:
    meter = 123_456_789 + np.arange(8)
    for values, dtype in ((meter, "int64"), (meter + 0.25, "float64"), (np.arange(8, dtype="f4"), "float32")):
        made = sources.windows(sources.arrays(load=values), 3, 1, inputs=["load"], target="load")
        assert made[1]["x"].dtype == made[1]["target"].dtype == dtype
        np.testing.assert_array_equal(made[1]["x"][:, 0], values[1:4])
        np.testing.assert_array_equal(made[1]["target"], values[4:5])
    first = next(iter(Pipeline(made, shuffle=False).loader(1)))
    assert first["x"].dtype.is_floating_point
    pipe = Pipeline(forecast(sources.arrays(load=meter))).map(stages.cast("x", "float32"))
    with pytest.raises(SampleError, match=r"'x' holds 12345\d+.*\.map\("):
        next(iter(pipe.loader(1)))
    less = Pipeline(forecast(sources.arrays(load=meter))).map(lambda x: x - 123_456_789, field="x")
    less = less.map(stages.cast("x", "float32"))
    assert sorted(next(iter(less.loader(9, epochs=1)))["x"][:, 0, 0].tolist()) == [0, 1, 2]


def test_columns_that_no_dtype_holds_together_are_refused_by_name() -> None:
    both = sources.arrays(meter=2**53 + np.arange(1, 9), load=np.arange(8.0))
    with pytest.raises(PipelineError, match=r"'meter' holds 9007199254740993"):
        sources.windows(both, 3, 1, inputs=["load", "meter"], target="load")


def test_series_shorter_than_a_window_are_warned_of_by_name() -> None:
    plant = np.array(["a"] * 5 + ["b"] * 2 + ["c"] * 4)
    with pytest.warns(UserWarning, match=r"1 of 3 series.*'plant' b") as caught:
        sources.windows(table(11, plant=plant), 2, 1, inputs=["load"], target="load", series="plant")
    assert [Path(warning.filename).name for warning in caught] == [Path(__file__).name]


def test_a_table_that_lies_backwards_is_said() -> None:
    with pytest.warns(UserWarning, match="'hour' falls.*sort the table"):
        forecast(table(24, hour=np.arange(24)[::-1]))
