"""Early stopping: a callback that ends a member whose objective improves no more."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from ensemble.spec.callbacks import MemberCallback
from ensemble.train.job import NO_IMPROVEMENT

if TYPE_CHECKING:
    from ensemble.train.member import TrainContext


class StopEarly(MemberCallback):
    """Ends a member after epochs in a row without an improvement; those without an evaluation do not count.

    Args:
        min_delta: by how much the metric must be better than the best so far.
        mode: whether it is maximized ("max") or minimized ("min").
    """

    def __init__(self, patience: int, min_delta: float, metric: str, mode: str) -> None:
        self.patience, self.min_delta, self.metric, self.mode = patience, min_delta, metric, mode
        self._is_evaluated = self._has_improved = False
        self._best: float | None = None
        self._stale_epochs = 0

    def evaluated(self, member: TrainContext, metrics: Mapping[str, float]) -> None:
        """See `MemberCallback`; NaN and infinities are worse than anything."""
        value = metrics[self.metric]
        self._is_evaluated = True
        sign = 1.0 if self.mode == "max" else -1.0
        if math.isfinite(value) and (self._best is None or sign * (value - self._best) > self.min_delta):
            self._best, self._has_improved = value, True

    def end_epoch(self, member: TrainContext, epoch: int, metrics: dict[str, float]) -> None:
        """See `MemberCallback`."""
        if not self._is_evaluated:
            return
        self._stale_epochs = 0 if self._has_improved else self._stale_epochs + 1
        self._is_evaluated = self._has_improved = False
        if self._stale_epochs >= self.patience:
            member.stop(NO_IMPROVEMENT)
