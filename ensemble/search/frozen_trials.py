"""Describes the members of a run as Optuna trials."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

from ensemble.events import Cost
from ensemble.store.member import MemberState
from ensemble.store.state import RunState

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution
    from optuna.trial import FrozenTrial

#: Attributes of a trial with a cost, and fields of `cost` events.
COST = ("energy_j", "energy_origin", "cpu_s")


def describe_cost(cost: Cost | None) -> dict[str, Any]:
    """A trial's attributes that show its `cost` event."""
    return {name: value for name in COST if (value := getattr(cost, name, None)) is not None}


def make_frozen_trials(state: RunState) -> list[FrozenTrial]:
    """The members of a run as Optuna trials, by number; numbers without a member are failed trials."""
    by_number = {member.number: member for member in state.members.values()}
    ranges = _make_distributions([member.params for member in by_number.values()])
    blank = MemberState("", -1, state="cancelled")
    return [
        _make_frozen_trial(by_number.get(n, blank), n, state, ranges)
        for n in range(max(by_number, default=-1) + 1)
    ]


def _make_distributions(seen: Sequence[Mapping[str, Any]]) -> dict[str, BaseDistribution]:
    """The observed range of each hyperparameter that is a finite number in all members."""
    from optuna.distributions import FloatDistribution

    values: dict[str, list[Any]] = {}
    for params in seen:
        for name, value in params.items():
            values.setdefault(name, []).append(value)
    return {
        name: FloatDistribution(float(min(given)), float(max(given)))
        for name, given in values.items()
        if all(isinstance(v, int | float) and not isinstance(v, bool) and math.isfinite(v) for v in given)
    }


def _local_time(t: float, state: RunState) -> datetime:
    """Local time as at the start of the run, as Optuna keeps times without a zone.

    When clocks are set to or from summer time during the run, order and durations of trials stay what they were.
    """
    started = t if state.started is None else state.started
    return datetime.fromtimestamp(started) + timedelta(seconds=t - started)


def _make_frozen_trial(
    member: MemberState, number: int, state: RunState, ranges: Mapping[str, BaseDistribution]
) -> FrozenTrial:
    from optuna.trial import FrozenTrial, TrialState

    by_epoch = ((event.epoch, event.metrics.get(state.objective)) for event in member.history)
    reported = {epoch + 1: value for epoch, value in by_epoch if value is not None}
    values = state.values_of(member) if member.state == "finished" else state.values_of(member)[:1]
    known = [value for value in values if value is not None]
    awaits_cost = member.cost is None and len(values) > 1 and any(o.is_cost for o in state.further_objectives)
    stage = {
        "waiting": TrialState.RUNNING if member.attempts else TrialState.WAITING,
        "finished": TrialState.COMPLETE if len(known) == len(values) else TrialState.FAIL,
        "pruned": TrialState.PRUNED,
        "failed": TrialState.FAIL,
        "cancelled": TrialState.FAIL,
    }.get("running" if awaits_cost else member.state, TrialState.RUNNING)
    params = {name: float(v) for name, v in member.params.items() if name in ranges}
    others = {name: v for name, v in member.params.items() if name not in ranges}
    about = {"member": member.id, "state": member.state, "node": member.node, "attempts": member.attempts}
    about |= {"weights_sha256": member.weights_sha256, "error": member.error, **describe_cost(member.cost)}
    about["lineage"] = member.identity.get("lineage")
    start = next((span.placed for span in member.spans), state.updated or 0.0)
    end = next((span.ended for span in reversed(member.spans) if span.ended), state.updated or start)
    made = FrozenTrial(
        number=number,
        state=stage,
        value=None,
        values=known if known and stage in (TrialState.COMPLETE, TrialState.PRUNED) else None,
        datetime_start=None if stage == TrialState.WAITING else _local_time(start, state),
        datetime_complete=_local_time(end, state) if stage.is_finished() else None,
        params=params,
        distributions={name: ranges[name] for name in params},
        user_attrs=others | {key: value for key, value in about.items() if value is not None},
        system_attrs={},
        intermediate_values=reported,
        trial_id=number,
    )
    for name, excess in (member.constraints or {}).items():
        made.set_constraint(name, excess)
    return made
