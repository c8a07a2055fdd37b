"""The contents of a member's checkpoint, and whether a member may resume from one.

A checkpoint is the member's whole state at a step boundary. The randomness of each step follows from the identity
(`seeding`), so a member that resumes reaches the same bits as one that was never stopped.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from ensemble.spec import Ensemble
from ensemble.spec.identity import Identity, field_defaults, select_warm
from ensemble.store import RunDir, load_checkpoint, load_initial_weights, save_checkpoint, weights_sha256
from ensemble.train.data_identity import describe_difference, training_data
from ensemble.train.job import Job, TrainingError

if TYPE_CHECKING:
    from torch import Tensor


@dataclass
class Position:
    """The progress of a member.

    Attributes:
        epoch: the own epoch in progress, 0-based.
        step: steps done in it.
        loss_sum, samples: of those steps, over all ranks.
        skipped_steps: those of them that an overflow of the loss scale skipped.
        metrics: the last ones reported.
        is_reported: whether they are of the epoch in progress.
        told: the fields of the last `epoch` event. A resume repeats them: a controller that was killed may not
            have received the event.
        selection: `Selection.as_dict`, where the objective decides anything.
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
    told: dict[str, Any] | None = None
    selection: dict[str, Any] = field(default_factory=dict)
    validations: list[list[Any]] = field(default_factory=list)
    stop_asked: str | None = None
    stop_reason: str | None = None
    handed_over: dict[str, float] | None = None

    def next_epoch(self) -> None:
        """Begin the next epoch; the metrics stay."""
        self.validations, self.is_reported = [], False
        self.epoch, self.step, self.loss_sum, self.samples, self.skipped_steps = self.epoch + 1, 0, 0.0, 0, 0


class Checkpointer(Protocol):
    """Loads and saves the checkpoints of one member."""

    def load(self) -> dict[str, Any] | None:
        """The checkpoint to resume from; None to begin anew.

        Raises:
            TrainingError: it is missing, belongs to another identity, or was trained on other data.
        """

    def load_initial_weights(self) -> dict[str, Tensor] | None:
        """The weights and buffers of another member to begin anew with; None: the model's own.

        Raises:
            StoreError: they are not what the log names.
        """

    def save(self, first_epoch: int, position: Position, parts: Mapping[str, Any]) -> dict[str, str]:
        """Save a checkpoint; only rank 0 calls it.

        Args:
            first_epoch: the stream epoch of the member's first own epoch.
            parts: `Optimization.state_dict`: of model, optimizer, schedule, precision, exchange, and what is kept;
                of a Recipe's member also `call` and `outputs` (`ensemble.train.call.Observation`).

        Returns:
            The fields `path` and `weights_sha256` of the `checkpoint` event.
        """


class FileCheckpointer:
    """A `Checkpointer` on the files of a run directory."""

    def __init__(self, job: Job, ensemble: Ensemble) -> None:
        self._identity, self._ensemble = job.identity, ensemble
        self._files = files = RunDir(job.run_dir)
        self._path = files.checkpoint(job.identity.member, job.attempt)
        self._is_required = job.checkpoint is not None
        # A file of this attempt itself, as when it is run again by hand, is newer than the one that the job names.
        use_named = self._is_required and not self._path.exists()
        self._source = files.member(job.identity.member) / str(job.checkpoint) if use_named else self._path

    @functools.cached_property
    def _data(self) -> dict[str, Any]:
        return training_data(self._ensemble, self._identity.params)

    def load(self) -> dict[str, Any] | None:
        """See `Checkpointer`."""
        if self._is_required and not self._source.exists():
            raise TrainingError(f"{self._source}, the checkpoint that the log names, is not there any more")
        return read(self._source, self._identity, self._data, self._ensemble.elastic)

    def load_initial_weights(self) -> dict[str, Tensor] | None:
        """See `Checkpointer`."""
        lineage = select_warm(self._identity.lineage)
        if lineage is None:
            return None
        return load_initial_weights(self._files, self._identity.member, lineage["weights_sha256"])

    def save(self, first_epoch: int, position: Position, parts: Mapping[str, Any]) -> dict[str, str]:
        """See `Checkpointer`."""
        save_checkpoint(self._path, pack(self._identity, self._data, first_epoch, position, parts))
        return {"path": str(self._path), "weights_sha256": weights_sha256(parts["model"])}


def read(path: Path, identity: Identity, data: Mapping[str, Any], elastic: bool = False) -> dict[str, Any] | None:
    """Read a member's checkpoint; None where the file does not exist.

    Args:
        data: the data that the member reads now (`data_identity.training_data`).
        elastic: whether fewer workers may have written it. All workers have the same state but for the residuals
            of error feedback (`GradientExchange.load_state_dict`), and a step is the same global batch.

    Raises:
        TrainingError: it belongs to another member or declaration, or was trained on other data.
    """
    if not path.exists():
        return None
    state = load_checkpoint(path)
    # A field that an earlier version did not save had its default.
    saved, current = {**field_defaults(), **state["identity"]}, _compared(identity)
    other = [name for name in current if saved.get(name) != current[name]]
    if elastic and "workers" in other and saved["workers"] < identity.workers:
        other.remove("workers")
    is_longer = identity.extended_from is not None and "epochs" in other
    if is_longer and saved["epochs"] >= identity.extended_from and saved["epochs"] < identity.epochs:
        other.remove("epochs")
    if identity.first_epoch is not None and state["first_epoch"] != identity.first_epoch:
        other.append("first_epoch")
        saved, current = (
            {**saved, "first_epoch": state["first_epoch"]},
            {**current, "first_epoch": identity.first_epoch},
        )
    if other:
        differences = "; ".join(f"{name} was {saved.get(name)!r}, is {current[name]!r}" for name in other)
        raise TrainingError(
            f"{path} belongs to another identity of {identity.member}: {differences}. "
            "Declare it as it was, or take a new run directory"
        )
    changed = describe_difference(state.get("data") or {}, data)
    if changed:
        raise TrainingError(
            f"{path} was trained on other data: {changed}. Read what was read before, or take a new run directory"
        )
    return state


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
        parts: see `Checkpointer.save`.
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
