"""Mixed precision: fp32, bf16 by autocast, fp16 by autocast with a loss scale (torch.amp.GradScaler).

Weights and optimizer state are fp32 always (Jia et al. 2018, section 3.1). A static scale (Svyatkovskiy et al.
2019) stays as it is; bf16 may have one too. Gradients are checked *after* their exchange: an infinity on one rank
is one in the sum, so all ranks skip alike.
"""

from __future__ import annotations

import contextlib
import functools
import math
import warnings
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ensemble.comm.sparse_gradients import clip_gradients
from ensemble.spec.identity import Precision
from ensemble.train.job import Diverged, TrainingError
from pipelines.environment.processor import has_fast_bf16

#: Overflows in a row after which a member is given up: 65536 halved so often is 6e-8.
MAX_SKIPPED_IN_A_ROW = 40

_AUTOCAST: dict[str, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16}
# What torch says where a CPU kernel lacks fp16.
_LACKING = ("not implemented for 'Half'", "primitive descriptor", "Low precision dtypes not supported")
# Share of a target's standard deviation that rounding may have without a word.
_COARSE = 0.05
# Good steps after which the scale is doubled: more than a member has.
_NEVER = 2**31 - 1
_NOTHING = contextlib.nullcontext()


class MixedPrecision:
    """The precision of one member on one device.

    Args:
        precision: fp32, bf16 or fp16.
        loss_scale: of fp16: "dynamic", or a factor that never changes. Of bf16: "dynamic" is none, or a factor.
            fp32 has none.

    Attributes:
        grad_norm: of the last step, before it was clipped; None where nothing is.
        loss_scale: the factor of the loss in the backward pass; 1 without scaling.
        largest: the largest number of fp16; of others infinity, as theirs is that of fp32.
        may_skip: whether a step may be skipped because a scaled gradient overflowed.
    """

    def __init__(
        self, precision: Precision, device: torch.device, loss_scale: float | Literal["dynamic"] = "dynamic"
    ) -> None:
        self.precision, self._device = precision, device
        self.grad_norm: Tensor | None = None
        self._static = None if loss_scale == "dynamic" or precision == "fp32" else float(loss_scale)
        self._scaler: torch.amp.GradScaler | None = None
        if self._static is not None:
            self._scaler = torch.amp.GradScaler(device.type, init_scale=self._static, growth_interval=_NEVER)
        elif precision == "fp16":
            self._scaler = torch.amp.GradScaler(device.type)
        if self._scaler is not None:
            # The scaler makes its scale at the first loss, and a rank need not have a sample in its first step.
            self._scaler.scale(torch.zeros((), device=device))
        self.may_skip = self._scaler is not None
        self._read_scale()
        self._skipped_in_a_row = 0
        self.largest = torch.finfo(torch.float16).max if precision == "fp16" else math.inf

    def suspect(self, lr: float) -> str:
        """What may have made a loss that is not finite, to be put behind a message."""
        if self.precision == "fp16":
            return f", in fp16, where numbers end at {self.largest:g}, at learning rate {lr:g}"
        return f", at learning rate {lr:g}"

    def describe_coarse(self, values: Tensor, target: Tensor) -> str | None:
        """Say that predictions in 16 bits cannot tell a target's numbers apart; None where they can.

        Args:
            values: the predictions; some that are no numbers of 16 bits were computed in more.
            target: float64; NaN takes no part.
        """
        dtype, known = _AUTOCAST.get(self.precision), target[torch.isfinite(target)]
        if dtype is None or not known.is_floating_point() or bool((values.to(dtype) != values).any()):
            return None
        if not bool((known - known.to(dtype)).square().mean() > _COARSE**2 * known.var()):
            return None
        return (
            f"predictions in {self.precision} cannot tell the numbers of the target apart, which are far from 0 "
            "and close together: Recipe(target_scale=stages.mean_std(SOURCE, FIELD)), or precision='fp32'"
        )

    def _read_scale(self) -> None:
        """Read the scale from the device, once a step, since it waits for the device."""
        self.loss_scale = 1.0 if self._scaler is None else float(self._scaler.get_scale())

    def autocast(self) -> contextlib.AbstractContextManager[None]:
        """Return a context manager for a forward pass in this precision; it explains what the CPU cannot do."""
        return _NOTHING if self.precision == "fp32" else self._autocast()

    @contextlib.contextmanager
    def _autocast(self) -> Iterator[None]:
        with self._explain(), torch.autocast(self._device.type, _AUTOCAST[self.precision]):
            yield

    def explain_missing_kernel(self) -> contextlib.AbstractContextManager[None]:
        """Explain, in a TrainingError, that the CPU lacks a kernel for fp16."""
        is_possible = self.precision == "fp16" and self._device.type == "cpu"
        return self._explain() if is_possible else _NOTHING

    @contextlib.contextmanager
    def _explain(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            if self.precision == "fp16" and self._device.type == "cpu" and any(t in str(error) for t in _LACKING):
                raise TrainingError(
                    "torch cannot do an operation of this model in fp16 on the CPU: use precision='bf16' or "
                    f"'fp32', or a GPU ({str(error).splitlines()[0]})"
                ) from error
            raise

    def prepare(self, model: nn.Module) -> None:
        """Reject a model that cannot be trained in this precision, and select kernels that can."""
        if self._scaler is not None and any(p.dtype == torch.float16 for p in model.parameters()):
            raise TrainingError(
                f"precision={self.precision!r} keeps the weights in fp32: leave out model.half(), autocast casts"
            )
        dtype = _AUTOCAST.get(self.precision)
        if dtype is None or self._device.type != "cpu":
            return
        if not has_fast_bf16():
            warnings.warn(
                f"precision={self.precision!r}: this processor has no AVX-512; convolutions and matrix "
                "products take several times as long without it as in 'fp32'",
                stacklevel=2,
            )
        if not has_onednn_lstm(dtype):
            lstm_without_onednn(model)

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the gradients by the loss scale; `step` follows."""
        if self._scaler is not None:
            self._scaler.unscale_(optimizer)

    def step(
        self, optimizer: torch.optim.Optimizer, parameters: Sequence[nn.Parameter], clip_norm: float | None
    ) -> bool:
        """Clip the true gradients and let the optimizer step; returns False where an overflow skipped it."""
        if clip_norm is not None:
            self.grad_norm = clip_gradients(parameters, clip_norm)
        if (scaler := self._scaler) is None:
            optimizer.step()
            return True
        before = self.loss_scale
        scaler.step(optimizer)
        scaler.update()
        self._read_scale()
        stepped = self.loss_scale >= before
        if self._static is not None and not stepped:
            scaler.update(self._static)
            self._read_scale()
        self._skipped_in_a_row = 0 if stepped else self._skipped_in_a_row + 1
        if self._skipped_in_a_row >= MAX_SKIPPED_IN_A_ROW:
            where = f"down to a loss scale of {self.loss_scale:g}"
            if self._static is not None:
                where = f"at the static loss scale {self._static:g}: take a smaller one, or loss_scale='dynamic'"
            raise Diverged(f"gradients overflowed {MAX_SKIPPED_IN_A_ROW} times in a row, {where}")
        return stepped

    def state_dict(self) -> dict[str, Any]:
        """The loss scale and its counters; empty without one."""
        if self._scaler is None:
            return {}
        return {"scaler": self._scaler.state_dict(), "skipped_in_a_row": self._skipped_in_a_row}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a `state_dict`."""
        if self._scaler is not None:
            self._scaler.load_state_dict(state["scaler"])
            self._read_scale()
            self._skipped_in_a_row = state["skipped_in_a_row"]


def step_schedule(schedule: Any, *, stepped: bool) -> None:
    """Step a learning-rate schedule, which counts steps of the data: also one that an overflow skipped."""
    if schedule is None:
        return
    if stepped:
        schedule.step()
        return
    with warnings.catch_warnings():
        # torch warns if the schedule steps before the optimizer, as when the first step was skipped
        warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")
        schedule.step()


@functools.cache
def has_onednn_lstm(dtype: torch.dtype) -> bool:
    """Whether oneDNN trains an LSTM in `dtype` on this processor, found by training a small one.

    It has no fp16 kernel, and one for bf16 only where the processor has AVX-512; torch chooses it without asking.
    """
    with torch.random.fork_rng(devices=[]):
        layer, steps = nn.LSTM(4, 4), torch.zeros(2, 1, 4)
    try:
        with torch.enable_grad(), torch.autocast("cpu", dtype):
            layer(steps)[0].float().sum().backward()
    except RuntimeError:
        return False
    return True


def lstm_without_onednn(model: nn.Module) -> None:
    """Compute the model's LSTMs by torch's own kernel: matrix products in 16 bits and the cell in fp32.

    It is slower than oneDNN's and correct; GRU and RNN have only that kernel.
    """
    for module in model.modules():
        if isinstance(module, nn.LSTM):
            switch = _Switch()
            module.register_forward_pre_hook(switch.before)
            module.register_forward_hook(switch.after, always_call=True)


class _Switch:
    """Disables oneDNN during a call; the flag is global to the process."""

    _was = True

    def before(self, module: nn.Module, args: Any) -> None:
        self._was = bool(torch.backends.mkldnn.enabled)
        torch.backends.mkldnn.enabled = False  # type: ignore[assignment]

    def after(self, module: nn.Module, args: Any, output: Any) -> None:
        torch.backends.mkldnn.enabled = self._was  # type: ignore[assignment]
