"""Allocation of widths and flotillas: what holds for any members and any room."""

from __future__ import annotations

import dataclasses
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from schedule_cases import rated

from ensemble.schedule.flotilla.allocate import allocate
from ensemble.schedule.flotilla.initial import fits_on_nodes
from ensemble.schedule.flotilla.model import Allocation, Capacity, RatedMember, interpolate_rate, make_problem
from ensemble.schedule.flotilla.timeline import TimelineBuilder

SAMPLES = 1000
EFFORT = 2000  # of the search: what holds, holds after any of it


@st.composite
def members(draw: st.DrawFn) -> list[RatedMember]:
    out = []
    for number in range(draw(st.integers(1, 8))):
        first = draw(st.sampled_from([100.0, 150.0, 400.0, 1000.0]))
        measured = {1: first}
        for width in (2, 4):
            measured[width] = measured[width // 2] * draw(st.sampled_from([0.9, 1.3, 1.8, 2.0]))
        epochs, workers = draw(st.sampled_from([1, 2, 5])), draw(st.sampled_from([None, None, None, 1, 2]))
        out.append(RatedMember(member=f"member-{number}", samples_per_s=measured, epochs=epochs, workers=workers))
    return out


memory_increases = st.builds(
    Capacity,
    slots=st.lists(st.integers(2, 4), min_size=1, max_size=3).map(tuple),
    streams=st.integers(1, 4),
    prep_samples_per_s=st.sampled_from([float("inf"), 500.0]),
)


@given(members(), memory_increases)
def test_every_member_is_in_one_flotilla_as_wide_as_fits(listed: list[RatedMember], capacity: Capacity) -> None:
    allocation = allocate(listed, capacity, SAMPLES, effort=EFFORT)
    placed = [member for flotilla in allocation.flotillas for member in flotilla.members]
    assert sorted(placed) == sorted(each.member for each in listed)
    for each in listed:
        width = allocation.workers[each.member]
        assert 1 <= width <= max(capacity.slots)
        assert each.workers in (None, width)
    assert allocation.makespan_s >= allocation.lower_bound_s * (1 - 1e-9)
    assert allocation.makespan_s == pytest.approx(max(f.end_s for f in allocation.flotillas))
    by_name = {each.member: each for each in listed}
    for flotilla in allocation.flotillas:
        alike: dict[tuple[object, ...], set[int]] = {}
        for member, width in zip(flotilla.members, flotilla.workers, strict=True):
            one = by_name[member]
            key = (*sorted(one.samples_per_s.items()), one.epochs, one.workers)
            alike.setdefault(key, set()).add(width)
        assert all(len(widths) == 1 for widths in alike.values())  # equal members that start together are as wide
        assert flotilla.slots <= sum(capacity.slots)
        assert fits_on_nodes(capacity.slots, np.array(flotilla.workers))


@given(members(), memory_increases, st.randoms(use_true_random=False))
def test_neither_the_order_given_nor_the_unit_of_rates_changes_a_decision(
    listed: list[RatedMember], capacity: Capacity, rng: random.Random
) -> None:
    def decisions(allocation: Allocation) -> list[tuple[tuple[str, ...], tuple[int, ...]]]:
        return [(flotilla.members, flotilla.workers) for flotilla in allocation.flotillas]

    first = allocate(listed, capacity, SAMPLES, effort=EFFORT)
    shuffled = rng.sample(listed, len(listed))
    assert allocate(shuffled, capacity, SAMPLES, effort=EFFORT) == first
    scaled = [
        dataclasses.replace(m, samples_per_s={w: 3.7 * r for w, r in m.samples_per_s.items()}) for m in listed
    ]
    faster = dataclasses.replace(capacity, prep_samples_per_s=3.7 * capacity.prep_samples_per_s)
    assert decisions(allocate(scaled, faster, SAMPLES, effort=EFFORT)) == decisions(first)


@given(st.lists(st.integers(1, 8), min_size=1, max_size=5), st.lists(st.integers(1, 8), min_size=1, max_size=8))
def test_what_packs_by_counting_is_what_the_timeline_starts_at_once(slots: list[int], widths: list[int]) -> None:
    widths = [min(width, max(slots)) for width in widths]
    listed = [
        RatedMember(member=f"m{i}", samples_per_s={1: 1.0}, epochs=1, workers=w) for i, w in enumerate(widths)
    ]
    problem = make_problem(listed, Capacity(slots=tuple(slots)), SAMPLES)
    number = {name: i for i, name in enumerate(problem.names)}
    ordered = [widths[int(name[1:])] for name in problem.names]
    timeline = TimelineBuilder(problem).build([list(number.values())], ordered)
    assert fits_on_nodes(tuple(slots), np.array(widths)) == (timeline.starts == [0.0])


def test_many_members_are_planned_without_a_search() -> None:
    rng = random.Random(3)
    listed = [rated(rng, number, 8, rng.choice([5, 10, 20])) for number in range(600)]
    capacity = Capacity(slots=(8,) * 50, streams=4)
    allocation = allocate(listed, capacity, SAMPLES)
    assert sorted(allocation.workers) == sorted(each.member for each in listed)
    # against members of one width that share as they come, as many at a time as a quarter of the slots holds
    problem = make_problem(listed, capacity, SAMPLES)
    number = {name: i for i, name in enumerate(problem.names)}
    come = [number[each.member] for each in listed]
    equal = TimelineBuilder(problem).build([come[k : k + 100] for k in range(0, 600, 100)], [1] * 600)
    assert allocation.makespan_s < 0.75 * equal.makespan * problem.unit_s
    # nobody waits for others where each may have a stream
    apart = allocate(listed, dataclasses.replace(capacity, streams=600), SAMPLES)
    assert apart.makespan_s < 1.1 * apart.lower_bound_s


def test_a_rate_is_interpolated_carefully() -> None:
    measured = {1: 100.0, 2: 180.0, 4: 300.0}
    assert [interpolate_rate(measured, width) for width in (2, 3)] == [180.0, 240.0]
    assert 300.0 < interpolate_rate(measured, 6) < 400.0
    assert interpolate_rate(measured, 16) == interpolate_rate(measured, 8)
    for few, width, rate in (
        *(({1: 100.0}, 4, 100.0), ({2: 100.0}, 1, 50.0)),  # nothing is known of how it scales
        *(({1: 100.0, 2: 90.0}, 4, 90.0), ({1: 100.0, 4: 500.0}, 2, 200.0)),  # never more than linear
    ):
        assert interpolate_rate(few, width) == rate


def test_of_members_that_are_alike_the_first_go_first() -> None:
    members = [RatedMember(member=f"member-{n}", samples_per_s={1: 10.0}, epochs=2) for n in range(12)]
    plan = allocate(members, Capacity(slots=(4,)), 100)
    order = [int(name.split("-")[1]) for each in plan.flotillas for name in each.members]
    assert order == sorted(order)
