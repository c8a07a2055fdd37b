"""MLPerf HPC's figures of a run, held against spans that are known."""

from __future__ import annotations

from typing import Any

import pytest
from event_dicts import fold
from hypothesis import given
from hypothesis import strategies as st

from ensemble.reporting.sections.time_to_solution import measure_instances, measure_time_to_solution, summarize


def a_run(spans: dict[str, tuple[float, float]], cpus: float = 2.0) -> list[dict[str, Any]]:
    """The events of members that trained from one second to another, each on one core."""
    events: list[dict[str, Any]] = [
        {"v": 2, "t": 0.0, "type": "run_started", "name": "n", "run_id": "r"},
        {"v": 2, "t": 0.0, "type": "node", "node": "a", "cpus": cpus, "gpus": []},
    ]
    for number, (member, (start, stop)) in enumerate(spans.items()):
        about = {"v": 2, "member": member, "attempt": 0}
        declared = {"number": number, "params": {}, "cpus_per_worker": 1.0}
        events += [
            about | declared | {"t": 0.0, "type": "member"},
            about | {"t": start, "type": "placed", "node": "a", "devices": [None], "cohort": 0},
            about | {"t": stop, "type": "finished", "epoch": 0, "metrics": {}},
        ]
    return events


def test_the_figures_are_those_of_first_start_last_stop_and_the_median() -> None:
    found = measure_time_to_solution(fold(a_run({"member-0": (1, 11), "member-1": (1, 13), "member-2": (11, 31)})))
    assert found is not None
    assert (found.models, found.ttta_s, found.median_s) == (3, 30.0, 12.0)
    assert found.per_minute == pytest.approx(6.0) and found.over_median == pytest.approx(2.5)
    assert found.held == pytest.approx((10 + 12 + 20) / (30 * 2))


def test_the_line_says_them_and_is_left_out_where_nothing_is_done() -> None:
    events = a_run({"member-0": (0, 30), "member-1": (0, 30)})
    assert summarize(fold(events)) == [
        (
            "models",
            "2 models in 30 s, 4.0 a minute; the median one took 30 s; 100% of the cores, or GPUs, were reserved "
            "meanwhile",
        )
    ]
    assert summarize(fold(events[:-2]))[0][1].startswith("1 model in 30 s")
    assert summarize(fold(events[:2])) == []


def test_a_resumed_run_has_none_since_hours_may_lie_between() -> None:
    events = a_run({"member-0": (0, 30)})
    assert measure_time_to_solution(fold([*events, events[0] | {"t": 90.0}])) is None


@given(st.lists(st.tuples(st.floats(0, 1e6), st.floats(1e-3, 1e6)), min_size=1, max_size=20))
def test_all_take_at_least_as_long_as_the_median_one(begun: list[tuple[float, float]]) -> None:
    found = measure_instances((start, start + lasted) for start, lasted in begun)
    assert found is None or found.over_median >= 1 - 1e-9
