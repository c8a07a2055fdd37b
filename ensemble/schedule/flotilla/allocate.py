"""Chooses widths and flotillas for the waiting members, and revises that plan as observed rates change."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ensemble.schedule.flotilla.initial import FlotillaPlan, generate_initial_plans, plan_one_flotilla
from ensemble.schedule.flotilla.local_search import anneal, simplify
from ensemble.schedule.flotilla.model import (
    Allocation,
    Capacity,
    Cohort,
    Flotilla,
    HeldSlots,
    Problem,
    RatedMember,
    make_problem,
)
from ensemble.schedule.flotilla.timeline import Timeline, TimelineBuilder, estimate_ends

SEARCHED = 200  # with more members, the best initial plan is taken without a local search
SHARED = 0.01  # share of the makespan that a single stream for all may cost
KEPT = 8  # initial plans of many members whose timelines are computed


def allocate(
    members: Sequence[RatedMember],
    capacity: Capacity,
    samples: int,
    busy: Sequence[HeldSlots] = (),
    effort: int = 20_000,
) -> Allocation:
    """Choose widths and an ordered list of flotillas such that the last member ends as soon as possible.

    Args:
        members: the waiting members; those with `workers` keep them.
        capacity: the nodes and streams.
        samples: of one epoch.
        busy: slots that running members hold, and for how long.
        effort: of the local search: evaluated plans times members, and at least `effort` / 80 plans.
    """
    problem = make_problem(members, capacity, samples, busy)
    if not members:
        until = max((slots.until_s for slots in busy), default=0.0)
        return Allocation(flotillas=(), makespan_s=until, lower_bound_s=until)
    clock = TimelineBuilder(problem)
    plan = _choose_initial_plan(problem, clock)
    if 1 < len(members) <= SEARCHED:
        plan = anneal(problem, clock, plan, max(effort // len(members), effort // 80))
        plan = _prefer_one_flotilla(problem, clock, simplify(problem, clock, plan))
    return _make_allocation(problem, plan, clock.build(plan.flotillas, plan.widths))


def _prefer_one_flotilla(problem: Problem, clock: TimelineBuilder, plan: FlotillaPlan) -> FlotillaPlan:
    """Take a single flotilla, which prepares each sample once, if it lengthens the run by at most `SHARED`."""
    one = plan_one_flotilla(problem)
    if len(one.flotillas) > 1 or len(plan.flotillas) == 1:
        return plan
    one = simplify(problem, clock, one)
    limit = (1 + SHARED) * clock.build(plan.flotillas, plan.widths).makespan
    return one if clock.build(one.flotillas, one.widths).makespan <= limit else plan


def reevaluate(
    plan: Allocation,
    members: Sequence[RatedMember],
    capacity: Capacity,
    samples: int,
    busy: Sequence[HeldSlots] = (),
) -> Allocation | None:
    """Compute the timeline of an earlier plan with the present rates.

    Args:
        members: those that still wait; others are removed from the plan.

    Returns:
        The plan with new times; None where it lacks a member, or has another width for one.
    """
    problem = make_problem(members, capacity, samples, busy)
    number = {name: i for i, name in enumerate(problem.names)}
    fixed = {flotilla.member: flotilla.workers for flotilla in members}
    if any(plan.workers.get(name) != (width or plan.workers.get(name, -1)) for name, width in fixed.items()):
        return None
    flotillas = [tuple(number[name] for name in flotilla.members if name in number) for flotilla in plan.flotillas]
    kept = FlotillaPlan(
        tuple(flotilla for flotilla in flotillas if flotilla), tuple(plan.workers[name] for name in problem.names)
    )
    timeline = TimelineBuilder(problem).build(kept.flotillas, kept.widths)
    return _make_allocation(problem, kept, timeline) if math.isfinite(timeline.makespan) else None


def _choose_initial_plan(problem: Problem, clock: TimelineBuilder) -> FlotillaPlan:
    plans = list(generate_initial_plans(problem))
    if len(problem.names) > SEARCHED:
        estimates = [clock.estimate_makespan(plan.flotillas, plan.widths) for plan in plans]
        # the first plan always fits; others may have a flotilla that does not fit on the nodes
        plans = [
            plans[0],
            *(plans[k] for k in sorted(range(1, len(plans)), key=lambda k: (estimates[k], k))[:KEPT]),
        ]
    makespans = [clock.build(plan.flotillas, plan.widths).makespan for plan in plans]
    return plans[min(range(len(plans)), key=lambda k: (makespans[k], len(plans[k].flotillas), k))]


def _make_allocation(problem: Problem, plan: FlotillaPlan, timeline: Timeline) -> Allocation:
    unit_s, named = problem.unit_s, _assign_names(problem, plan)
    flotillas = []
    for members, start in zip(plan.flotillas, timeline.starts, strict=True):
        pace = {i: float(problem.times[i, plan.widths[i]]) for i in members}
        ordered = sorted(members, key=lambda i: (-pace[i], i))
        flotillas.append(
            Flotilla(
                members=tuple(named[i] for i in ordered),
                workers=tuple(plan.widths[i] for i in ordered),
                start_s=start * unit_s,
                end_s=max(timeline.ends[i] for i in members) * unit_s,
                samples_per_s=problem.samples / (max(pace.values()) * unit_s),
            )
        )
    return Allocation(
        flotillas=tuple(flotillas),
        makespan_s=timeline.makespan * unit_s,
        lower_bound_s=problem.lower_bound * unit_s,
    )


def _assign_names(problem: Problem, plan: FlotillaPlan) -> dict[int, str]:
    """Assign ids to the members of a plan: among equal members those with the first ids start first."""
    alike: dict[tuple[bytes, int, int], list[int]] = {}
    for i in (i for members in plan.flotillas for i in members):
        alike.setdefault((problem.times[i].tobytes(), int(problem.epochs[i]), plan.widths[i]), []).append(i)
    named: dict[int, str] = {}
    for group in alike.values():
        names = sorted((problem.names[i] for i in group), key=lambda name: (len(name), name))
        named |= dict(zip(group, names, strict=True))
    return named


GAIN = 0.02  # share of the makespan that a new plan must save over the previous one
REVISE_EFFORT = 4_000  # `effort` of `revise`


def revise(
    waiting: Sequence[RatedMember],
    cohorts: Sequence[Cohort],
    capacity: Capacity,
    samples: int,
    previous: Allocation | None = None,
    effort: int = REVISE_EFFORT,
) -> Allocation:
    """Revise the plan for the waiting members; running ones keep their widths.

    The previous plan is kept, with new times, unless it lacks a waiting member or another plan saves `GAIN`.

    Args:
        waiting: the waiting members.
        cohorts: the running members, with observed rates.
        capacity, samples, effort: see `allocate`.
        previous: the plan so far; members that wait no longer are removed from it.
    """
    until = estimate_ends(cohorts, capacity, samples)
    busy = [
        HeldSlots(
            member.node, member.workers or 1, until[member.member], None if cohort.private else cohort.number
        )
        for cohort in cohorts
        for member in cohort.members
    ]
    new = allocate(waiting, capacity, samples, busy, effort)
    old = None if previous is None else reevaluate(previous, waiting, capacity, samples, busy)
    return old if old is not None and new.makespan_s > old.makespan_s * (1 - GAIN) else new
