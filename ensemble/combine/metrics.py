"""What the metrics of all tasks share: rows without ignored targets, sums over samples, calibration curves.

A metric that follows from sums over samples (the accuracy from hits, R2 from squares, the ECE from the sums of
each bin) is kept as these sums, so that a bootstrap weighs samples anew without looking at predictions again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ensemble.spec.split_metrics import SplitMetricLike, name_of
from ensemble.spec.task import IGNORED, Task
from ensemble.spec.task import find_known as find_known
from ensemble.spec.validation import SpecError
from pipelines.providers import import_object

Array = NDArray[Any]
Figures = dict[str, Array]
Curve = list[tuple[float, float, int]]

EPSILON = 1e-12
"""Smallest probability whose logarithm is taken: a class declared impossible costs 27.6 nats, not infinity."""

BINS = 15
"""Equal-width confidence bins of the ECE, as in Guo et al. 2017."""


class CombineError(ValueError):
    """Predictions or checkpoints that cannot be made into one model; the message is one line for the user."""


@dataclass(frozen=True)
class Positions:
    """The positions of all samples, one under the other, without those whose target is ignored.

    Attributes:
        values: [k, ...].
        target: [k].
        sample: int [k], ascending: the sample of each row.
        samples: n, how many samples there are.
    """

    values: Array
    target: Array
    sample: Array
    samples: int

    def sum_by_sample(self, columns: Array) -> Array:
        """Sums float64 [s, n] over the rows of each sample, of `columns` [s, k]."""
        if columns.shape[1] == self.samples and np.array_equal(self.sample, np.arange(self.samples)):
            return np.asarray(columns, dtype=np.float64)
        summed = np.zeros((len(columns), self.samples))
        starts = np.flatnonzero(np.concatenate([[True], self.sample[1:] != self.sample[:-1]]))
        for row, column in zip(summed, columns, strict=True):
            row[self.sample[starts]] = np.add.reduceat(column, starts, dtype=np.float64)
        return summed


def flatten(values: Array, target: Array) -> Positions:
    """The rows of predictions [n, ..., tail] whose targets [n, ...] count.

    Raises:
        CombineError: no target counts.
    """
    samples, takes_part = len(target), find_known(target).reshape(-1)
    rows = values.reshape(-1, *values.shape[target.ndim :])
    sample = np.repeat(np.arange(samples), target.size // max(samples, 1))
    if takes_part.all() and len(takes_part):
        return Positions(rows, target.reshape(-1), sample, samples)
    if not takes_part.any():
        raise CombineError(f"no target can be used: all {target.size} are NaN or {IGNORED}")
    return Positions(rows[takes_part], target.reshape(-1)[takes_part], sample[takes_part], samples)


def fold(function: np.ufunc, values: Array) -> Array:
    """`function.reduce` over the last axis; numpy alone is slow where that is short, as of classes."""
    if not 0 < values.shape[-1] < 8:
        return np.asarray(function.reduce(values, axis=-1))
    reduced = values[..., 0].copy()
    for column in range(1, values.shape[-1]):
        function(reduced, values[..., column], out=reduced)
    return reduced


def compute_defined(
    metrics: Iterable[SplitMetricLike], values: Array, target: Array, task: Task
) -> tuple[dict[str, float], dict[str, str]]:
    """Metrics of a whole split (`combine.split_metrics.compute`), also where a function of the user's fails.

    Returns:
        The metrics by name, and the names of the functions that failed, with the reason.
    """
    figures: dict[str, float] = {}
    failed: dict[str, str] = {}
    for metric in metrics:
        try:
            compute = import_object("ensemble.combine.split_metrics:compute")
            figures |= compute([metric], values, target, task)
        except SpecError as error:
            if isinstance(metric, str):
                raise
            why = error if error.__cause__ is None else f"{type(error.__cause__).__name__}: {error.__cause__}"
            failed[name_of(metric)] = " ".join(str(why).split())
    return figures, failed


@dataclass(frozen=True)
class MetricSums:
    """Metrics that follow from sums over samples.

    Attributes:
        columns: float64 [s, n]: what is summed.
        finish: makes figures, float64 [d] each, of d sets of sums [s, d].
    """

    columns: Array
    finish: Callable[[Array], Figures]

    def __call__(self, counts: Array | None = None) -> Figures:
        """The figures of d resamples.

        Args:
            counts: float64 [d, n], how often each resample holds each sample; None: once, d = 1.
        """
        sums = self.columns.sum(axis=1)[:, None] if counts is None else self.columns @ counts.T
        with np.errstate(divide="ignore", invalid="ignore"):
            return self.finish(sums)


def count_bins(confidence: Array, right: Array, rows: Positions, bins: int = BINS) -> Array:
    """What `calibration_error` needs of each sample: [3 * bins, n], of the rows in each bin of the confidence
    their number, the sum of their confidences, and how many are right.

    Equal-width bins, each open below and closed above.
    """
    edges = np.linspace(0, 1, bins + 1)
    bin_of = (confidence * bins).astype(np.int64).clip(0, bins - 1)  # but for rounding; a search is much slower
    bin_of += confidence > edges[bin_of + 1]
    bin_of -= (confidence <= edges[bin_of]) & (bin_of > 0)
    key, size = bin_of.clip(0, bins - 1) * rows.samples + rows.sample, bins * rows.samples
    wrong, hits = np.bincount(key + size * right, minlength=2 * size).astype(np.float64).reshape(2, -1)
    parts = (wrong + hits, np.bincount(key, weights=confidence, minlength=size), hits)
    return np.concatenate([part.reshape(bins, rows.samples) for part in parts])


def calibration_error(sums: Array) -> Array:
    """The expected calibration error [d] of sums [3 * bins, d] of `count_bins`: the mean over rows of |accuracy -
    confidence| of the row's bin (Guo et al. 2017, eq. 3). Of few rows it is mostly bias: of 359 perfectly
    calibrated samples it is 0.061 on average.
    """
    count, confidence, right = np.split(sums, 3)
    gap = (confidence - right) / np.maximum(count, 1)
    error: Array = (count * np.abs(gap)).sum(axis=0) / count.sum(axis=0)
    return error


def list_curve(sums: Array) -> Curve:
    """The reliability curve of sums [3 * bins]: (mean confidence, accuracy, rows) of each bin that holds a row."""
    count, confidence, right = np.split(sums, 3)
    return [(float(c / k), float(r / k), int(k)) for k, c, r in zip(count, confidence, right, strict=True) if k]


@dataclass(frozen=True)
class AreasUnderCurve:
    """The area under the ROC curve of each of L labels, their mean, for resamples: scikit-learn's `roc_auc_score`
    with `sample_weight`, for many weights at once (a label is sorted once).

    Attributes:
        name: of the figure.
        labels: of each label its rows.  Labels of one class only have no area and take no part.
    """

    name: str
    labels: tuple[Positions, ...]

    def __call__(self, counts: Array | None = None) -> Figures:
        """The mean area of d resamples (see `MetricSums.__call__`); NaN where no label has one."""
        areas = np.stack([_compute_area(rows, counts) for rows in self.labels])
        has = np.isfinite(areas)
        with np.errstate(invalid="ignore"):
            return {self.name: np.where(has, areas, 0).sum(axis=0) / has.sum(axis=0)}


def _compute_area(rows: Positions, counts: Array | None) -> Array:
    """The area under one ROC curve, [d]: the chance that a positive ranks above a negative, ties counting half."""
    order = np.argsort(rows.values, kind="stable")
    ranked, positive = rows.values[order], rows.target[order] != 0
    weight = np.ones((1, len(order))) if counts is None else counts[:, rows.sample[order]]
    starts = np.flatnonzero(np.concatenate([[True], ranked[1:] != ranked[:-1]]))
    above = np.add.reduceat(weight * positive, starts, axis=1)
    below = np.add.reduceat(weight * ~positive, starts, axis=1)
    pairs = above.sum(axis=1) * below.sum(axis=1)
    with np.errstate(invalid="ignore"):
        area: Array = (above * (below.cumsum(axis=1) - below / 2)).sum(axis=1) / pairs
    return area
