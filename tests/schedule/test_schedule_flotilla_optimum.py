"""How far the plans are from the exact optimum of the same model, on small instances."""

from __future__ import annotations

import dataclasses
import statistics
from dataclasses import dataclass

import pytest
from flotilla_exact import least_makespan
from flotilla_instances import SAMPLES, instance

from ensemble.schedule.flotilla import allocate
from ensemble.schedule.flotilla.model import make_problem
from ensemble.schedule.flotilla.timeline import TimelineBuilder

EFFORT = 80_000  # of the search: about 0.2 CPU-seconds


@dataclass(frozen=True)
class Gap:
    """Ours over the optimum, less one; that of the optimum's own plan on our timeline.

    The optimum chooses the nodes of its members, the timeline takes the best fit in the order of the flotillas: so
    of those that start together the order is free.
    """

    seed: int
    members: int
    over: float
    replayed: float


def gap(seed: int, most_members: int, effort: int = EFFORT) -> Gap:
    members, capacity = instance(seed, most_members)
    ours = allocate(members, capacity, SAMPLES, effort=effort)
    problem = make_problem(members, capacity, SAMPLES)
    upper = ours.makespan_s / problem.unit_s
    exact = least_makespan(problem, upper * (1 + 1e-6))
    assert exact.proven and exact.plan is not None, f"seed {seed}: no optimum within the time limit"
    build, widths = TimelineBuilder(problem).build, exact.plan.widths
    replayed = min(build(order, widths).makespan for order in exact.list_orders())
    return Gap(seed, len(members), upper / exact.makespan - 1, replayed / exact.makespan)


def agree(gaps: list[Gap]) -> None:
    """Both sides mean the same: nothing is below the optimum, and its plan takes as long as HiGHS says."""
    for each in gaps:
        assert each.over > -1e-5, each
        assert each.replayed == pytest.approx(1, abs=1e-5), each


def test_plans_of_three_or_four_members_are_within_two_percent_of_the_optimum() -> None:
    gaps = [gap(seed, most_members=4, effort=20_000) for seed in range(1000, 1040)]
    agree(gaps)
    assert statistics.median(each.over for each in gaps) < 1e-6
    assert statistics.mean(each.over for each in gaps) < 0.005
    assert max(each.over for each in gaps) < 0.05


def test_more_slots_lengthen_a_plan_by_no_more_than_it_is_from_the_optimum() -> None:
    """The optimum never gets longer; a plan within g of it is at most 1 + g times that for fewer slots."""
    for seed in range(1100, 1120):
        members, capacity = instance(seed, most_members=4)
        more = dataclasses.replace(capacity, slots=(*capacity.slots, max(capacity.slots)))
        before, after = (allocate(members, each, SAMPLES, effort=10_000).makespan_s for each in (capacity, more))
        assert after <= 1.05 * before, f"seed {seed}: {before} s on {capacity.slots}, {after} s on {more.slots}"


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_plans_of_200_small_instances_are_near_the_optimum() -> None:
    """Measured: median 0.00 %, mean 0.05 %, worst 3.4 %; of 200 seven above 0.1 %, all of six members."""
    gaps = [gap(seed, most_members=6) for seed in range(200)]
    agree(gaps)
    assert statistics.median(each.over for each in gaps) < 0.02
    assert max(each.over for each in gaps) < 0.10
