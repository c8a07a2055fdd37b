"""One number for each position: values are points [n, ...], targets floats [n, ...].

Positions, the several targets of a sample included, are pooled: errors of targets with different units should be
scaled before they are learned.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import numpy as np

from ensemble.combine.methods import Criterion
from ensemble.combine.metrics import Array, CombineError, Figures, MetricSums, Positions, find_known, flatten
from ensemble.combine.tasks.base import Statistic, TaskMath

ROUNDING = 1e-13
"""A difference of sums that is smaller, relative to them, is one of rounding."""


class FloatMath(TaskMath):
    """What tasks with float targets have in common."""

    def check_target(self, values: Array, target: Array) -> None:
        """Raise `CombineError` unless `target` [n, ...] has a number for each position of `values`."""
        super().check_target(values, target)
        if np.isinf(target).any():
            raise CombineError("targets must be finite (NaN takes no part), found infinity")


class RegressionMath(FloatMath):
    """Points; an ensemble's are the weighted mean of its members'."""

    criteria: ClassVar[tuple[str, ...]] = ("rmse", "mae")
    no_calibration: ClassVar[str | None] = (
        "points have no spread to calibrate; predict mean and variance (task gaussian) or quantiles"
    )

    def statistics(self, values: Array, target: Array) -> list[Statistic]:
        """rmse, mae, r2 and pearson."""
        rows = flatten(np.asarray(values, dtype=np.float64), target)
        return [MetricSums(rows.sum_by_sample(point_columns(rows, self.center)), finish_points)]

    def criterion(self, target: Array, name: str) -> Criterion:
        """rmse or mae, for these targets."""
        view, scale = find_errors(target)
        if name == "rmse":
            return Criterion(
                view, lambda e: (float(np.mean((e / scale) ** 2)),), lambda e: 2 * e / scale**2 / e.size
            )
        return Criterion(view, lambda e: (float(np.mean(np.abs(e / scale))),))

    def guess(self, values: Array, target: Array) -> Array:
        """The mean of the targets."""
        return np.broadcast_to(target[find_known(target)].mean(), values.shape)


def find_errors(target: Array) -> tuple[Callable[[Array], Array], float]:
    """The view of a member that its errors are, [k, 1], and the targets' scale, by which scores have no unit."""
    truth = target[find_known(target)]
    scale = float(truth.std()) or float(np.abs(truth).max()) or 1.0
    return lambda values: (flatten(np.asarray(values, dtype=np.float64), target).values - truth)[:, None], scale


def point_columns(rows: Positions, center: float | None) -> Array:
    """What `finish_points` needs of each row, [8, k]. Sums of squares are of differences to the mean, or to
    `center`, so that targets far from 0 cost no precision.
    """
    y = rows.target - (rows.target.mean() if center is None else center)
    p = rows.values - (rows.values.mean() if center is None else center)
    error = rows.values - rows.target
    return np.stack([np.ones(len(y)), error**2, np.abs(error), y, y**2, p, p**2, p * y])


def finish_points(sums: Array) -> Figures:
    """rmse, mae, r2 (1 for a perfect prediction, 0 for the mean) and pearson; NaN for targets that do not vary."""
    count, squared, absolute, y, yy, p, pp, py = sums
    vary, spread = _subtract(yy, y**2 / count), _subtract(pp, p**2 / count)
    shared = py - p * y / count
    return {
        "rmse": np.sqrt(squared / count),
        "mae": absolute / count,
        "r2": np.where(vary > 0, 1 - squared / vary, np.nan),
        "pearson": np.where((vary > 0) & (spread > 0), np.clip(shared / np.sqrt(vary * spread), -1, 1), np.nan),
    }


def _subtract(squares: Array, of_mean: Array) -> Array:
    """What a sum of squares has above that of the mean; 0 where that is rounding."""
    difference = squares - of_mean
    return np.where(difference > ROUNDING * squares, difference, 0.0)
