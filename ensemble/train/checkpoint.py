"""The contents of a member's checkpoint, and whether a member may resume from one.

A checkpoint is the member's whole state at a step boundary. The randomness of each step follows from the identity
(`seeding`), so a member that resumes reaches the same bits as one that was never stopped.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ensemble.spec import Ensemble
from ensemble.spec.identity import Identity, field_defaults, select_warm
from ensemble.store import (
    DamagedError,
    RunDir,
    load_checkpoint,
    load_initial_state,
    save_checkpoint,
    weights_sha256,
)
from ensemble.train.data_identity import describe_difference, training_data
from ensemble.train.job import Job, ShapeMismatchError, TrainingError
from ensemble.train.own_tensors import explain_other_base, own_state

if TYPE_CHECKING:
    from torch import nn

#: Parameters and buffers that a message names.
MOST_NAMED = 4

#: Parts of a checkpoint without which a member that has ended cannot be used.
_OF_USE = (
    "data",
    "identity",
    "first_epoch",
    "position",
    "model",
    "structure",
    "base",
    "loose",
    "answers",
    "exchange",
    "kept",
    "call",
    "outputs",
    "callbacks",
)


@dataclass
class Position:
    """The progress of a member.

    Attributes:
        epoch: the own epoch in progress, 0-based.
        skipped_steps: those of them that an overflow of the loss scale skipped.
        last_epoch_event: the fields of the last `epoch` event. A resume repeats them: a controller that was killed
            may not have received the event.
        selection: a `Selection`, where the objective decides anything.
        validations: [step, metrics] of the evaluations within the epoch in progress.
        stop_asked: why its train function ends it after the epoch in progress; None where it does not.
        stop_reason: why it has ended it before its last epoch; None where it has not.
        handed_over: the metrics of weights that its train function has given (`use_weights`); None: it has not.
    """

    epoch: int = 0
    step: int = 0
    loss_sum: float = 0.0
    samples: int = 0
    skipped_steps: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    is_reported: bool = False
    last_epoch_event: dict[str, Any] | None = None
    selection: dict[str, Any] = field(default_factory=dict)
    validations: list[list[Any]] = field(default_factory=list)
    stop_asked: str | None = None
    stop_reason: str | None = None
    handed_over: dict[str, float] | None = None

    def next_epoch(self) -> None:
        """Begin the next epoch; the metrics stay."""
        self.validations, self.is_reported = [], False
        self.epoch, self.step, self.loss_sum, self.samples, self.skipped_steps = self.epoch + 1, 0, 0.0, 0, 0


@dataclass
class Selection:
    """The best evaluation of a member so far.

    Attributes:
        best: its own `epoch`, `step` in it, `value` of the objective, all `metrics`; the earliest of equal ones.
            None before the first.
    """

    best: dict[str, Any] | None = None
    is_measured: bool = False

    def add(self, mode: str, epoch: int, step: int, value: float, metrics: Mapping[str, float]) -> bool:
        """Add an evaluation.

        Args:
            mode: whether the objective is maximized ("max") or minimized ("min").
            value: of the objective; NaN and infinities are worse than anything.

        Returns:
            Whether it is the best so far.
        """
        self.is_measured = True
        sign = 1.0 if mode == "max" else -1.0
        if not math.isfinite(value) or (self.best is not None and sign * (value - self.best["value"]) <= 0):
            return False
        self.best = {"epoch": epoch, "step": step, "value": value, "metrics": dict(metrics)}
        return True


class Checkpointer:
    """Loads and saves the checkpoints of one member, in the run directory."""

    def __init__(self, job: Job, ensemble: Ensemble) -> None:
        self._identity, self._ensemble = job.identity, ensemble
        self._files, self._attempt, self._checkpoints = RunDir(job.run_dir), job.attempt, job.checkpoints
        self._loaded: Path | None = None
        self._accepts_data = job.accepts_data

    @functools.cached_property
    def _data(self) -> dict[str, Any]:
        return training_data(self._ensemble, self._identity.params)

    def load(self, on_damage: Callable[[str, str], None]) -> dict[str, Any] | None:
        """The checkpoint to resume from: the last one, or the one before where that is damaged; None: begin anew.

        Args:
            on_damage: called with the name of each file that is damaged or gone, and what is wrong with it.
        """
        for name, digest in self._checkpoints:  # no others: the log vouches for these
            path = self._files.member(self._identity.member) / name
            try:
                data, self._loaded = None if self._accepts_data else self._data, path
                return read(path, self._identity, data, self._ensemble.elastic, digest)
            except DamagedError as error:
                on_damage(path.name, str(error))
        return None

    def check_code(self) -> None:
        """Raise StoreError where another user could have written the checkpoint that was loaded."""
        assert self._loaded is not None
        self._files.check_owners(self._loaded)

    def load_initial_weights(self) -> dict[str, Any] | None:
        """The parts `model` and `loose` of another member to begin anew with; None: the model's own."""
        lineage = select_warm(self._identity.lineage)
        if lineage is None or lineage.get("whole"):
            return None
        digest = lineage["weights_sha256"]
        return load_initial_state(self._files, self._identity.member, digest, ("model", "base", "loose"))

    def load_inherited(self) -> dict[str, Any] | None:
        """The checkpoint of another member from which a member of a population goes on; None: it begins anew."""
        lineage, member = self._identity.lineage, self._identity.member
        if lineage is None or not lineage.get("whole"):
            return None
        state = load_initial_state(self._files, member, lineage["weights_sha256"], file_digest=lineage["digest"])
        data = training_data(self._ensemble, state["identity"]["params"])  # a pipeline may go by hyperparameters
        if changed := describe_difference(state["data"], data):
            raise TrainingError(f"{lineage['from']}, from which {member} goes on, read other data: {changed}")
        return state

    def save(self, first_epoch: int, position: Position, parts: Mapping[str, Any]) -> dict[str, str]:
        """Save a checkpoint; only rank 0 calls it.

        Returns:
            The fields `path`, `digest` and `weights_sha256` of the `checkpoint` event.
        """
        path = self._files.checkpoint(self._identity.member, self._attempt, position.epoch, position.step)
        digest = save_checkpoint(path, pack(self._identity, self._data, first_epoch, position, parts))
        return {"path": str(path), "digest": digest, "weights_sha256": weights_sha256(parts["model"])}


def read(
    path: Path,
    identity: Identity,
    data: Mapping[str, Any] | None,
    elastic: bool = False,
    digest: str | None = None,
) -> dict[str, Any]:
    """Read a member's checkpoint.

    Args:
        data: the data that the member reads now (`data_identity.training_data`); None: it may have read any.
        elastic: whether fewer workers may have written it. All workers have the same state but for the residuals
            of error feedback (`GradientExchange.load_state_dict`), and a step is the same global batch.
        digest: of the file, by the log; None: not known.
    """
    state = load_checkpoint(path, digest=digest)
    # A field that came with a later version of this format had its default.
    saved = {**field_defaults(), **state["identity"], "first_epoch": state["first_epoch"]}
    current = {**_compared(identity), "first_epoch": identity.first_epoch}
    other = [name for name in current if saved[name] != current[name]]
    is_longer = identity.epochs_before is not None and identity.epochs_before <= saved["epochs"] < identity.epochs
    allowed = {
        "workers": elastic and saved["workers"] < identity.workers,
        "epochs": is_longer,
        "first_epoch": identity.first_epoch is None,
    }
    if other := [name for name in other if not allowed.get(name)]:
        differences = "; ".join(f"{name} was {saved[name]!r}, is {current[name]!r}" for name in other)
        raise TrainingError(
            f"{path} belongs to another identity of {identity.member}: {differences}. Declare it as it was, or "
            "use a new run directory"
        )
    changed = None if data is None else describe_difference(state["data"], data)
    if changed:
        raise TrainingError(
            f"{path} was trained on other data: {changed}. Read the earlier data, accept these (--accept-data), "
            "or use a new run directory"
        )
    return state


def check_fit(model: nn.Module, saved: Mapping[str, Any], source: str) -> None:
    """Check that weights have the names and shapes of a model's parameters and buffers, and belong to its base.

    Args:
        saved: the parts `model` and, where it is known on which base these were trained, `base`.
        source: the member or the file whose weights they are, for the message.
    """
    from torch.nn.parameter import is_lazy

    own, weights = own_state(model), saved["model"]
    other_base = explain_other_base(model, saved) if "base" in saved else None
    differences = [] if other_base is None else [other_base]
    differences += [f"{name} is only in {source}" for name in weights if name not in own]
    for name, tensor in own.items():
        if name not in weights:
            differences.append(f"{source} has no {name}")
        elif not is_lazy(tensor) and tensor.shape != weights[name].shape:
            differences.append(f"{name} is {list(tensor.shape)}, in {source} {list(weights[name].shape)}")
    if differences:
        more = f"; and {len(differences) - MOST_NAMED} more" if len(differences) > MOST_NAMED else ""
        raise ShapeMismatchError(
            f"the model cannot start with the weights of {source}: {'; '.join(differences[:MOST_NAMED])}{more}. "
            "Start it without them, or load a part of them in Recipe.model"
        )


def keep_weights_only(path: Path, target: Path, digest: str | None) -> str:
    """Write what is needed of a member that has ended: its weights, how they are used, and where they come from.

    A member can be evaluated with it, and others can start with its weights; it cannot be trained further.

    Args:
        digest: of the checkpoint, by the log; None: not known.

    Returns:
        The digest of the new file.
    """
    state = load_checkpoint(path, _OF_USE, digest)
    state["exchange"] = {name: state["exchange"][name] for name in ("plan", "world")}
    if (kept := state.get("kept")) is not None:
        state["kept"] = {"is_best": kept["is_best"]}
    state["callbacks"] = []
    return save_checkpoint(target, state)


def _compared(identity: Identity) -> dict[str, Any]:
    """The fields that a checkpoint and a resuming member must share; the width too, though it may be measured."""
    return {**identity.compared_fields(), "workers": identity.workers}


def pack(
    identity: Identity,
    data: Mapping[str, Any],
    first_epoch: int,
    position: Position,
    parts: Mapping[str, Any],
) -> dict[str, Any]:
    """Assemble a checkpoint.

    Args:
        data: the data that the member reads (`data_identity.training_data`).
        parts: `Optimization.state_dict`, and what else `Lifecycle.save` adds.
    """
    return {
        "data": dict(data),
        "identity": _compared(identity),
        "first_epoch": first_epoch,
        "position": to_builtin(dataclasses.asdict(position)),
        **{name: to_builtin(part) for name, part in parts.items()},
    }


def to_builtin(value: Any) -> Any:
    """Convert numpy's scalars (a learning rate computed by numpy) to Python's, in nested containers."""
    if isinstance(value, dict):
        return {to_builtin(key): to_builtin(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)([to_builtin(item) for item in value]) if type(value) in (list, tuple) else list(value)
    if type(value).__module__ == "numpy" and hasattr(value, "item") and getattr(value, "ndim", 1) == 0:
        return value.item()
    return value
