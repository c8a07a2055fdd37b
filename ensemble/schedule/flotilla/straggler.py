"""Decides what to do about a straggler: a member that is slower than the rest of its cohort."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ensemble.schedule.flotilla.model import (
    Capacity,
    Cohort,
    CoreBudget,
    RatedMember,
    interpolate_rate,
)
from ensemble.schedule.flotilla.timeline import FluidModel

GAIN = 0.05  # share of the rest of the run that a change must save
GAIN_S = 5.0  # seconds that it must save: the change takes some, and rates of epochs of milliseconds are noise
SLOWER = 1.1  # a straggler is slower by this factor than the fastest of its cohort
SETTLED = 2  # epochs after a change of a member before the next one
_MOST_APART = 8

Kind = Literal["pace", "move", "apart", "widen", "alone"]
_PREFERRED: tuple[Kind, ...] = ("pace", "move", "widen", "apart", "alone")


@dataclass(frozen=True, kw_only=True)
class RebalanceDecision:
    """The change with the shortest rest of the run.

    Attributes:
        kind: "pace": no change, the others go at its pace; "move": to the stream of `cohort`; "apart": all of
            `members` get a stream of their own; "widen": it resumes from its checkpoint with `workers`; "alone":
            it prepares its own batches.
        members: the straggler, and with "apart" those that leave with it.
        cohort: the target of "move".
        workers: the new width of "widen".
        run_s, pace_s: expected rest of the run with this change and without any, in seconds. None where no change
            was considered: no member waits for it, or it was changed just now.
    """

    kind: Kind
    members: tuple[str, ...]
    cohort: int | None = None
    workers: int | None = None
    run_s: float | None = None
    pace_s: float | None = None


def decide_rebalance(
    member: str,
    cohorts: Sequence[Cohort],
    capacity: Capacity,
    samples: int,
    *,
    waiting: Sequence[Sequence[RatedMember]] = (),
    cores: CoreBudget | None = None,
    elastic: bool = False,
    free: Sequence[int] = (),
    restart_s: float = 0.0,
    settled_epochs: int = SETTLED,
) -> RebalanceDecision:
    """Decide about a member at an epoch boundary, from the observed rates.

    Decisions do not oscillate: a change must save `GAIN` of the rest of the run, and `GAIN_S`, so its reversal
    would cost that much, also with rates that are off by 2 %; and a member is not changed within `SETTLED` epochs
    of its last change.

    Args:
        member: the member; the answer is "pace" unless it is a straggler.
        cohorts: all running members.
        waiting: flotillas that follow, in this order, with their widths.
        cores: the cores that preparation and members share; None where preparation takes none from members.
        elastic: whether widths may change.
        free: free slots, by node.
        restart_s: seconds that a restart from a checkpoint costs.
        settled_epochs: epochs since the last change of this member.

    Raises:
        ValueError: no cohort has this member.
    """
    home = _find_home(member, cohorts)
    last = elastic and len(home.members) == 1  # only the end of the run waits for it
    if settled_epochs < SETTLED or not (home.private or last or _is_straggler(member, home, capacity)):
        return RebalanceDecision(kind="pace", members=(member,))
    running = [one for cohort in cohorts for one in cohort.members]
    fluid = FluidModel([*running, *(one for flotilla in waiting for one in flotilla)], capacity, samples, cores)
    follow = [[one.member for one in flotilla] for flotilla in waiting]
    shared = [[m.member for m in one.members] for one in cohorts if not one.private]
    private = [one.members[0].member for one in cohorts if one.private]
    pace_s = fluid.estimate_run_s(shared, follow, alone=private)
    changes: list[tuple[float, RebalanceDecision]] = []

    def consider(kind: Kind, members: Sequence[str], run_s: float, **where: int) -> None:
        if run_s <= min(pace_s * (1 - GAIN), pace_s - GAIN_S):
            changes.append(
                (run_s, RebalanceDecision(kind=kind, members=tuple(members), run_s=run_s, pace_s=pace_s, **where))
            )

    own = next(m for m in home.members if m.member == member)
    without_member = _remove(shared, {member})
    others = [name for name in private if name != member]
    for cohort in cohorts:
        # a stream that has passed the member's next epoch cannot be joined
        if cohort.private or cohort is home or cohort.epoch > home.epoch:
            continue
        first = cohort.members[0].member
        joined = [[*group, member] if first in group else group for group in without_member]
        extra = {member: home.epoch - cohort.epoch}
        run_s = fluid.estimate_run_s(joined, follow, alone=others, extra=extra)
        consider("move", [member], run_s, cohort=cohort.number)
    if not home.private:
        consider("alone", [member], fluid.estimate_run_s(without_member, follow, alone=[*private, member]))
        if len(shared) < capacity.streams:
            for slow in _list_slowest_groups(home, fluid):
                run_s = fluid.estimate_run_s([*_remove(shared, set(slow)), slow], follow, alone=private)
                consider("apart", slow, run_s)
        if elastic:
            width = own.workers or 1
            most = min(capacity.most_workers, width + (free[own.node] if own.node < len(free) else 0))
            for wider in range(width + 1, most + 1):
                run_s = fluid.estimate_run_s(
                    shared, follow, alone=private, workers={member: wider}, late_s=restart_s
                )
                consider("widen", [member], run_s, workers=wider)
    if not changes:
        return RebalanceDecision(kind="pace", members=(member,), run_s=pace_s, pace_s=pace_s)
    return _choose_cheapest(changes, pace_s)


def _find_home(member: str, cohorts: Sequence[Cohort]) -> Cohort:
    home = next((cohort for cohort in cohorts if any(m.member == member for m in cohort.members)), None)
    if home is None:
        raise ValueError(f"{member} is in no stream group that runs ({', '.join(str(c.number) for c in cohorts)})")
    return home


def _choose_cheapest(found: Sequence[tuple[float, RebalanceDecision]], pace_s: float) -> RebalanceDecision:
    """Among changes that are equal to within 1 %, the one with the least other costs."""
    return min(
        found, key=lambda f: (round(f[0] / pace_s, 2), _PREFERRED.index(f[1].kind), f[0], len(f[1].members))
    )[1]


def _is_straggler(member: str, home: Cohort, capacity: Capacity) -> bool:
    """Whether a member is the slowest of its cohort, and others wait for it."""
    rates = {
        m.member: min(interpolate_rate(m.samples_per_s, m.workers or 1), capacity.prep_samples_per_s)
        for m in home.members
    }
    return rates[member] == min(rates.values()) and SLOWER * rates[member] <= max(rates.values())


def _remove(groups: Sequence[Sequence[str]], names: set[str]) -> list[list[str]]:
    remaining = [[name for name in group if name not in names] for group in groups]
    return [group for group in remaining if group]


def _list_slowest_groups(home: Cohort, fluid: FluidModel) -> list[list[str]]:
    """The slowest two, three ... members, where the next one is faster."""
    times = {m.member: fluid.epoch_s(m.member) for m in home.members}
    names = sorted(times, key=lambda name: (-times[name], len(name), name))
    ends = [k for k in range(2, len(names)) if times[names[k]] < times[names[k - 1]]]
    widest = sorted(ends, key=lambda k: (times[names[k]] / times[names[k - 1]], k))[:_MOST_APART]
    return [names[:k] for k in sorted(widest)]
