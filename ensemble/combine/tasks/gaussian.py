"""A normal distribution for each position: values are mean and variance [n, ..., 2], targets floats [n, ...].

An ensemble is the mixture of its members' distributions, given by its first two moments (Lakshminarayanan et al.
2017, "Simple and scalable predictive uncertainty estimation using deep ensembles", section 2.4): the mean of the
means, and the mean of the variances plus the variance of the means.
"""

from __future__ import annotations

import math
from typing import ClassVar

import numpy as np

from ensemble.combine.methods import Criterion
from ensemble.combine.metrics import Array, Figures, MetricSums, Positions, find_known, flatten
from ensemble.combine.tasks.base import Statistic
from ensemble.combine.tasks.regression import FloatMath, find_errors, finish_points, point_columns

LEVELS = tuple(np.linspace(0.05, 0.95, 19).round(2).tolist())
"""Of the central intervals whose coverage the calibration error compares with what they promise."""

SMALLEST = 1e-30
"""Smallest variance whose logarithm is taken."""


class GaussianMath(FloatMath):
    """Means and variances; an ensemble's are the moments of the mixture."""

    criteria: ClassVar[tuple[str, ...]] = ("nll", "crps", "rmse", "mae")
    tail: ClassVar[int] = 1
    axes: ClassVar[tuple[str, ...]] = ("2",)
    no_stack: ClassVar[str | None] = (
        "a regression on the members' means would have no variance: combine by 'weighted' or 'greedy'"
    )

    def statistics(self, values: Array, target: Array) -> list[Statistic]:
        """rmse, mae, r2, pearson of the means, and nll, crps, calibration_error, coverage_90."""
        from scipy.special import ndtri  # type: ignore[import-untyped]

        rows = flatten(np.asarray(values, dtype=np.float64), target)
        mean, variance = rows.values.T
        distance = np.abs(mean - rows.target) / np.sqrt(variance)
        inside = [distance <= ndtri((1 + level) / 2) for level in LEVELS]
        columns = np.stack([*self.score_rows(rows).values(), *inside])
        points = point_columns(Positions(mean, rows.target, rows.sample, rows.samples), self.center)
        return [MetricSums(rows.sum_by_sample(np.concatenate([points, columns])), _finish)]

    def score_rows(self, rows: Positions) -> dict[str, Array]:
        """The nll in nats, and the crps in units of the target."""
        from scipy.special import ndtr

        (mean, variance), error = rows.values.T, rows.values[:, 0] - rows.target
        nll = 0.5 * (np.log(2 * math.pi * variance) + (mean - rows.target) ** 2 / variance)
        return {"nll": nll, "crps": _crps(error, np.sqrt(variance), ndtr)}

    def criterion(self, target: Array, name: str) -> Criterion:
        """nll, crps, rmse or mae, for these targets. The view is the error's mean and its second moment, in units
        of the targets' scale, of which a mixture's are means.
        """
        from scipy.special import ndtr

        errors, scale = find_errors(target)

        def view(values: Array) -> Array:
            error = errors(values[..., 0])[:, 0] / scale
            variance = flatten(np.asarray(values[..., 1], dtype=np.float64), target).values / scale**2
            return np.stack([error, variance + error**2], axis=1)

        def nll(view: Array) -> float:
            variance = _find_variance(view)
            return float(np.mean(0.5 * np.log(variance) + view[:, 0] ** 2 / (2 * variance)))

        def nll_slope(view: Array) -> Array:
            variance = _find_variance(view)
            by_variance = 0.5 / variance - view[:, 0] ** 2 / (2 * variance**2)
            by_error = view[:, 0] / variance - 2 * view[:, 0] * by_variance
            return np.stack([by_error, by_variance], axis=1) / len(view)

        if name == "nll":
            return Criterion(view, lambda own: (nll(own),), nll_slope)
        if name == "crps":
            return Criterion(
                view, lambda own: (float(np.mean(_crps(own[:, 0], np.sqrt(_find_variance(own)), ndtr))),)
            )
        if name == "rmse":
            return Criterion(view, lambda own: (float(np.mean(own[:, 0] ** 2)), nll(own)))
        return Criterion(view, lambda own: (float(np.mean(np.abs(own[:, 0]))), nll(own)))

    def guess(self, values: Array, target: Array) -> Array:
        """Mean and variance of the targets."""
        truth = target[find_known(target)]
        return np.broadcast_to([truth.mean(), max(truth.var(), SMALLEST)], values.shape)


def _crps(error: Array, deviation: Array, ndtr: np.ufunc) -> Array:
    """The continuous ranked probability score of a normal distribution (Gneiting and Raftery 2007, eq. 21)."""
    z = error / deviation
    density = np.exp(-(z**2) / 2) / math.sqrt(2 * math.pi)
    score: Array = deviation * (z * (2 * ndtr(z) - 1) + 2 * density - 1 / math.sqrt(math.pi))
    return score


def _find_variance(view: Array) -> Array:
    """The variance of a distribution with this mean and second moment."""
    variance: Array = np.maximum(view[:, 1] - view[:, 0] ** 2, SMALLEST)
    return variance


def _finish(sums: Array) -> Figures:
    points, (nll, crps), inside = sums[:8], sums[8:10], sums[10:]
    count = points[0]
    coverage = inside / count
    gaps = np.abs(coverage - np.array(LEVELS)[:, None])
    return finish_points(points) | {
        "nll": nll / count,
        "crps": crps / count,
        "calibration_error": gaps.mean(axis=0),
        "coverage_90": coverage[LEVELS.index(0.9)],
    }
