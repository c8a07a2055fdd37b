"""Several labels a sample, each present or not: values are probabilities [n, L], targets 0 or 1."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from ensemble.combine import formulas
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
    calibration_error,
    count_bins,
    find_known,
    flatten,
    list_curve,
)
from ensemble.combine.tasks.base import Statistic, TaskMath

THRESHOLD = 0.5
"""A label with a probability of as much is predicted."""


class MultilabelMath(TaskMath):
    """Several labels a sample; an ensemble's probabilities are the weighted mean of its members'."""

    criteria: ClassVar[tuple[str, ...]] = ("nll", "brier", "hamming_accuracy")

    def check_target(self, values: Array, target: Array) -> None:
        """Raise `CombineError` unless `target` [n, L] is 0 or 1 for each of the labels of `values`."""
        super().check_target(values, target)
        truth = target[find_known(target)]
        if not np.isin(truth, (0, 1)).all():
            wrong = truth[~np.isin(truth, (0, 1))][0]
            raise CombineError(f"targets of several labels must be 0 or 1, found {wrong}")

    def score_rows(self, rows: Positions) -> dict[str, Array]:
        """The nll in nats, and brier, the squared error, of each label."""
        true = _pick(rows.values, rows.target)
        return {"nll": -formulas.log(true), "brier": (1 - true) ** 2}

    def statistics(self, values: Array, target: Array) -> list[Statistic]:
        """nll, brier, hamming_accuracy, ece over labels, subset_accuracy, f1 and roc_auc."""
        rows = flatten(np.asarray(values, dtype=np.float64), target)
        right = (rows.values >= THRESHOLD) == (rows.target != 0)
        wrong = rows.sum_by_sample(~right[None])[0]
        columns = np.stack([np.ones(len(right)), right, *self.score_rows(rows).values()])
        # A sample without any known label is none.
        has = rows.sum_by_sample(np.ones((1, len(right))))[0] > 0
        subset = np.stack([has, has & (wrong == 0)])
        bins = count_bins(rows.values, rows.target != 0, rows)
        tallies = _count_labels(values, target)
        parts = [rows.sum_by_sample(columns), subset, bins, tallies]
        labels = (
            flatten(np.asarray(values[:, label], dtype=np.float64), target[:, label])
            for label in np.flatnonzero(find_known(target).any(axis=0))
        )
        return [MetricSums(np.concatenate(parts), _finish), AreasUnderCurve("roc_auc_macro", tuple(labels))]

    def reliability(self, values: Array, target: Array, bins: int = BINS) -> Curve:
        """The reliability curve of the labels' probabilities, of all labels together."""
        rows = flatten(np.asarray(values, dtype=np.float64), target)
        return list_curve(count_bins(rows.values, rows.target != 0, rows, bins).sum(axis=1))

    def criterion(self, target: Array, name: str) -> Criterion:
        """nll, brier or hamming_accuracy (ties by NLL), for these targets."""
        truth = target[find_known(target)]

        def view(values: Array) -> Array:
            return _pick(flatten(np.asarray(values, dtype=np.float64), target).values, truth)[:, None]

        def nll(true: Array) -> float:
            return float(-formulas.log(true).mean())

        if name == "nll":
            return Criterion(
                view, lambda true: (nll(true),), lambda true: -1 / (np.maximum(true, EPSILON) * true.size)
            )
        if name == "brier":
            return Criterion(view, lambda true: (float(np.mean((1 - true) ** 2)),))

        def hits(true: Array) -> float:  # at the threshold itself a label is predicted
            return -float(np.mean(np.where(truth != 0, true[:, 0] >= THRESHOLD, true[:, 0] > 1 - THRESHOLD)))

        return Criterion(view, lambda true: (hits(true), nll(true)))

    def guess(self, values: Array, target: Array) -> Array:
        """The frequency of each label."""
        takes_part = find_known(target)
        shares = np.where(takes_part, target, 0).sum(axis=0) / np.maximum(takes_part.sum(axis=0), 1)
        return np.broadcast_to(shares, values.shape)


def _pick(probabilities: Array, target: Array) -> Array:
    """The probability given to what is true of each label."""
    return np.where(target != 0, probabilities, 1 - probabilities)


def _count_labels(values: Array, target: Array) -> Array:
    """True positives, false positives, false negatives and targets of each label in each sample: [4 * L, n]."""
    takes_part, present, predicted = find_known(target).T, (target != 0).T, (values >= THRESHOLD).T
    tallies = [
        takes_part & present & predicted,
        takes_part & ~present & predicted,
        takes_part & present & ~predicted,
        takes_part,
    ]
    return np.concatenate(tallies).astype(np.float64)


def _finish(sums: Array) -> Figures:
    (count, right, nll, brier, samples, whole), bins, tallies = np.split(sums, [6, 6 + 3 * BINS])
    hit, extra, missed, targets = np.split(tallies, 4)
    has = targets > 0  # of a label without any target nothing is known
    return {
        "nll": nll / count,
        "brier": brier / count,
        "hamming_accuracy": right / count,
        "subset_accuracy": whole / samples,
        "ece": calibration_error(bins),
        "f1_micro": _compute_f1(hit.sum(axis=0), extra.sum(axis=0), missed.sum(axis=0)),
        "f1_macro": np.where(has, _compute_f1(hit, extra, missed), 0).sum(axis=0) / has.sum(axis=0),
    }


def _compute_f1(hit: Array, extra: Array, missed: Array) -> Array:
    """F1, 0 where a label is neither present nor predicted, as in scikit-learn."""
    of = 2 * hit + extra + missed
    return np.where(of > 0, 2 * hit / np.maximum(of, 1), 0.0)
