"""Quantiles for each position: values are those of `Task.levels` [n, ..., Q], targets floats [n, ...].

An ensemble's quantiles are the weighted means of its members', level by level (Lichtendahl et al. 2013, "Is it
better to average probabilities or quantiles?"): ascending where its members' are.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from ensemble.combine.methods import Criterion
from ensemble.combine.metrics import Array, Figures, MetricSums, find_known, flatten
from ensemble.combine.tasks.base import Statistic
from ensemble.combine.tasks.regression import FloatMath, find_errors


class QuantilesMath(FloatMath):
    """Quantiles; an ensemble's are the weighted means of its members', level by level."""

    criteria: ClassVar[tuple[str, ...]] = ("pinball",)
    tail: ClassVar[int] = 1
    axes: ClassVar[tuple[str, ...]] = ("Q",)
    no_stack: ClassVar[str | None] = "regressions of single quantiles may cross: combine by 'weighted' or 'greedy'"
    no_calibration: ClassVar[str | None] = "quantiles have no factor to calibrate; see the conformal intervals"

    def statistics(self, values: Array, target: Array) -> list[Statistic]:
        """pinball (the mean over levels), crossing (the share of positions whose quantiles do not ascend), and of
        the outermost pair coverage and width.
        """
        rows = flatten(np.asarray(values, dtype=np.float64), target)
        low, high = rows.values[:, 0], rows.values[:, -1]
        columns = [np.ones(len(low)), self._pinball(rows.values - rows.target[:, None]).mean(axis=1)]
        columns.append(np.asarray((np.diff(rows.values, axis=1) < 0).any(axis=1)))
        if len(self.task.levels) > 1:
            columns += [(low <= rows.target) & (rows.target <= high), high - low]
        return [MetricSums(rows.sum_by_sample(np.stack(columns)), _finish)]

    def criterion(self, target: Array, name: str) -> Criterion:
        """The pinball loss, for these targets."""
        truth = target[find_known(target)]
        _, scale = find_errors(target)
        levels = np.array(self.task.levels)

        def view(values: Array) -> Array:
            return (flatten(np.asarray(values, dtype=np.float64), target).values - truth[:, None]) / scale

        return Criterion(
            view,
            lambda error: (float(np.mean(self._pinball(error))),),
            lambda error: np.where(error > 0, 1 - levels, -levels) / error.size,
        )

    def _pinball(self, error: Array) -> Array:
        """The pinball loss of quantiles that are `error` above the target, of each level [k, Q]."""
        levels = np.array(self.task.levels)
        loss: Array = np.maximum((1 - levels) * error, -levels * error)
        return loss

    def guess(self, values: Array, target: Array) -> Array:
        """The quantiles of the targets."""
        return np.broadcast_to(np.quantile(target[find_known(target)], self.task.levels), values.shape)


def _finish(sums: Array) -> Figures:
    count, pinball, crossing, *pair = sums
    figures = {"pinball": pinball / count, "crossing": crossing / count}
    return figures | (
        dict(zip(("coverage", "width"), (part / count for part in pair), strict=True)) if pair else {}
    )
