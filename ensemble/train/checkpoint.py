"""What a checkpoint of a member holds, and whether one may be gone on from.

It is the member's whole state at a step boundary: with it, and because the randomness of each step follows from
the identity (`determinism`), a member that resumes reaches the very bits of one that was never stopped.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ensemble.spec.identity import Identity, field_defaults
from ensemble.store import load_checkpoint
from ensemble.train.data_identity import difference
from ensemble.train.job import TrainingError


@dataclass
class Position:
    """How far a member is.

    Attributes:
        epoch: the own epoch in progress, 0-based.
        step: steps done in it.
        loss_sum, samples: of those steps, over all ranks.
        skipped_steps: of those steps, the ones that a loss scale overflow skipped.
        metrics: the last ones reported.
        told: what the `epoch` event said of the last epoch. A resume says it again: a controller that was killed
            may not have heard it.
    """

    epoch: int = 0
    step: int = 0
    loss_sum: float = 0.0
    samples: int = 0
    skipped_steps: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    told: dict[str, Any] | None = None

    def next_epoch(self) -> None:
        """Begin the next epoch; the metrics stay."""
        self.epoch, self.step, self.loss_sum, self.samples, self.skipped_steps = self.epoch + 1, 0, 0.0, 0, 0


def read(path: Path, identity: Identity, data: Mapping[str, Any], elastic: bool = False) -> dict[str, Any] | None:
    """The checkpoint of this member, None where there is none yet.

    Args:
        data: what is read now (`reading.training_data`).
        elastic: whether it may have been written by fewer workers: the state is alike on all of them, but for the
            residuals of error feedback (`GradientExchange.load_state_dict`), and a step is the same global batch.

    Raises:
        TrainingError: it is another member's, or this one's as it was declared before, or of other data.
    """
    if not path.exists():
        return None
    state = load_checkpoint(path)
    # What a checkpoint of an earlier version does not say had its default.
    known, asked = {**field_defaults(), **state["identity"]}, _compared(identity)
    other = [name for name in asked if known.get(name) != asked[name]]
    if elastic and "workers" in other and known["workers"] < identity.workers:
        other.remove("workers")
    if identity.first_epoch is not None and state["first_epoch"] != identity.first_epoch:
        other.append("first_epoch")
        known, asked = (
            {**known, "first_epoch": state["first_epoch"]},
            {**asked, "first_epoch": identity.first_epoch},
        )
    if other:
        differences = "; ".join(f"{name} was {known.get(name)!r}, is {asked[name]!r}" for name in other)
        raise TrainingError(
            f"{path} belongs to another identity of {identity.member}: {differences}. "
            "Declare it as it was, or take a new run directory"
        )
    changed = difference(state.get("data") or {}, data)
    if changed:
        raise TrainingError(
            f"{path} was trained on other data: {changed}. Read what was read before, or take a new run directory"
        )
    return state


def _compared(identity: Identity) -> dict[str, Any]:
    """What a checkpoint and who goes on from it have in common; once begun, the width too, though measured."""
    return {**identity.compared_fields(), "workers": identity.workers}


def pack(
    identity: Identity,
    data: Mapping[str, Any],
    first_epoch: int,
    position: Position,
    parts: Mapping[str, Any],
) -> dict[str, Any]:
    """The checkpoint.

    Args:
        data: what was read (`reading.training_data`).
        parts: the state dicts of model, optimizer, schedule and precision.
    """
    return {
        "data": dict(data),
        "identity": _compared(identity),
        "first_epoch": first_epoch,
        "position": plain(dataclasses.asdict(position)),
        **{name: plain(part) for name, part in parts.items()},
    }


def plain(value: Any) -> Any:
    """The same value, with numpy's scalars (a learning rate computed by numpy) as Python's."""
    if isinstance(value, dict):
        return {plain(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)([plain(item) for item in value]) if type(value) in (list, tuple) else list(value)
    if type(value).__module__ == "numpy" and hasattr(value, "item") and getattr(value, "ndim", 1) == 0:
        return value.item()
    return value
