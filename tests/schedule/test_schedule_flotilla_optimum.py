"""How far the plans are from the best of all plans of the same model, of few members, of which all are tried."""

from __future__ import annotations

import itertools
import random
import statistics
from collections.abc import Iterator, Sequence

from schedule_cases import rated

from ensemble.schedule.flotilla.allocate import allocate
from ensemble.schedule.flotilla.model import Capacity, Problem, RatedMember, make_problem
from ensemble.schedule.flotilla.timeline import TimelineBuilder

SAMPLES = 50_000


def instance(seed: int) -> tuple[list[RatedMember], Capacity]:
    """3 or 4 members on 3 to 5 slots of one node, or on two nodes of 2 or 3: half with equal epochs."""
    rng = random.Random(seed)
    count, nodes = rng.randint(3, 4), rng.choice([1, 1, 2])
    slots = (rng.randint(3, 5),) if nodes == 1 else (rng.randint(2, 3),) * 2
    even, streams = rng.random() < 0.5, rng.choice([1, 2, count])
    listed = [
        rated(rng, number, max(slots), 10 if even else rng.choice([5, 10, 20]), fixed=rng.random() < 0.125)
        for number in range(count)
    ]
    return listed, Capacity(slots=slots, streams=streams)


def list_plans(members: Sequence[int]) -> Iterator[list[tuple[int, ...]]]:
    if not members:
        yield []
    for size in range(1, len(members) + 1):
        for first in itertools.combinations(members, size):
            for rest in list_plans([each for each in members if each not in first]):
                yield [first, *rest]


def find_least_makespan(problem: Problem) -> float:
    """The optimum, in the problem's unit: the best of all plans with all widths."""
    build, times = TimelineBuilder(problem).build, problem.times
    members = range(len(problem.names))
    faster = [[w for w in range(1, times.shape[1]) if times[i, w] < times[i, w - 1]] for i in members]
    return min(
        build(flotillas, widths).makespan
        for widths in itertools.product(*faster)
        for flotillas in list_plans(members)
        if all(sum(widths[i] for i in each) <= problem.slots for each in flotillas)
    )


def test_plans_of_three_or_four_members_are_near_the_optimum() -> None:
    over = []
    for seed in range(1000, 1010):
        members, capacity = instance(seed)
        problem = make_problem(members, capacity, SAMPLES)
        ours_s = allocate(members, capacity, SAMPLES, effort=20_000).makespan_s
        over.append(ours_s / problem.unit_s / find_least_makespan(problem) - 1)
        assert over[-1] > -1e-9, f"seed {seed}: nothing is below the optimum"
    assert statistics.median(over) < 1e-6 and statistics.mean(over) < 0.005 and max(over) < 0.05
