"""Lets batch normalization train on batches with a single value per channel.

In training it normalizes by the batch's own mean and variance. With a single value per channel (one sample without
spatial extent: a last batch of 1, a rank's share of 1) the variance is meaningless, and torch raises. Such a batch
is normalized by the running statistics instead, and does not update them.
"""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor, nn

#: All of torch's but SyncBatchNorm. A lazy one changes its class at the first batch.
BATCH_NORMS = (
    *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d),
    *(nn.LazyBatchNorm1d, nn.LazyBatchNorm2d, nn.LazyBatchNorm3d),
)


def guard_small_batches(model: nn.Module) -> None:
    """Let the model's batch normalization train on batches with fewer than two values per channel.

    A SyncBatchNorm counts the values of all ranks and is not changed.
    """
    for module in model.modules():
        if isinstance(module, BATCH_NORMS):
            guard = _Guard()
            module.register_forward_pre_hook(guard.before)
            module.register_forward_hook(guard.after, always_call=True)


class _Guard:
    """Puts one layer into evaluation mode during a call."""

    def __init__(self) -> None:
        self._active = False

    def before(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        values = args[0] if args else None
        small = (
            isinstance(values, Tensor)
            and values.dim() >= 2
            and math.prod((values.shape[0], *values.shape[2:])) < 2  # values per channel of [b, C, ...]
        )
        if small and module.training and module.running_mean is not None:
            self._active = True
            module.training = False

    def after(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._active:
            self._active = False
            module.training = True


def bias_and_norm(model: nn.Module) -> list[nn.Parameter]:
    """Parameters usually kept from decay and adaptation: of at most one dimension, and those of normalizations."""
    instance = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
    norms = (*BATCH_NORMS, nn.SyncBatchNorm, *instance, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)
    parameters = {id(p): p for p in model.parameters() if p.dim() <= 1}
    for module in model.modules():
        if isinstance(module, norms):
            parameters.update((id(p), p) for p in module.parameters(recurse=False))
    return list(parameters.values())
