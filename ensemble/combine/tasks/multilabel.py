"""Several labels a sample, each present or not: values are probabilities [n, L], targets 0 or 1."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import ClassVar

import numpy as np

from ensemble.combine.methods import Criterion
from ensemble.combine.metrics import (
    BINS,
    EPSILON,
    AreasUnderCurve,
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
    list_curve,
)
from ensemble.combine.tasks.base import Statistic, TaskMath
from ensemble.combine.tasks.stacks import LabelStacker, fit_label_stack
from ensemble.combine.tasks.temperature import fit_temperature_of, scale_probabilities

THRESHOLD = 0.5
"""A label with a probability of as much is predicted."""


class MultilabelMath(TaskMath):
    """Several labels a sample; an ensemble's probabilities are the weighted mean of its members'."""

    criteria: ClassVar[tuple[str, ...]] = ("nll", "brier", "hamming_accuracy")
    calibration: ClassVar[str | None] = "temperature"

    def explain_invalid(self, values: Array) -> str | None:
        """Returns why `values` are not probabilities of labels; None where they are."""
        shape = list(values.shape)
        if values.ndim != 2:
            return f"outputs of shape {shape} are not probabilities [n, labels]"
        if not values.size:
            return "there are no samples"
        if not np.isfinite(values).all():
            return f"outputs of shape {shape} hold NaN or infinity"
        if values.min() < -1e-6 or values.max() > 1 + 1e-6:
            return f"outputs are not probabilities of labels: {values.min():.3g} ... {values.max():.3g}"
        return None

    def normalise(self, values: Array) -> Array:
        """Probabilities between 0 and 1."""
        return np.clip(values, 0, 1)

    def check_target(self, values: Array, target: Array) -> None:
        """Raise `CombineError` unless `target` [n, L] is 0 or 1 for each of the labels of `values`."""
        super().check_target(values, target)
        known = target[find_known(target)]
        if not np.isin(known, (0, 1)).all():
            wrong = known[~np.isin(known, (0, 1))][0]
            raise CombineError(f"targets of several labels must be 0 or 1, found {wrong}")

    def statistics(self, values: Array, target: Array) -> list[Statistic]:
        """nll, brier, hamming_accuracy, ece and ece_debiased over labels, subset_accuracy, f1 and roc_auc."""
        rows = flatten(np.asarray(values, dtype=np.float64), target)
        true = _pick(rows.values, rows.target)
        right = (rows.values >= THRESHOLD) == (rows.target != 0)
        wrong = rows.sum_by_sample(~right[None])[0]
        columns = np.stack([np.ones(len(true)), right, -np.log(np.maximum(true, EPSILON)), (1 - true) ** 2])
        # A sample without any known label is none.
        has = rows.sum_by_sample(np.ones((1, len(true))))[0] > 0
        subset = np.stack([has, has & (wrong == 0)])
        bins = count_bins(rows.values, rows.target != 0, rows)
        tallies = _count_labels(values, target)
        parts = [rows.sum_by_sample(columns), subset, bins, tallies, count_scatter(bins)]
        areas = AreasUnderCurve(
            "roc_auc_macro", tuple(_select_label(values, target, i) for i in _list_known(target))
        )
        return [MetricSums(np.concatenate(parts), partial(_finish, target.shape[1])), areas]

    def reliability(self, values: Array, target: Array, bins: int = BINS) -> Curve:
        """The reliability curve of the labels' probabilities, of all labels together."""
        rows = flatten(np.asarray(values, dtype=np.float64), target)
        return list_curve(count_bins(rows.values, rows.target != 0, rows, bins).sum(axis=1))

    def criterion(self, target: Array, name: str) -> Criterion:
        """nll, brier or hamming_accuracy (ties by NLL), for these targets."""
        known = target[find_known(target)]

        def view(values: Array) -> Array:
            return _pick(flatten(np.asarray(values, dtype=np.float64), target).values, known)[:, None]

        def nll(true: Array) -> float:
            return float(-np.log(np.maximum(true, EPSILON)).mean())

        if name == "nll":
            return Criterion(
                view, lambda true: (nll(true),), lambda true: -1 / (np.maximum(true, EPSILON) * true.size)
            )
        if name == "brier":
            return Criterion(view, lambda true: (float(np.mean((1 - true) ** 2)),))

        def hits(true: Array) -> float:  # at the threshold itself a label is predicted
            return -float(np.mean(np.where(known != 0, true[:, 0] >= THRESHOLD, true[:, 0] > 1 - THRESHOLD)))

        return Criterion(view, lambda true: (hits(true), nll(true)))

    def guess(self, values: Array, target: Array) -> Array:
        """The frequency of each label."""
        known = find_known(target)
        shares = np.where(known, target, 0).sum(axis=0) / np.maximum(known.sum(axis=0), 1)
        return np.broadcast_to(shares, values.shape)

    def fit_stack(self, values: Sequence[Array], target: Array) -> tuple[LabelStacker, Array]:
        """A logistic regression for each label on the members' logits (see `stacks`)."""
        for own in values:
            self.check_target(own, target)
        return fit_label_stack(values, target)

    def fit_calibration(self, values: Array, target: Array) -> float:
        """The temperature of all logits together that makes the NLL least."""
        values, target = np.asarray(values, dtype=np.float64), np.asarray(target)
        self.check_target(values, target)
        rows = flatten(values, target)
        return fit_temperature_of(
            _stack_logits(rows.values), rows.target.astype(np.int64), rows_of_sample=values.shape[-1]
        )

    def calibrate(self, values: Array, factor: float) -> Array:
        """sigmoid(logit(values) / factor)."""
        p = np.asarray(values, dtype=np.float64)
        if factor == 1.0:
            return p
        scaled: Array = scale_probabilities(np.stack([1 - p, p], axis=-1), factor)[..., 1]
        return scaled


def _pick(probabilities: Array, target: Array) -> Array:
    """The probability given to what is true of each label."""
    return np.where(target != 0, probabilities, 1 - probabilities)


def _stack_logits(probabilities: Array) -> Array:
    """Logits of absent and present, [..., 2]."""
    both = np.stack([1 - probabilities, probabilities], axis=-1)
    logits: Array = np.log(np.maximum(both, EPSILON))
    return logits


def _list_known(target: Array) -> list[int]:
    """The labels that some sample has a target of."""
    return np.flatnonzero(find_known(target).any(axis=0)).tolist()


def _select_label(values: Array, target: Array, label: int) -> Positions:
    return flatten(np.asarray(values[:, label], dtype=np.float64), target[:, label])


def _count_labels(values: Array, target: Array) -> Array:
    """True positives, false positives, false negatives and targets of each label in each sample: [4 * L, n]."""
    known, present, predicted = find_known(target).T, (target != 0).T, (values >= THRESHOLD).T
    tallies = [known & present & predicted, known & ~present & predicted, known & present & ~predicted, known]
    return np.concatenate(tallies).astype(np.float64)


def _finish(labels: int, sums: Array) -> Figures:
    own, bins, tallies, scatter = np.split(sums, np.cumsum([6, 3 * BINS, 4 * labels]))
    count, right, nll, brier, samples, whole = own
    ece, debiased = calibration_errors(bins, scatter)
    found = {"nll": nll / count, "brier": brier / count, "hamming_accuracy": right / count}
    found |= {"subset_accuracy": whole / samples, "ece": ece, "ece_debiased": debiased}
    hit, extra, missed, targets = np.split(tallies, 4)
    has = targets > 0  # of a label without any target nothing is known
    return found | {
        "f1_micro": _compute_f1(hit.sum(axis=0), extra.sum(axis=0), missed.sum(axis=0)),
        "f1_macro": np.where(has, _compute_f1(hit, extra, missed), 0).sum(axis=0) / has.sum(axis=0),
    }


def _compute_f1(hit: Array, extra: Array, missed: Array) -> Array:
    """F1, 0 where a label is neither present nor predicted, as in scikit-learn."""
    of = 2 * hit + extra + missed
    return np.where(of > 0, 2 * hit / np.maximum(of, 1), 0.0)
