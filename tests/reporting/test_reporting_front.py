"""The Pareto front of a search with two objectives: who is on it, and where it is shown."""

from __future__ import annotations

from typing import Any

import pytest
import run_events as runs
from event_dicts import collect_notices, fold, ledger, project
from hypothesis import example, given
from hypothesis import strategies as st

from ensemble.reporting.ranking import front_members, pareto_front
from ensemble.reporting.sections.training import summarize_search
from ensemble.reporting.summary import summary_lines

Event = dict[str, Any]
SMALL = st.one_of(st.integers(0, 4).map(float), st.floats(-1e3, 1e3))


@given(st.lists(st.tuples(SMALL, SMALL), max_size=30))
@example([(1.0, 1.0), (1.0, 1.0), (1.0, 0.0), (0.0, 2.0), (2.0, 0.0)])
def test_the_front_is_what_no_other_point_dominates(points: list[tuple[float, float]]) -> None:
    def dominates(a: tuple[float, float], b: tuple[float, float]) -> bool:
        return a[0] <= b[0] and a[1] <= b[1] and a != b

    expected = [i for i, point in enumerate(points) if not any(dominates(other, point) for other in points)]
    front = pareto_front(points)
    assert sorted(front) == expected
    assert [points[i] for i in front] == sorted(points[i] for i in front)


def minimizing(second: str | None = "energy_j", origin: str = "estimated") -> list[Event]:
    """A search in which each second finished trial costs more than the one before."""
    events, finished = [], 0
    for event in runs.search_run():
        events.append(event | {"second_objective": second} if event["type"] == "run_started" else event)
        if event["type"] == "finished":
            figures = {
                "energy_j": 100.0 * (1 + finished % 3),
                "energy_origin": origin,
                "cpu_s": 7.5 * (1 + finished),
            }
            events.append({**event, "type": "cost", "metrics": None, **figures})
            finished += 1
    return events


@pytest.mark.parametrize("direction", ["max", "min"])
def test_the_front_s_members_are_beaten_by_none_and_the_others_by_one_of_them(direction: str) -> None:
    events = minimizing("cpu_s")
    state = fold([events[0] | {"direction": direction}, *events[1:]])
    sign = 1 if direction == "min" else -1
    judged = {m.id: (m.cost.cpu_s, sign * m.metrics["accuracy"]) for m in state.members.values() if m.cost}
    front = [member.id for member in front_members(state)]
    assert len(judged) > 3 and 0 < len(front) < len(judged)
    assert [judged[member][0] for member in front] == sorted(judged[member][0] for member in front)
    for member, (cost, loss) in judged.items():
        beaten = any(judged[f][0] <= cost and judged[f][1] <= loss and judged[f] != (cost, loss) for f in front)
        assert beaten == (member not in front)
    assert front_members(fold(minimizing(None))) == []


@pytest.mark.parametrize("origin", ["estimated", "attributed"])
def test_the_summary_shows_the_front_and_the_notices_say_what_an_estimated_joule_is(origin: str) -> None:
    events = minimizing(origin=origin)
    words = "an estimated joule is a weighted CPU-second"
    assert len([each for each in collect_notices(events) if words in each.text]) == (origin == "estimated")
    lines = dict(summary_lines(project(events)))
    front = front_members(fold(events))
    names = ", ".join(f"{member.id} {member.cost.energy_j:.0f} J" for member in front if member.cost)
    assert lines["Pareto front"] == f"{names} (accuracy and joules, {origin})"
    (line,) = summarize_search(fold(minimizing("cpu_s")), ledger(events))
    assert line[1].startswith(f"{front_members(fold(minimizing('cpu_s')))[0].id} 7.5 s, ")


def test_a_search_with_one_objective_has_no_front() -> None:
    events = runs.search_run()
    assert "Pareto front" not in dict(summary_lines(project(events)))
