"""Mixed precision: fp32, bf16 by autocast, fp16 by autocast with a dynamic loss scale.

Weights and optimizer state are fp32 always (the master copy of Jia et al. 2018, section 3.1); autocast casts
what a kernel wants narrower. fp16 has few exponents: small gradients would become 0, so the loss is multiplied
by a scale before the backward pass and gradients are divided by it after. When they overflow, the step is
skipped and the scale halved; after 2,000 good steps it is doubled (torch.amp.GradScaler). Gradients are checked
*after* their exchange: an infinity on one rank is an infinity in the sum, so all ranks skip alike.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ensemble.spec import Precision
from ensemble.train.errors import Diverged, TrainingError

#: Overflows in a row after which halving the scale is given up: 65536 halved so often is 6e-8.
MOST_SKIPPED_IN_A_ROW = 40

_AUTOCAST: dict[str, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16}
# What torch's CPU kernels say when they lack fp16; the LSTM is the first to do so.
_LACKING = ("primitive descriptor", "not implemented for 'Half'")


class MixedPrecision:
    """The precision of one member on one device.

    Args:
        precision: fp32, bf16 or fp16.
        device: where the model is.
    """

    def __init__(self, precision: Precision, device: torch.device) -> None:
        self.precision = precision
        self._device = device
        self._scaler = torch.amp.GradScaler(device.type) if precision == "fp16" else None
        if self._scaler is not None:
            # The scaler makes its scale at the first loss, and a rank need not have a sample in its first step.
            self._scaler.scale(torch.zeros((), device=device))
        self._skipped_in_a_row = 0

    @contextlib.contextmanager
    def autocast(self) -> Iterator[None]:
        """Run the block's forward pass in this precision.

        Raises:
            TrainingError: the CPU cannot do one of its operations in fp16.
        """
        if self.precision == "fp32":
            yield
            return
        try:
            with torch.autocast(self._device.type, _AUTOCAST[self.precision]):
                yield
        except RuntimeError as error:
            if self.precision == "fp16" and self._device.type == "cpu" and any(t in str(error) for t in _LACKING):
                raise TrainingError(
                    "torch cannot do an operation of this model in fp16 on the CPU (an LSTM, for one): use "
                    f"precision='bf16' ({str(error).splitlines()[0]})"
                ) from error
            raise

    def check(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Refuse what cannot be trained in this precision."""
        if self._scaler is not None and any(p.dtype == torch.float16 for p in parameters):
            raise TrainingError(
                "precision='fp16' keeps the weights in fp32: leave out model.half(), autocast casts"
            )

    def scale(self, loss: Tensor) -> Tensor:
        """The loss to call `backward` on."""
        return loss if self._scaler is None else self._scaler.scale(loss)

    def step(
        self,
        optimizer: torch.optim.Optimizer,
        parameters: Sequence[torch.nn.Parameter],
        clip_norm: float | None,
    ) -> bool:
        """Clip the true gradients and let the optimizer step; returns False where an overflow skipped it.

        Raises:
            Diverged: too many overflows in a row.
        """
        scaler = self._scaler
        if scaler is not None:
            scaler.unscale_(optimizer)
        if clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(parameters, clip_norm)
        if scaler is None:
            optimizer.step()
            return True
        scale = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        stepped = scaler.get_scale() >= scale
        self._skipped_in_a_row = 0 if stepped else self._skipped_in_a_row + 1
        if self._skipped_in_a_row >= MOST_SKIPPED_IN_A_ROW:
            raise Diverged(
                f"gradients overflowed {MOST_SKIPPED_IN_A_ROW} times in a row, down to a loss scale of "
                f"{scaler.get_scale():g}"
            )
        return stepped

    def state_dict(self) -> dict[str, Any]:
        """The loss scale and its counters; empty without one."""
        if self._scaler is None:
            return {}
        return {"scaler": self._scaler.state_dict(), "skipped_in_a_row": self._skipped_in_a_row}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state_dict`."""
        if self._scaler is not None:
            self._scaler.load_state_dict(state["scaler"])
            self._skipped_in_a_row = state["skipped_in_a_row"]


def step_schedule(schedule: Any, *, stepped: bool) -> None:
    """Step a learning-rate schedule, which counts steps of the data: also one that an overflow skipped."""
    if schedule is None:
        return
    if stepped:
        schedule.step()
        return
    with warnings.catch_warnings():
        # torch warns that the schedule went before the optimizer when the very first step was skipped
        warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")
        schedule.step()
