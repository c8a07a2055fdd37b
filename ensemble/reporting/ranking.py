"""Ranks the members of a run: the order that the summary, the progress table and the report share."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from statistics import fmean
from typing import TYPE_CHECKING, Any

from ensemble.meter.origin import weakest
from ensemble.spec.out_of_fold import find_configuration

if TYPE_CHECKING:
    from ensemble.events import Epoch
    from ensemble.meter.origin import Origin
    from ensemble.store import MemberState, RunState


def finite_or_none(value: Any) -> float | None:
    """The number, or None where it is absent, NaN, infinite or too large for JSON."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:  # of an integer
        return None


def rounded(value: Any, digits: int = 6) -> float | None:
    """A number to so many significant digits; None for what `finite_or_none` leaves out."""
    finite = finite_or_none(value)
    return None if finite is None else float(f"{finite:.{digits}g}")


def add_up(member: MemberState, name: str) -> float:
    """The sum of a field over a member's epochs."""
    return sum(getattr(epoch, name) or 0 for epoch in member.history)


def metric(member: MemberState, name: str) -> float | None:
    """The member's last value of a metric on the validation split."""
    return finite_or_none(member.latest_metrics.get(name))


def metric_of(epoch: Epoch, name: str) -> float | None:
    return finite_or_none((epoch.metrics or {}).get(name))


def other_metrics(state: RunState) -> list[str]:
    """Names of what members reported besides the objective, in the order in which they first did."""
    names = dict.fromkeys(name for member in state.members.values() for name in member.latest_metrics)
    return [name for name in names if name != state.objective]


def rank_members(state: RunState) -> list[MemberState]:
    """Members by the objective, best first; finished before unfinished ones, those without a value last.

    Of finished ones, those that keep the constraints of the search come first. Of a cross-validation the values of
    different folds are not compared: the mean of all folds of its configuration ranks a member.
    """
    sign, infeasible = -1.0 if state.direction == "max" else 1.0, state.list_infeasible()

    values = {name: metric(member, state.objective) for name, member in state.members.items()}
    if state.is_cross_validated:
        for folds in group_folds(state):
            known = [value for one in folds if (value := values[one.id]) is not None]
            values |= dict.fromkeys([one.id for one in folds], fmean(known) if known else None)

    def key(member: MemberState) -> tuple[int, int, int, float, int]:
        value, is_infeasible = values[member.id], member.id in infeasible
        return (not member.has_result, is_infeasible, value is None, sign * (value or 0.0), member.number)

    return sorted(state.members.values(), key=key)


def group_folds(state: RunState) -> list[list[MemberState]]:
    """The members of each configuration of a cross-validation."""
    groups: dict[str, list[MemberState]] = {}
    for member in state.members.values():
        groups.setdefault(find_configuration(member.identity), []).append(member)
    return list(groups.values())


def best_member(state: RunState) -> MemberState | None:
    """The first of the ranking that has a value and keeps the constraints of the search; None where none does.

    Of a cross-validation, whose members are measured on different folds, none is.
    """
    ranked, infeasible = [] if state.is_cross_validated else rank_members(state), state.list_infeasible()
    return next((m for m in ranked if metric(m, state.objective) is not None and m.id not in infeasible), None)


def pareto_front(points: Sequence[Sequence[float]]) -> list[int]:
    """Indices of the points than which no other is at most as large in all numbers and smaller in one.

    Returns:
        By the first number, the next ones, then as given. Equal points are all on the front, or none is.
    """
    import numpy as np

    if not points:
        return []
    order = sorted(range(len(points)), key=lambda i: tuple(points[i]))
    kept, front = np.empty((len(points), len(points[0]))), list[int]()
    for i in order:  # what beats a point comes before it
        point = np.asarray(points[i], float)
        before = kept[: len(front)]
        if not ((before <= point).all(1) & (before < point).any(1)).any():
            kept[len(front)] = point
            front.append(i)
    return front


def judged_members(state: RunState) -> list[tuple[MemberState, list[float]]]:
    """The finished trials that have a value of each objective of a search of several, with these values.

    Members from outside the space, from which the search does not learn, are none.
    """
    judged = []
    for member in state.as_finished().members.values() if state.further_objectives else ():
        values = [finite_or_none(value) for value in state.values_of(member)]
        finite = [value for value in values if value is not None]
        if member.state == "finished" and len(finite) == len(values) and member.identity.get("outside") is None:
            judged.append((member, finite))
    return judged


def front_members(state: RunState) -> list[MemberState]:
    """The members on the Pareto front of a search of several objectives, the best by the last one first.

    Only members that keep the constraints of the search are on it.
    """
    infeasible = state.list_infeasible()
    judged = [(member, values) for member, values in judged_members(state) if member.id not in infeasible]
    signs = [-1.0 if objective.mode == "max" else 1.0 for objective in state.objectives]
    points = [[s * value for s, value in zip(signs, values, strict=True)][::-1] for _, values in judged]
    return [judged[i][0] for i in pareto_front(points)]


def cost_origin(state: RunState) -> Origin:
    """The weakest origin of the joules that members of a search are judged by; "measured" where they are not."""
    if "energy_j" not in (objective.name for objective in state.further_objectives):
        return "measured"
    return weakest(member.cost.energy_origin for member, _ in judged_members(state) if member.cost is not None)


def varied_parameters(members: Iterable[MemberState]) -> list[str]:
    """Hyperparameters that differ between members, in the order declared."""
    params = [member.params for member in members]
    names = dict.fromkeys(name for one in params for name in one)
    return [name for name in names if len({repr(one.get(name)) for one in params}) > 1]


# What of an identity, besides hyperparameters, tells members apart.
_OPTIONS = (
    "precision",
    "optimizer",
    "schedule",
    "batch_size",
    "workers",
    "accumulate",
    "compression",
    "communicator",
)


def differ_by_seed(members: Iterable[MemberState]) -> bool:
    """Whether members differ in nothing but their seeds."""
    all_members = list(members)
    others = varied_parameters(all_members) or any(
        describe_options(member, all_members) for member in all_members[:1]
    )
    return not others and len({member.identity.get("seed") for member in all_members}) > 1


def describe_options(member: MemberState, members: Iterable[MemberState]) -> str:
    """Returns the options in which a member differs from others, such as "bf16, onebit, batch_size 64"."""
    identities = [other.identity for other in members]
    differing = []
    for name in _OPTIONS:
        if name not in member.params and len({repr(identity.get(name)) for identity in identities}) > 1:
            value = member.identity.get(name)
            value = value["name"] if isinstance(value, dict) else value
            differing.append(
                str(value) if isinstance(value, str) else f"{name} {value}" if value is not None else ""
            )
    return ", ".join(filter(None, differing))
