"""The plan for those that wait, again, when the rates of those that run are known better."""

from __future__ import annotations

from collections.abc import Sequence

from ensemble.schedule.flotilla.allocate import allocate, follow
from ensemble.schedule.flotilla.fluid import ends
from ensemble.schedule.flotilla.model import Allocation, Busy, Cohort, RatedMember, Room

GAIN = 0.02  # of the run, that a new plan has to save over the one before
EFFORT = 4_000


def revise(
    waiting: Sequence[RatedMember],
    cohorts: Sequence[Cohort],
    room: Room,
    samples: int,
    previous: Allocation | None = None,
    effort: int = EFFORT,
) -> Allocation:
    """New widths and order for those that wait; those that run keep theirs.

    The plan before is kept, with times as they are expected now, unless another saves `GAIN` of the run or it does
    not hold all that wait.

    Args:
        waiting: with widths where these are fixed.
        cohorts: what runs, with rates as observed.
        room, samples, effort: as for `allocate`.
        previous: the plan so far; members that wait no longer are left out of it.
    """
    until = ends(cohorts, room, samples)
    busy = [
        Busy(each.node, each.workers or 1, until[each.member], None if cohort.private else cohort.number)
        for cohort in cohorts
        for each in cohort.members
    ]
    new = allocate(waiting, room, samples, busy, effort)
    old = None if previous is None else follow(previous, waiting, room, samples, busy)
    return old if old is not None and new.makespan_s > old.makespan_s * (1 - GAIN) else new
