"""Frameworks whose own loops train members; each module needs its framework, and imports it only when it is used.

- `lightning.fit(member, module)`: a `LightningModule` by a `Trainer`.
- `transformers.MemberTrainer(member, ...)`: a `Trainer` of Hugging Face.
- `accelerate.prepare(member, ...)`: a loop that is written for `Accelerator`.

Each reads the shared pipeline through `member.dataloader`, reports what the framework measures, and keeps the
framework's state in the member's checkpoints.
"""

from __future__ import annotations

from typing import Any


def check_member(what: str, member: Any, model: Any) -> None:
    """Raise TrainingError for arguments in another order, for a class as model, and for several workers."""
    from ensemble.train.job import TrainingError

    if not hasattr(member, "identity") or isinstance(model, type):
        raise TrainingError(f"{what}() takes the member and a model, got {member!r:.60} and {model!r:.60}")
    if member.world > 1:
        raise TrainingError(f"{what}() trains with one worker: declare workers=1")
