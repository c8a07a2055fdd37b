"""One class of several for each position: values are probabilities [n, ..., C], targets the true classes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import ClassVar

import numpy as np

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
    calibration_errors,
    count_bins,
    count_scatter,
    find_known,
    flatten,
    fold,
    list_curve,
)
from ensemble.combine.tasks.base import Statistic, TaskMath
from ensemble.combine.tasks.stacks import Stacker, fit_class_stack
from ensemble.combine.tasks.temperature import fit_temperature_of, scale_probabilities

SUM_TOLERANCE = 0.02
"""How far a row's sum may be from 1: a softmax rounded to bfloat16 (8 bits) is off by up to about this much."""

TOP, TOP_FROM = 5, 6
"""The top-5 accuracy is measured from six classes on: below, it is 1."""


class ClassificationMath(TaskMath):
    """Classification; an ensemble's probabilities are the weighted mean of its members'."""

    criteria: ClassVar[tuple[str, ...]] = ("nll", "accuracy", "brier")
    calibration: ClassVar[str | None] = "temperature"
    tail: ClassVar[int] = 1
    axes: ClassVar[tuple[str, ...]] = ("C",)

    def explain_invalid(self, values: Array) -> str | None:
        """Returns why `values` are not probabilities of classes; None where they are, within rounding."""
        shape = list(values.shape)
        if values.ndim < 2 or values.shape[-1] < 2:
            return f"outputs of shape {shape} are not probabilities [n, classes] with two classes or more"
        if not values.size:
            return "there are no samples"
        sums = fold(np.add, values)
        if not np.isfinite(sums).all():
            return f"outputs of shape {shape} hold NaN or infinity"
        if values.min() < -1e-6 or np.abs(sums - 1).max() > SUM_TOLERANCE:
            row = int(np.abs(sums - 1).argmax())
            return (
                f"outputs of shape {shape} are not probabilities: smallest {values.min():.3g}, row {row} sums to "
                f"{sums.flat[row]:.3g}"
            )
        return None

    def normalise(self, values: Array) -> Array:
        """Rows that sum to 1; those rounded to a half precision are off by up to a hundredth."""
        sums = fold(np.add, values)
        if np.abs(sums - 1).max() < 1e-4 and values.min() >= 0:
            return values
        rows = np.maximum(values, 0)
        scaled: Array = (rows / rows.sum(axis=-1, keepdims=True, dtype=np.float64)).astype(np.float32)
        return scaled

    def check_target(self, values: Array, target: Array) -> None:
        """Raise `CombineError` unless `target` [n, ...] names a class of probabilities [n, ..., C]."""
        if values.ndim < 2:
            raise CombineError(f"expected probabilities [n, ..., C] with n > 0, got {list(values.shape)}")
        super().check_target(values, target)
        if target.dtype.kind not in "iu":
            raise CombineError(f"targets must be integer classes, got {target.dtype}")
        takes_part = find_known(target)
        known = target if takes_part.all() else target[takes_part]
        low, high = int(known.min()), int(known.max())
        if low < 0 or high >= values.shape[-1]:
            raise CombineError(
                f"targets must be classes 0 ... {values.shape[-1] - 1}, found {low if low < 0 else high}"
            )

    def statistics(self, values: Array, target: Array) -> list[Statistic]:
        """accuracy, nll, ece, ece_debiased, brier, and from six classes on top5_accuracy."""
        rows = _flatten(values, target)
        p, t = rows.values, rows.target
        true = _pick(p, t)
        right = (p.argmax(axis=1) if p.shape[1] > 2 else p[:, 1] > p[:, 0]) == t
        columns = [
            np.ones(len(t)),
            right,
            -np.log(np.maximum(true, EPSILON)),
            # |p - e_t|^2 = |p|^2 - 2 p_t + 1, without building the one-hot matrix
            np.einsum("kc,kc->k", p, p) - 2 * true + 1,
        ]
        if p.shape[1] >= TOP_FROM:
            columns.append(_is_in_top(p, t, true))
        bins = count_bins(fold(np.maximum, p), right, rows)
        summed = np.concatenate([bins, rows.sum_by_sample(np.stack(columns))])
        return [MetricSums(summed, partial(_finish, len(columns)), count_scatter)]

    def reliability(self, values: Array, target: Array, bins: int = BINS) -> Curve:
        """The reliability curve of the largest probability; points below the diagonal are overconfident."""
        rows = _flatten(values, target)
        right = rows.values.argmax(axis=1) == rows.target
        return list_curve(count_bins(rows.values.max(axis=1), right, rows, bins).sum(axis=1))

    def criterion(self, target: Array, name: str) -> Criterion:
        """nll, accuracy (ties by NLL) or brier, for these targets."""
        known = target[find_known(target)]

        def true_class(values: Array) -> Array:
            return _pick(flatten(values, target).values, known)[:, None]

        def all_classes(values: Array) -> Array:
            return flatten(values, target).values

        if name == "nll":
            return Criterion(true_class, lambda view: (_nll(view[:, 0]),), _nll_slope)
        if name == "accuracy":
            return Criterion(
                all_classes,
                lambda view: (-float(np.mean(view.argmax(axis=1) == known)), _nll(_pick(view, known))),
            )
        return Criterion(
            all_classes,
            lambda view: (
                float(np.mean(np.einsum("nc,nc->n", view, view, dtype=np.float64) - 2 * _pick(view, known))),
            ),
        )

    def guess(self, values: Array, target: Array) -> Array:
        """The frequencies of the classes for each position."""
        known = target[find_known(target)]
        return np.broadcast_to(np.bincount(known, minlength=values.shape[-1]) / len(known), values.shape)

    def fit_stack(self, values: Sequence[Array], target: Array) -> tuple[Stacker, Array]:
        """A multinomial logistic regression on the members' log-probabilities (see `stacks`)."""
        for own in values:
            self.check_target(own, target)
        return fit_class_stack(values, target)

    def fit_calibration(self, values: Array, target: Array) -> float:
        """The temperature of least NLL (see `temperature`)."""
        values, target = np.asarray(values, dtype=np.float64), np.asarray(target)
        self.check_target(values, target)
        rows = flatten(values, target)
        return fit_temperature_of(np.log(np.maximum(rows.values, EPSILON)), rows.target)

    def calibrate(self, values: Array, factor: float) -> Array:
        """softmax(log(values) / factor)."""
        p = np.asarray(values, dtype=np.float64)
        return p if factor == 1.0 else scale_probabilities(p, factor)


def _finish(columns: int, sums: Array) -> Figures:
    bins, own, scatter = np.split(sums, [3 * BINS, 3 * BINS + columns])
    count, right, nll, brier, *top = own
    ece, debiased = calibration_errors(bins, scatter)
    found = {"accuracy": right / count, "nll": nll / count, "ece": ece, "ece_debiased": debiased}
    found["brier"] = np.maximum(brier / count, 0)  # rounding may leave a hair below 0
    return found | ({"top5_accuracy": top[0] / count} if top else {})


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
    return float(-np.log(np.maximum(true, EPSILON)).mean())


def _nll_slope(view: Array) -> Array:
    slope: Array = -1 / (np.maximum(view, EPSILON) * len(view))
    return slope
