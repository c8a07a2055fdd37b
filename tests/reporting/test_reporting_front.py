"""The Pareto front of a search with several objectives: who is on it, and where it is shown."""

from __future__ import annotations

import time
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from kit import run_events as runs
from kit.event_dicts import collect_notices, fold, ledger, project

from ensemble.reporting import text
from ensemble.reporting.ranking import front_members, pareto_front
from ensemble.reporting.sections.training import summarize_search
from ensemble.reporting.summary import summary_lines

Event = dict[str, Any]
SMALL = st.one_of(st.integers(0, 4).map(float), st.floats(-1e3, 1e3))
POINTS = st.integers(1, 4).flatmap(lambda many: st.lists(st.tuples(*[SMALL] * many), max_size=30))


def dominates(a: tuple[float, ...], b: tuple[float, ...]) -> bool:
    return a != b and all(x <= y for x, y in zip(a, b, strict=True))


@given(POINTS)
@example([(1.0, 1.0), (1.0, 1.0), (1.0, 0.0), (0.0, 2.0), (2.0, 0.0)])
@example([(0.0, 1.0, 1.0), (0.0, 1.0, 0.0), (1.0, 0.0, 1.0), (0.0, 1.0, 0.0)])
def test_the_front_is_what_no_other_point_dominates(points: list[tuple[float, ...]]) -> None:
    front = pareto_front(points)
    assert sorted(front) == [i for i, point in enumerate(points) if not any(dominates(o, point) for o in points)]
    assert [points[i] for i in front] == sorted(points[i] for i in front)


@pytest.mark.parametrize("origin", ["estimated", "attributed"])
def test_the_summary_shows_the_front_and_the_notices_say_what_an_estimated_joule_is(origin: str) -> None:
    events = runs.minimizing("energy_j", origin=origin)
    said = [each for each in collect_notices(events) if text.ESTIMATED in each.text]
    assert len(said) == (origin == "estimated")
    lines = dict(summary_lines(project(events)))
    front = front_members(fold(events))
    names = ", ".join(f"{member.id} {member.cost.energy_j:.0f} J" for member in front if member.cost)
    assert lines["Pareto front"] == f"{names} (accuracy and joules, {origin})"
    (line,) = summarize_search(fold(runs.minimizing("cpu_s")), ledger(events))
    assert line[1].startswith(f"{front_members(fold(runs.minimizing('cpu_s')))[0].id} 7.5 s, ")


@pytest.mark.parametrize("direction", ["max", "min"])
def test_a_front_of_three_objectives_names_both_and_nobody_who_violates_a_constraint(direction: str) -> None:
    events = runs.minimizing("cpu_s", "speed")
    events[0] |= {"direction": direction}
    state, sign = fold(events), 1 if direction == "min" else -1
    trials = [(trial, trial.metrics, trial.cost) for trial in state.members.values() if trial.cost]
    judged = {trial.id: (-of["speed"], cost.cpu_s, sign * of["accuracy"]) for trial, of, cost in trials}
    front = [member.id for member in front_members(state)]
    dominated = [one for one, a in judged.items() if any(dominates(b, a) for b in judged.values())]
    assert set(front) == {*judged} - {*dominated} and 1 < len(front) < len(judged)
    assert [judged[member] for member in front] == sorted(judged[member] for member in front)
    (line,) = summarize_search(state, ledger(events))
    assert line[1].endswith("(accuracy, CPU-seconds and speed)") and line[1].startswith(f"{front[0]} ")
    best, narrow = {"type": "finished", "member": front[0]}, {"constraints": {"narrow": 0.5}}
    violated = [event | narrow if event.items() >= best.items() else event for event in events]
    assert front[0] not in [member.id for member in front_members(fold(violated))]
    assert front_members(fold(runs.minimizing())) == []


def test_a_front_of_ten_thousand_trials_is_found_in_a_moment() -> None:
    points = [(float(i), float(-i), float(i % 7)) for i in range(10_000)]
    began = time.process_time()
    assert len(pareto_front(points)) == len(points)
    assert time.process_time() - began < 10
