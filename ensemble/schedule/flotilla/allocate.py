"""Widths and flotillas for the members that wait."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ensemble.schedule.flotilla.initial import Plan, all_at_once, beginnings
from ensemble.schedule.flotilla.local_search import anneal, tidy
from ensemble.schedule.flotilla.model import Allocation, Busy, Flotilla, RatedMember, Room
from ensemble.schedule.flotilla.problem import Problem, make_problem
from ensemble.schedule.flotilla.timeline import Clock, Timeline

SEARCHED = 200  # most members for which plans are searched; for more the best of those to begin with is taken
EFFORT = 80_000  # about 0.2 CPU-seconds
SHARED = 0.01  # of the run, that one stream for all may cost
KEPT = 8  # of these, how many are looked at closely


def allocate(
    members: Sequence[RatedMember], room: Room, samples: int, busy: Sequence[Busy] = (), effort: int = 20_000
) -> Allocation:
    """Widths and an ordered list of flotillas such that the last member ends as soon as possible.

    Args:
        members: that wait; those with `workers` keep them.
        room: nodes, streams and what these can prepare.
        samples: of one epoch.
        busy: what running members hold, and for how long.
        effort: of the search on few members: plans looked at, times members (but at least 1 in 80 of it as plans).

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
    plan = _best(problem, clock)
    if 1 < len(members) <= SEARCHED:
        plan = anneal(problem, clock, plan, max(effort // len(members), effort // 80))
        plan = _together(problem, clock, tidy(problem, clock, plan))
    return _allocation(problem, plan, clock.timeline(plan.flotillas, plan.widths))


def _together(problem: Problem, clock: Clock, plan: Plan) -> Plan:
    """All in one flotilla where that costs the run next to nothing: each sample is then prepared only once."""
    one = all_at_once(problem)
    if len(one.flotillas) > 1 or len(plan.flotillas) == 1:
        return plan
    one = tidy(problem, clock, one)
    limit = (1 + SHARED) * clock.timeline(plan.flotillas, plan.widths).makespan
    return one if clock.timeline(one.flotillas, one.widths).makespan <= limit else plan


def follow(
    plan: Allocation, members: Sequence[RatedMember], room: Room, samples: int, busy: Sequence[Busy] = ()
) -> Allocation | None:
    """What to expect now of a plan made before; None where it lacks a member, or gives one another width than it
    has.

    Args:
        members: that still wait: others are left out of the plan.
    """
    problem = make_problem(members, room, samples, busy)
    number = {name: i for i, name in enumerate(problem.names)}
    fixed = {each.member: each.workers for each in members}
    if any(plan.workers.get(name) != (width or plan.workers.get(name, -1)) for name, width in fixed.items()):
        return None
    flotillas = [tuple(number[name] for name in each.members if name in number) for each in plan.flotillas]
    kept = Plan(tuple(each for each in flotillas if each), tuple(plan.workers[name] for name in problem.names))
    timeline = Clock(problem).timeline(kept.flotillas, kept.widths)
    return _allocation(problem, kept, timeline) if math.isfinite(timeline.makespan) else None


def _best(problem: Problem, clock: Clock) -> Plan:
    plans = list(beginnings(problem))
    if len(problem.names) > SEARCHED:
        estimates = [clock.estimate(plan.flotillas, plan.widths) for plan in plans]
        # the first always fits; others may hold a flotilla that does not fit on the nodes
        plans = [
            plans[0],
            *(plans[k] for k in sorted(range(1, len(plans)), key=lambda k: (estimates[k], k))[:KEPT]),
        ]
    makespans = [clock.timeline(plan.flotillas, plan.widths).makespan for plan in plans]
    return plans[min(range(len(plans)), key=lambda k: (makespans[k], len(plans[k].flotillas), k))]


def _allocation(problem: Problem, plan: Plan, timeline: Timeline) -> Allocation:
    second, named = problem.second, _named(problem, plan)
    flotillas = []
    for members, start in zip(plan.flotillas, timeline.starts, strict=True):
        pace = {i: float(problem.times[i, plan.widths[i]]) for i in members}
        ordered = sorted(members, key=lambda i: (-pace[i], i))
        flotillas.append(
            Flotilla(
                members=tuple(named[i] for i in ordered),
                workers=tuple(plan.widths[i] for i in ordered),
                start_s=start * second,
                end_s=max(timeline.ends[i] for i in members) * second,
                samples_per_s=problem.samples / (max(pace.values()) * second),
            )
        )
    return Allocation(
        flotillas=tuple(flotillas),
        makespan_s=timeline.makespan * second,
        lower_bound_s=problem.lower_bound * second,
    )


def _named(problem: Problem, plan: Plan) -> dict[int, str]:
    """Names for the members of a plan: of those that are alike the first go first, as users expect."""
    alike: dict[tuple[bytes, int, int], list[int]] = {}
    for i in (i for members in plan.flotillas for i in members):
        alike.setdefault((problem.times[i].tobytes(), int(problem.epochs[i]), plan.widths[i]), []).append(i)
    named: dict[int, str] = {}
    for group in alike.values():
        names = sorted((problem.names[i] for i in group), key=lambda name: (len(name), name))
        named |= dict(zip(group, names, strict=True))
    return named
