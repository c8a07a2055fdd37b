"""Holds what is known of one member and of one node: the parts of a run's state."""

from __future__ import annotations

import dataclasses
import operator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from msgspec.structs import asdict, replace

import ensemble.events as events

State = Literal["waiting", "placed", "running", "paused", "stopped", "finished", "pruned", "failed", "cancelled"]

#: States in which nothing more will come of a member; a resume takes up only what failed again.
ENDED: frozenset[str] = frozenset(("finished", "pruned", "failed", "cancelled"))

#: How remarks begin that hold only for what a member predicts.
UNCOMBINED = "there will be no combined model"
#: How the remark begins of a member that ended no better than a guess.
LEARNS_NOTHING = "learns nothing"
#: How the remark begins of a member with `outdated`.
OUTDATED = "it could not be evaluated again, so it keeps its earlier figures and is not combined"

#: Why a member failed for good: the same batches give the same loss with the same code, and what a search proposed
#: in vain (an "impossible" member was never trained) stays what it is. What else was wrong (a mistake in the
#: recipe, no memory, no room on the disk) may have been mended before a resume.
UNRECOVERABLE: frozenset[str] = frozenset(("nan", "impossible"))


_POSITION = operator.attrgetter("epoch", "step")

#: Fields that a member keeps where it returns to its result.
_OF_ATTEMPTS = {"attempt", "attempts", "failures", "error", "reason", "spans"}
_OF_ATTEMPTS |= {"node", "nodes", "devices", "cohort", "feeder"}


@dataclass(slots=True)
class Span:
    """One attempt of a member on a node, or its part in one cohort; for the timeline.

    Unix seconds, None while it has not come to that. Where it moved on to another cohort its outcome is "moved".
    `device`: "cpu", or the model of its GPU.
    """

    attempt: int
    node: str
    devices: list[Any]
    cohort: int | None
    placed: float
    started: float | None = None
    ended: float | None = None
    outcome: str | None = None
    device: str | None = None


@dataclass(slots=True)
class Exclusion:
    """Why nothing is placed on a node; Unix seconds. `until`: when it is tried again, or ends; None: unknown."""

    since: float
    detail: str = ""
    until: float | None = None


@dataclass(slots=True)
class NodeState:
    """A node.

    Attributes:
        info: the last `node` event with an offer.  is_held: whether the run holds a part of it.
        watts: the power in its last `power` event.
        health: the last `node_health` event of this start.
        attempts: that were placed there, over all starts.  failures: how many of them failed, by the cause.
        excluded: why nothing is placed there, in this start: "lost", "draining", "unusable", "resting" (it is
            tried again).
    """

    name: str
    info: events.NodeChanged | None = None
    watts: float | None = None
    is_held: bool = False
    health: events.NodeHealth | None = None
    attempts: int = 0
    failures: dict[str, int] = field(default_factory=dict)
    excluded: dict[str, Exclusion] = field(default_factory=dict)


class UnknownEpochsError(Exception):
    """An event concerns epochs of which only sums are kept: the whole log must be folded again."""


@dataclass(slots=True)
class EpochSums:
    """The sums of epochs that are not kept one by one: their number, samples, seconds in training, the last
    metrics.
    """

    epochs: int
    samples: int
    seconds: float
    metrics: dict[str, float]


@dataclass(slots=True)
class MemberState:
    """One member.

    Attributes:
        code: fingerprint of the code that it trains with, or did (`ensemble.user_code.fingerprint`); None where
            it is not known.
        earlier_code: fingerprint of other code that it was trained with before; None where there was none.
        node: of rank 0.  nodes: of each rank, where they are on several nodes.
        attempts: how often it was placed.  failures: how often an attempt of it failed since the run's last
            start.
        epoch: own epochs finished in its present lineage.  step: steps into the next one, of `steps`.
        metrics: of the last epoch.  history: the `epoch` event of each finished epoch, in order, each once.
        evaluations: the `progress` event of each evaluation within an epoch, in order.
        earlier: finished epochs before those of `history`; None unless `drop_epochs` was called.
        plan: what was measured for its exchange (`ensemble.comm.exchange_plan.ExchangePlan`); None where nothing
            was.
        checkpoint: the last `checkpoint` event whose file is not known to be damaged.  checkpoint_before: the one
            before it, whose file is there until the member has ended.
        is_checkpoint_removed: whether it has ended, and its last checkpoint was not to be kept.
        predictions: the digest of its saved predictions, by split; None where the log has none.
        files: the digests of what it has saved itself (`member.folder`), by path; None: nothing.
        is_alone: whether it prepares its own batches because shared ones were not those of its pipeline.
        kept: which evaluation has the weights that are kept, and the value of the objective; None: the last.
        remarks: sentences of `remark` events, each once.
        early_stopping: why it ended before its last epoch, and the best evaluation; None where it did not.
        constraints: by how much a finished trial violates those of the search; None where it has none.
        trained: its `finished` event, while it is evaluated again.
        result: itself as it had finished, until it has finished the further epochs that it was given since; None
            where it was given none.
        unextended: why it has not finished its last further epochs, so that it is as before; None where it has.
        outdated: the error of its last evaluation, where it has finished and could not be evaluated again.
        cost: the `cost` event of a finished trial, where a search minimizes that: the values that the
            search was told, which the ledger may still correct by what is reported later.
    """

    id: str
    number: int
    identity: dict[str, Any] = field(default_factory=dict)
    state: State = "waiting"
    attempt: int = 0
    attempts: int = 0
    failures: int = 0
    node: str | None = None
    nodes: list[str] = field(default_factory=list)
    devices: list[Any] = field(default_factory=list)
    cohort: int | None = None
    feeder: str | None = None
    first_epoch: int | None = None
    epoch: int = 0
    step: int = 0
    steps: int | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    history: list[events.Epoch] = field(default_factory=list)
    evaluations: list[events.StepsDone] = field(default_factory=list)
    earlier: EpochSums | None = None
    plan: dict[str, Any] | None = None
    code: str | None = None
    earlier_code: str | None = None
    samples_per_s: float | None = None
    checkpoint: events.Checkpoint | None = None
    is_alone: bool = False
    checkpoint_before: events.Checkpoint | None = None
    is_checkpoint_removed: bool = False
    predictions: dict[str, str] | None = None
    files: dict[str, str] | None = None
    weights_sha256: str | None = None
    error: str | None = None
    reason: str | None = None
    kept: dict[str, Any] | None = None
    early_stopping: dict[str, Any] | None = None
    remarks: list[str] = field(default_factory=list)
    constraints: dict[str, float] | None = None
    cost: events.Cost | None = None
    trained: events.Finished | None = None
    outdated: str | None = None
    result: MemberState | None = None
    unextended: str | None = None
    spans: list[Span] = field(default_factory=list)

    def value_of(self, objective: events.Objective) -> float | None:
        """Its value of a further objective of a search; None where that is not known."""
        return objective.read(self.cost, self.metrics)

    @property
    def has_result(self) -> bool:
        """Whether it has finished, if only before the further epochs for which it is trained now."""
        return self.state == "finished" or self.result is not None

    def explain_infeasible(self) -> str | None:
        """Return which constraints of the search it violates, or that this is not known; None: it keeps all."""
        if self.constraints is None:
            return "whether it keeps the constraints of the search is not known"
        broken = [f"{name!r} by {excess:.3g}" for name, excess in self.constraints.items() if excess > 0]
        return f"it violates the constraint {', '.join(broken)}" if broken else None

    def keep_result(self) -> None:
        """Keeps what it has finished with as its result: it is to be trained further."""
        self.unextended = None
        lists: dict[str, Any] = {name: [*getattr(self, name)] for name in ("history", "evaluations", "remarks")}
        self.result = dataclasses.replace(self, identity={**self.identity}, spans=[], **lists)

    def return_to_result(self, why: str) -> None:
        """Makes it what it had finished as, where it was trained further and that has ended without success."""
        if (result := self.result) is None:
            return
        for own in dataclasses.fields(self):
            if own.name not in _OF_ATTEMPTS:
                setattr(self, own.name, getattr(result, own.name))
        self.unextended = why

    @property
    def latest_metrics(self) -> dict[str, float]:
        """Those of the last evaluation, which may be within the epoch in progress; others of the last epoch.

        Of a member that is trained further they are those of its result.
        """
        if self.result is not None:
            return self.result.latest_metrics
        last = self.evaluations[-1] if self.evaluations else None
        return {**self.metrics, **last.metrics} if last is not None and last.epoch == self.epoch else self.metrics

    def list_measured(self) -> list[events.Epoch | events.StepsDone]:
        """Its finished epochs and the evaluations within epochs, in order."""
        both: list[events.Epoch | events.StepsDone] = [*self.history, *self.evaluations]
        return sorted(both, key=_POSITION) if self.evaluations else both

    @property
    def place(self) -> str:
        """The nodes of its ranks, in words; empty where it has no place."""
        return " + ".join(dict.fromkeys(self.nodes)) or self.node or ""

    @property
    def params(self) -> dict[str, Any]:
        return dict(self.identity.get("params", {}))

    @property
    def training_rate(self) -> float | None:
        """Samples a second of training over all its epochs, evaluation not counted: samples over the sum of each
        epoch's samples / samples_per_s. The rate that was last reported before the first epoch has ended.
        """
        samples, seconds = self._samples_and_seconds()
        return samples / seconds if seconds else self.samples_per_s

    def _samples_and_seconds(self) -> tuple[int, float]:
        """Samples of the epochs whose rate is known, and the seconds that they took."""
        samples, seconds = (self.earlier.samples, self.earlier.seconds) if self.earlier else (0, 0.0)
        for epoch in self.history:
            if epoch.samples_per_s and epoch.samples:
                samples, seconds = samples + epoch.samples, seconds + epoch.samples / epoch.samples_per_s
        return samples, seconds

    def drop_epochs(self) -> None:
        if self.history:
            last = self.history[-1]
            self.earlier = EpochSums(last.epoch + 1, *self._samples_and_seconds(), last.metrics)
            self.history, self.evaluations = [], []

    def drop_epochs_from(self, epoch: int, step: int = 0) -> None:
        """Removes this epoch and later ones from `history`, and evaluations after this step: it trains them again.

        Raises:
            UnknownEpochsError: it is one of the `earlier` ones.
        """
        if self.evaluations:
            self.drop_evaluations_from(epoch, step + 1)
        while self.history and self.history[-1].epoch >= epoch:
            self.history.pop()
        earlier = self.earlier
        if earlier is not None and epoch < earlier.epochs:
            raise UnknownEpochsError(self.id)
        self.metrics = self.history[-1].metrics if self.history else earlier.metrics if earlier else {}

    def drop_evaluations_from(self, epoch: int, step: int) -> None:
        while self.evaluations and (self.evaluations[-1].epoch, self.evaluations[-1].step) >= (epoch, step):
            self.evaluations.pop()

    def _list_evaluations(self, epoch: events.Epoch) -> list[events.StepsDone]:
        """All evaluations within an epoch that has ended, those too whose events were lost with a controller."""
        reported = {one.step: one for one in self.evaluations if one.epoch == epoch.epoch}
        of_epoch = asdict(epoch) | {"steps": epoch.step}
        return [
            reported.get(step)
            or events.select_fields(events.StepsDone, {**of_epoch, "step": step, "metrics": drop_missing(metrics)})
            for step, metrics in epoch.validations
        ]

    def end_epoch(self, event: events.Epoch) -> None:
        if None in event.metrics.values():
            event = replace(event, metrics=drop_missing(event.metrics))
        evaluations = self._list_evaluations(event) if event.validations else []
        self.drop_epochs_from(event.epoch)
        self.history.append(event)
        self.evaluations += evaluations
        self.metrics, self.epoch, self.step = event.metrics, event.epoch + 1, 0
        self.samples_per_s = event.samples_per_s or self.samples_per_s

    def is_resumable(self, code: str | None) -> bool:
        """Whether a start of the run with this code trains the member further, from its checkpoint where it has
        one.
        """
        if self.state in ("placed", "running", "paused", "stopped"):
            return True
        mended = self.reason == "nan" and None not in (self.code, code) and self.code != code
        return self.state == "failed" and (self.reason not in UNRECOVERABLE or mended)

    @property
    def is_diverged_without_checkpoint(self) -> bool:
        """Whether it failed for good without a checkpoint: it is tried again if its declaration changes."""
        return (
            self.state == "failed"
            and self.reason == "nan"
            and self.checkpoint is None
            and not self.identity.get("added")
        )

    def has_weights_of_other_code(self, code: str | None) -> bool:
        """Whether its checkpoint was trained with other code than this; False where that is not known."""
        return self.checkpoint is not None and None not in (self.code, code) and self.code != code

    def find_other_code(self, code: str | None) -> str | None:
        """The fingerprint of other code than this that its checkpoint was trained with, at least in part."""
        return self.code if self.has_weights_of_other_code(code) else self.earlier_code

    def go_on_with(self, code: str | None) -> None:
        self.earlier_code = self.find_other_code(code)
        self.code = code

    def add_checkpoint(self, event: events.Checkpoint) -> None:
        if self.checkpoint is None or self.checkpoint.path != event.path:
            self.checkpoint_before = self.checkpoint
        self.checkpoint, self.is_checkpoint_removed = event, False

    def reduce_checkpoint(self, event: events.CheckpointReduced) -> None:
        """Takes note that of a checkpoint only the weights were kept, or nothing: a `checkpoint_reduced` event."""
        if self.checkpoint is None or Path(self.checkpoint.path).name != event.removed:
            return
        self.is_checkpoint_removed = event.path is None
        kept = None
        if event.path is not None:
            kept = replace(self.checkpoint, path=event.path, digest=event.digest, has_weights_only=True)
        self.checkpoint = kept

    @property
    def has_weights_only(self) -> bool:
        """Whether its checkpoint has no state of an optimizer any more."""
        return self.checkpoint is not None and self.checkpoint.has_weights_only

    def explain_no_checkpoint(self) -> str:
        removed = "its checkpoint was removed (Ensemble.keep_checkpoints='selected')"
        return removed if self.is_checkpoint_removed else f"it has no checkpoint ({self.state})"

    def list_checkpoints(self) -> list[tuple[str, str | None]]:
        """The (name, digest) of the files from which it can go on, the last one first."""
        checkpoints = [event for event in (self.checkpoint, self.checkpoint_before) if event]
        return [(Path(event.path).name, event.digest) for event in checkpoints]

    def list_kept(self) -> list[tuple[str, str | None]]:
        """As `list_checkpoints`, with that of its result."""
        of_result = [] if self.result is None else self.result.list_checkpoints()
        return list(dict.fromkeys([*self.list_checkpoints(), *of_result]))

    def drop_checkpoint(self, name: str) -> None:
        """Leaves out a checkpoint whose file, of this name, is damaged; harmless for a file of another kind."""
        if self.result is not None:
            self.result.drop_checkpoint(name)
        kept = [e for e in (self.checkpoint, self.checkpoint_before) if e and Path(e.path).name != name]
        self.checkpoint, self.checkpoint_before = [*kept, None, None][:2]

    def end(self, state: State, t: float) -> None:
        """Ends the present attempt at time `t` and sets the member's state."""
        self.state = state
        self.samples_per_s = None if state == "waiting" else self.samples_per_s
        self.close_span(t, state)

    def requeue(self, t: float) -> None:
        """Lets the member wait for a place again, from time `t` on."""
        self.end("waiting", t)
        self.node, self.nodes, self.devices, self.cohort, self.feeder = None, [], [], None, None

    def close_span(self, t: float, outcome: str) -> None:
        """Ends the present span of the timeline at time `t`."""
        if self.spans and self.spans[-1].ended is None:
            self.spans[-1].ended, self.spans[-1].outcome = t, outcome


def drop_missing(metrics: dict[str, float | None]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if value is not None}
