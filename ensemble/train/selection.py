"""Which evaluation of a member was the best by the objective, and whether it stops early: numbers only."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal


@dataclass
class Selection:
    """The evaluations of a member so far, as far as they decide.

    Attributes:
        best: of the best evaluation: own `epoch`, `step` in it, `value` of the objective, all `metrics`; the
            earliest of equal ones. None before the first.
        reference: the value from which early stopping measures an improvement; None before the first.
        stale_epochs: epochs in a row without one.
        has_improved: whether the epoch in progress has one.
        is_stopped: whether the member trains no more epochs.
        is_measured: whether there was an evaluation.
    """

    best: dict[str, Any] | None = None
    reference: float | None = None
    stale_epochs: int = 0
    has_improved: bool = False
    is_stopped: bool = False
    is_measured: bool = False

    def add(
        self,
        mode: Literal["max", "min"] | str,
        min_delta: float,
        epoch: int,
        step: int,
        value: float,
        metrics: Mapping[str, float],
    ) -> bool:
        """Add an evaluation.

        Args:
            mode: whether the objective is maximized.
            min_delta: by how much it must be better than `reference` for early stopping.
            value: of the objective; NaN and infinities are worse than anything.

        Returns:
            Whether it is the best so far.
        """
        self.is_measured = True
        if not math.isfinite(value):
            return False
        sign = 1.0 if mode == "max" else -1.0
        if self.reference is None or sign * (value - self.reference) > min_delta:
            self.reference, self.has_improved = value, True
        if self.best is not None and sign * (value - self.best["value"]) <= 0:
            return False
        self.best = {"epoch": epoch, "step": step, "value": value, "metrics": dict(metrics)}
        return True

    def end_epoch(self, patience: int | None) -> None:
        """Count an epoch with an evaluation.

        Args:
            patience: epochs without an improvement after which the member stops; None: it does not.
        """
        self.stale_epochs = 0 if self.has_improved else self.stale_epochs + 1
        self.has_improved = False
        self.is_stopped = patience is not None and self.stale_epochs >= patience

    def as_dict(self) -> dict[str, Any]:
        """The selection as plain values; `Selection(**...)` reads them."""
        return dataclasses.asdict(self)
