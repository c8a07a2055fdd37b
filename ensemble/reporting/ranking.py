"""Ranks the members of a run: the order that the summary, the progress table and the report share."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ensemble.store import MemberState, RunState


def finite_or_none(value: Any) -> float | None:
    """The number, or None where it is absent, NaN or infinite: JSON and figures have no such numbers."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    return float(value)


def metric(member: MemberState, name: str) -> float | None:
    """The member's last value of a metric on the validation split."""
    return finite_or_none(member.metrics.get(name))


def other_metrics(state: RunState) -> list[str]:
    """Names of what members reported besides the objective, in the order in which they first did."""
    names = dict.fromkeys(name for member in state.members.values() for name in member.metrics)
    return [name for name in names if name != state.objective]


def rank_members(state: RunState) -> list[MemberState]:
    """Members by the objective, best first; finished before unfinished ones, those without a value last."""
    sign = -1.0 if state.direction == "max" else 1.0

    def key(member: MemberState) -> tuple[int, int, float, int]:
        value = metric(member, state.objective)
        return (member.state != "finished", value is None, sign * (value or 0.0), member.number)

    return sorted(state.members.values(), key=key)


def best_member(state: RunState) -> MemberState | None:
    """The best member that has a value of the objective."""
    return next((m for m in rank_members(state) if metric(m, state.objective) is not None), None)


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


def describe_options(member: MemberState, members: Iterable[MemberState]) -> str:
    """Returns the options in which a member differs from others, such as "bf16, onebit, batch_size 64"."""
    identities = [each.identity for each in members]
    differing = []
    for name in _OPTIONS:
        if len({repr(identity.get(name)) for identity in identities}) > 1:
            value = member.identity.get(name)
            value = value["name"] if isinstance(value, dict) else value
            differing.append(
                str(value) if isinstance(value, str) else f"{name} {value}" if value is not None else ""
            )
    return ", ".join(filter(None, differing))
