"""Outputs of any kind, of which nothing is known: combined and measured by the user's functions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, NoReturn

from ensemble.combine.metrics import Array, CombineError
from ensemble.combine.tasks.base import Statistic, TaskMath

NO_MIX = (
    "outputs of the task free have no declared way of combining: declare Ensemble.combine as a function "
    "combine(values [m, n, ...]) -> [n, ...]"
)


class FreeMath(TaskMath):
    """Whatever the recipe's outputs are."""

    no_stack: ClassVar[str | None] = NO_MIX
    no_calibration: ClassVar[str | None] = (
        "outputs of the task free have no declared meaning, so they are not calibrated"
    )

    def check_target(self, values: Array, target: Array) -> None:
        """Raise `CombineError` unless there is a target for each sample."""
        if len(values) != len(target) or not len(target):
            raise CombineError(f"expected n > 0 targets for {len(values)} samples, got {len(target)}")

    def statistics(self, values: Array, target: Array) -> list[Statistic]:
        """None: only the user's metrics."""
        return []

    @property
    def default_criterion(self) -> str:
        """There is none."""
        raise CombineError(NO_MIX)

    def mix(self, values: Sequence[Array], weights: Array) -> NoReturn:
        """There is no way but the user's function."""
        raise CombineError(NO_MIX)

    def criterion(self, target: Array, name: str) -> NoReturn:
        """There is none."""
        raise CombineError(NO_MIX)

    def guess(self, values: Array, target: Array) -> NoReturn:
        """There is none."""
        raise CombineError(NO_MIX)
