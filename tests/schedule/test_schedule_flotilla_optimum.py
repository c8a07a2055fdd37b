"""How far the plans are from the exact optimum of the same model, on small instances."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

import pytest
from flotilla_exact import least_makespan
from flotilla_instances import SAMPLES, instance

from ensemble.schedule.flotilla import allocate
from ensemble.schedule.flotilla.problem import make_problem
from ensemble.schedule.flotilla.timeline import Clock


@dataclass(frozen=True)
class Gap:
    """Ours over the optimum, less one; that of the optimum's own plan on our timeline."""

    seed: int
    members: int
    over: float
    replayed: float


def gap(seed: int, most_members: int) -> Gap:
    members, room = instance(seed, most_members)
    ours = allocate(members, room, SAMPLES)
    problem = make_problem(members, room, SAMPLES)
    upper = ours.makespan_s / problem.second
    exact = least_makespan(problem, upper * (1 + 1e-6))
    assert exact.proven and exact.plan is not None, f"seed {seed}: no optimum within the time limit"
    replayed = Clock(problem).timeline(exact.plan.flotillas, exact.plan.widths).makespan
    return Gap(seed, len(members), upper / exact.makespan - 1, replayed / exact.makespan)


def agree(gaps: list[Gap]) -> None:
    """Both sides mean the same: nothing is below the optimum, and its plan takes as long as HiGHS says."""
    for each in gaps:
        assert each.over > -1e-5, each
        assert each.replayed == pytest.approx(1, abs=1e-5), each


def test_plans_of_three_or_four_members_are_within_two_percent_of_the_optimum() -> None:
    gaps = [gap(seed, most_members=4) for seed in range(1000, 1040)]
    agree(gaps)
    assert statistics.median(each.over for each in gaps) < 1e-6
    assert statistics.mean(each.over for each in gaps) < 0.005
    assert max(each.over for each in gaps) < 0.05


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_plans_of_200_small_instances_are_near_the_optimum() -> None:
    gaps = [gap(seed, most_members=6) for seed in range(200)]
    agree(gaps)
    assert statistics.median(each.over for each in gaps) < 0.02
    assert max(each.over for each in gaps) < 0.10
