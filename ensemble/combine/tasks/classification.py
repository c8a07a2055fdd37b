"""One class of several for each position: values are probabilities [n, ..., C], targets the true classes."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from ensemble.combine import formulas
from ensemble.combine.methods import Criterion
from ensemble.combine.metrics import (
    BINS,
    EPSILON,
    Array,
    CombineError,
    Curve,
    Figures,
    MetricSums,
    Positions,
    calibration_error,
    count_bins,
    find_known,
    flatten,
    fold,
    list_curve,
)
from ensemble.combine.tasks.base import Statistic, TaskMath

TOP, TOP_FROM = 5, 6
"""The top-5 accuracy is measured from six classes on: below, it is 1."""


class ClassificationMath(TaskMath):
    """Classification; an ensemble's probabilities are the weighted mean of its members'."""

    criteria: ClassVar[tuple[str, ...]] = ("nll", "accuracy", "brier")
    tail: ClassVar[int] = 1
    axes: ClassVar[tuple[str, ...]] = ("C",)

    def check_target(self, values: Array, target: Array) -> None:
        """Raise `CombineError` unless `target` [n, ...] names a class of probabilities [n, ..., C]."""
        if values.ndim < 2:
            raise CombineError(f"expected probabilities [n, ..., C] with n > 0, got {list(values.shape)}")
        super().check_target(values, target)
        if target.dtype.kind not in "iu":
            raise CombineError(f"targets must be integer classes, got {target.dtype}")
        takes_part = find_known(target)
        truth = target if takes_part.all() else target[takes_part]
        low, high = int(truth.min()), int(truth.max())
        if low < 0 or high >= values.shape[-1]:
            raise CombineError(
                f"targets must be classes 0 ... {values.shape[-1] - 1}, found {low if low < 0 else high}"
            )

    def score_rows(self, rows: Positions) -> dict[str, Array]:
        """The nll in nats, and brier, summed over the classes (0 to 2)."""
        true = _pick(rows.values, rows.target)
        # |p - e_t|^2 = |p|^2 - 2 p_t + 1, without building the one-hot matrix
        return {
            "nll": -formulas.log(true),
            "brier": np.einsum("kc,kc->k", rows.values, rows.values) - 2 * true + 1,
        }

    def statistics(self, values: Array, target: Array) -> list[Statistic]:
        """accuracy, nll, ece, brier, and from six classes on top5_accuracy."""
        rows = _flatten(values, target)
        p, t = rows.values, rows.target
        right = (p.argmax(axis=1) if p.shape[1] > 2 else p[:, 1] > p[:, 0]) == t
        columns = [np.ones(len(t)), right, *self.score_rows(rows).values()]
        if p.shape[1] >= TOP_FROM:
            columns.append(_is_in_top(p, t, _pick(p, t)))
        bins = count_bins(fold(np.maximum, p), right, rows)
        summed = np.concatenate([bins, rows.sum_by_sample(np.stack(columns))])
        return [MetricSums(summed, _finish)]

    def reliability(self, values: Array, target: Array, bins: int = BINS) -> Curve:
        """The reliability curve of the largest probability; points below the diagonal are overconfident."""
        rows = _flatten(values, target)
        right = rows.values.argmax(axis=1) == rows.target
        return list_curve(count_bins(rows.values.max(axis=1), right, rows, bins).sum(axis=1))

    def criterion(self, target: Array, name: str) -> Criterion:
        """nll, accuracy (ties by NLL) or brier, for these targets."""
        truth = target[find_known(target)]

        def true_class(values: Array) -> Array:
            return _pick(flatten(values, target).values, truth)[:, None]

        def all_classes(values: Array) -> Array:
            return flatten(values, target).values

        if name == "nll":
            return Criterion(true_class, lambda view: (_nll(view[:, 0]),), _nll_slope)
        if name == "accuracy":
            return Criterion(
                all_classes,
                lambda view: (-float(np.mean(view.argmax(axis=1) == truth)), _nll(_pick(view, truth))),
            )
        return Criterion(
            all_classes,
            lambda view: (
                float(np.mean(np.einsum("nc,nc->n", view, view, dtype=np.float64) - 2 * _pick(view, truth))),
            ),
        )

    def guess(self, values: Array, target: Array) -> Array:
        """The frequencies of the classes for each position."""
        truth = target[find_known(target)]
        return np.broadcast_to(np.bincount(truth, minlength=values.shape[-1]) / len(truth), values.shape)


def _finish(sums: Array) -> Figures:
    bins, (count, right, nll, brier, *top) = sums[: 3 * BINS], sums[3 * BINS :]
    figures = {"accuracy": right / count, "nll": nll / count, "ece": calibration_error(bins)}
    figures["brier"] = np.maximum(brier / count, 0)  # rounding may leave a hair below 0
    return figures | ({"top5_accuracy": top[0] / count} if top else {})


def _flatten(values: Array, target: Array) -> Positions:
    return flatten(np.asarray(values, dtype=np.float64), target)


def _pick(probabilities: Array, target: Array) -> Array:
    """The probability given to the true class: float64 [k]."""
    if probabilities.shape[1] == 2:
        return np.where(target == 1, probabilities[:, 1], probabilities[:, 0]).astype(np.float64)
    column: Array = probabilities[np.arange(len(target)), target].astype(np.float64)
    return column


def _is_in_top(p: Array, target: Array, true: Array) -> Array:
    """Whether the true class is among the five most probable; of equal ones the last classes are taken, as
    scikit-learn's `top_k_accuracy_score` does.
    """
    after = np.arange(p.shape[1]) > target[:, None]
    better = (p > true[:, None]) | ((p == true[:, None]) & after)
    return np.asarray(better.sum(axis=1) < TOP)


def _nll(true: Array) -> float:
    """NLL from the probabilities [k] given to the true classes."""
    return float(-formulas.log(true).mean())


def _nll_slope(view: Array) -> Array:
    slope: Array = -1 / (np.maximum(view, EPSILON) * len(view))
    return slope
