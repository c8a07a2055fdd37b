"""What is logged of a run, from its events: pure, and the same each time that a log is read.

The step of a metric is the number of a member's own epoch, from 0. Names of metrics have a prefix: `valid/` for
what the recipe reports, `train/` for the training itself, `cost/` and `ensemble/`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ensemble.events import NOT_COMBINED, Combined, Epoch, Event, MemberDeclared, RunFinished, Started, StepsDone
from ensemble.meter.ledger_rows import Total
from ensemble.reporting.ranking import finite_or_none
from ensemble.reporting.run_projection import NOTHING, RunProjection
from ensemble.reporting.sections import quality
from ensemble.store import MemberState, RunState, apply_event
from ensemble.store.member import ENDED

COUNTED = ("finished", "pruned", "failed", "cancelled", "stopped")  # states at the end of a run
#: Of a member's identity, what is logged beside its hyperparameters.
OPTIONS = ("seed", "epochs", "batch_size", "workers", "precision")


@dataclass(frozen=True, slots=True)
class DeclaredMember:
    """A member that is new, or declared otherwise than before; `t` in Unix seconds, here and below."""

    member: str
    t: float
    params: dict[str, Any]
    options: dict[str, Any]


@dataclass(frozen=True, slots=True)
class WentBack:
    """A member trains again from this epoch on; what was logged of it and later ones is replaced."""

    member: str
    t: float
    epoch: int


@dataclass(frozen=True, slots=True)
class EpochEnded:
    """The metrics of an epoch of a member; all finite."""

    member: str
    t: float
    epoch: int
    values: dict[str, float]


Point = DeclaredMember | WentBack | EpochEnded


@dataclass(frozen=True, slots=True)
class MemberEnd:
    """How a member stands when the run ends or is stopped.

    Attributes:
        t: when it ended, or of the run's end.
        state: its state in the run's words; attempts: how often it was placed.
        epochs: finished ones; the step of `values` is their number.
        values: what it has used, in CPU-seconds and joules, and its final metrics; None is left out.
        origin: of the joules.
        error: why it failed.
    """

    member: str
    t: float
    state: str
    attempts: int
    epochs: int
    values: dict[str, float]
    origin: str
    error: str | None


@dataclass(frozen=True, slots=True)
class RunEnd:
    """How the run stands when it ends or is stopped.

    Attributes:
        finished: whether it ran to its end.
        values: metrics of the combined model, and totals of what was used.
        origin: of the joules.
        members: by name.
    """

    t: float
    finished: bool
    values: dict[str, float]
    origin: str
    members: dict[str, MemberEnd] = field(default_factory=dict)


class PointReader:
    """Folds a run's log, and says of each event what is to be logged.

    Attributes:
        state: the run's state after the events so far.
    """

    def __init__(self) -> None:
        self.state = RunState()
        self._epochs: dict[str, int] = {}  # epochs of each member that have been returned
        self._declared: dict[str, DeclaredMember] = {}

    def read(self, event: Event) -> list[Point]:
        """Apply the next event; returns what it adds."""
        member = self.state.members.get(getattr(event, "member", None) or "")
        before = member.history[-1] if member is not None and member.history else None
        apply_event(self.state, event)
        member = self.state.members.get(getattr(event, "member", None) or "")
        if member is None:
            return []
        if isinstance(event, MemberDeclared):
            return self._declare(member, event.t)
        if isinstance(event, Epoch | Started):
            return self._end_epoch(member, before, event.t)
        return []

    def _declare(self, member: MemberState, t: float) -> list[Point]:
        options = {name: member.identity[name] for name in OPTIONS if name in member.identity}
        declared = DeclaredMember(member.id, t, member.params, options)
        previous = self._declared.get(member.id)
        if previous is not None and (previous.params, previous.options) == (declared.params, declared.options):
            return []
        self._declared[member.id] = declared
        return [declared]

    def _end_epoch(self, member: MemberState, before: Epoch | None, t: float) -> list[Point]:
        last = member.history[-1] if member.history else None
        if last is before:
            return []
        is_new = last is not None and last.t == t  # else later epochs were dropped, and it is an earlier one
        first = 0 if last is None else last.epoch + (not is_new)
        points: list[Point] = []
        if first < self._epochs.get(member.id, 0):
            points.append(WentBack(member.id, t, first))
        self._epochs[member.id] = first
        if last is not None and is_new:
            points.append(EpochEnded(member.id, t, first, epoch_values(last)))
            self._epochs[member.id] = first + 1
        return points


def epoch_values(epoch: Epoch | StepsDone) -> dict[str, float]:
    """The metrics of an epoch, or of an evaluation in it, by their names in loggers; only finite ones.

    `train/waited_share` is the share of the seconds of training in which the member waited for batches.
    """
    values = {f"valid/{name}": value for name, value in epoch.metrics.items()}
    if isinstance(epoch, StepsDone):
        return _drop_missing(values)
    train_s, waited_s = epoch.train_s or epoch.wall_s, epoch.waited_s
    values |= {f"train/{name}": getattr(epoch, name) for name in ("lr", "samples_per_s")}
    values["train/loss"] = epoch.train_loss
    values["train/waited_share"] = waited_s / train_s if train_s and waited_s is not None else None
    return _drop_missing(values)


def describe_end(run: RunProjection) -> RunEnd:
    """How the run and each member stand."""
    state, t = run.state, run.state.updated or 0.0
    members = {
        member.id: _describe_member(member, run.own.get(member.id, NOTHING), run.full.get(member.id, NOTHING), t)
        for member in state.members.values()
    }
    values = _cost_values(run.used, None)
    values |= combined_values(state.combined or NOT_COMBINED)
    values |= {f"members/{state_name}": run.counts[state_name] for state_name in COUNTED}
    finished = state.ended is not None and isinstance(state.ended, RunFinished)
    return RunEnd(t, finished, _drop_missing(values), run.used.origin, members)


def combined_values(combined: Combined) -> dict[str, Any]:
    """The figures of the combined model by their names in loggers.

    `ensemble/`, `best/`, `mean/`: of the combined model, its best member, the mean of its members. Behind a
    figure's name `_low` and `_high` are the ends of its interval. `uncertainty/PART` and
    `conformal/METHOD/FIGURE` say how sure it is.
    """
    values: dict[str, Any] = {}
    for of, metrics in (combined.metrics or {}).items():
        if isinstance(metrics, Mapping):
            values |= {f"{of}/{name}": value for name, value in metrics.items()}
    for of, intervals in (combined.intervals or {}).items():
        for name, ends in (intervals or {}).items():
            values |= {
                f"{of}/{name}_{end}": value for end, value in zip(("low", "high"), ends or (), strict=False)
            }
    values |= {f"uncertainty/{part}": value for part, value in (combined.uncertainty or {}).items()}
    for method, figures in quality.list_conformal(combined):
        values |= {f"conformal/{method}/{name}": value for name, value in figures.items()}
    return values


def _describe_member(member: MemberState, own: Total, full: Total, t: float) -> MemberEnd:
    ended = member.spans[-1].ended if member.spans and member.state in ENDED else None
    final = {f"final/{name}": value for name, value in member.metrics.items()}
    values = _drop_missing({**_cost_values(own, full), **final})
    error = f"{member.reason}: {member.error}" if member.error and member.state == "failed" else None
    return MemberEnd(member.id, ended or t, member.state, member.attempts, member.epoch, values, own.origin, error)


def _cost_values(own: Total, full: Total | None) -> dict[str, Any]:
    values = {"cost/cpu_s": own.cpu_s, "cost/energy_j": own.energy_j}
    if full is not None:
        values |= {"cost/full_cpu_s": full.cpu_s, "cost/full_energy_j": full.energy_j}
    return values


def _drop_missing(values: Mapping[str, Any]) -> dict[str, float]:
    finite = {name: finite_or_none(value) for name, value in values.items()}
    return {name: value for name, value in finite.items() if value is not None}
