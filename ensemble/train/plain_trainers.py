"""Notices a framework's own Trainer in a train function at its first step: nothing of it would be the member's."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

from torch.optim.optimizer import register_optimizer_step_pre_hook

from ensemble.train.job import TrainingError
from ensemble.train.state import TrainState

_LIGHTNING = "fit(member, module, ...) of ensemble.integrations.lightning"
#: Modules of loops, and what a member calls instead.
_LOOPS = {
    "transformers.trainer": "MemberTrainer(member, model, ...) of ensemble.integrations.transformers",
    "lightning.pytorch.trainer.trainer": _LIGHTNING,
    "pytorch_lightning.trainer.trainer": _LIGHTNING,
}


@contextlib.contextmanager
def noticing(state: TrainState) -> Iterator[None]:
    """Let steps of a framework's Trainer before `member.prepare` raise TrainingError, within the block."""

    def check(*_: Any) -> None:
        frame = None if state.prepared is not None else sys._getframe(1)
        while frame is not None:
            if instead := _LOOPS.get(frame.f_globals.get("__name__", "")):
                raise TrainingError(
                    f"the train function trains by a Trainer that knows of no member: use {instead}"
                )
            frame = frame.f_back

    handle = register_optimizer_step_pre_hook(check)
    try:
        yield
    finally:
        handle.remove()
