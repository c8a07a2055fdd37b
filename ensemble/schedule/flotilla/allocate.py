"""Widths and flotillas for the members that wait."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from ensemble.schedule.flotilla.model import Allocation, Busy, Flotilla, RatedMember, Room
from ensemble.schedule.flotilla.plans import Plan, by_length, in_waves, limits
from ensemble.schedule.flotilla.problem import Problem, make_problem
from ensemble.schedule.flotilla.timeline import Clock, Timeline


def allocate(members: Sequence[RatedMember], room: Room, samples: int, busy: Sequence[Busy] = ()) -> Allocation:
    """Widths and an ordered list of flotillas such that the last member ends as soon as possible.

    Args:
        members: that wait; those with `workers` keep them.
        room: nodes, streams and what these can prepare.
        samples: of one epoch.
        busy: what running members hold, and for how long.

    Raises:
        ValueError: a member is wider than any node, or two have the same id.
    """
    if samples < 1:
        raise ValueError(f"samples={samples}; an epoch has at least one")
    problem = make_problem(members, room, samples, busy)
    if not members:
        until = max((each.until_s for each in busy), default=0.0)
        return Allocation(flotillas=(), makespan_s=until, lower_bound_s=until)
    clock = Clock(problem)
    best: tuple[float, Plan, Timeline] | None = None
    for plan in _beginnings(problem):
        timeline = clock.timeline(plan.flotillas, plan.widths)
        if math.isfinite(timeline.makespan) and (best is None or timeline.makespan < best[0]):
            best = (timeline.makespan, plan, timeline)
    assert best is not None  # a flotilla of one member fits into the empty room, and `in_waves` goes down to that
    return _allocation(problem, best[1], best[2])


def _beginnings(problem: Problem) -> Iterator[Plan]:
    order = np.arange(len(problem.names))
    yield in_waves(problem, order)
    for limit in limits(problem):
        yield by_length(problem, float(limit))


def _allocation(problem: Problem, plan: Plan, timeline: Timeline) -> Allocation:
    second = problem.second
    flotillas = []
    for members, start in zip(plan.flotillas, timeline.starts, strict=True):
        pace = {i: float(problem.times[i, plan.widths[i]]) for i in members}
        ordered = sorted(members, key=lambda i: (-pace[i], i))
        flotillas.append(
            Flotilla(
                members=tuple(problem.names[i] for i in ordered),
                workers=tuple(plan.widths[i] for i in ordered),
                start_s=start * second,
                end_s=max(timeline.ends[i] for i in members) * second,
                samples_per_s=problem.samples / (max(pace.values()) * second),
            )
        )
    return Allocation(
        flotillas=tuple(flotillas),
        makespan_s=timeline.makespan * second,
        lower_bound_s=problem.lower_bound() * second,
    )
