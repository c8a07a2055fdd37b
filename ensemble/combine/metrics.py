"""Measures class probabilities: accuracy, NLL, ECE, Brier score, reliability curve.

All take `probabilities` [n, C] and `target` int [n] (the true class of each row), compute in float64 and return
plain floats.

A model is **calibrated** when, of the samples it is 80 % sure about, 80 % are right. NLL and Brier score are
proper scoring rules: they are best in expectation exactly when the probabilities are the true ones, and so they
reward calibration and sharpness together. ECE looks at calibration alone: a model that always answers the class
frequencies has none of it wrong and is useless, so read it beside the accuracy.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[Any]

EPSILON = 1e-12
"""Smallest probability whose logarithm is taken: a class declared impossible costs 27.6 nats, not infinity."""

BINS = 15
"""Equal-width confidence bins of the ECE, as in Guo et al. 2017."""

SUM_TOLERANCE = 0.02
"""How far a row's sum may be from 1: a softmax rounded to bfloat16 (8 bits) is off by up to about this much."""


class CombineError(ValueError):
    """Predictions or checkpoints that cannot be made into one model; the message is one line for the user."""


def accuracy(probabilities: ArrayLike, target: ArrayLike) -> float:
    """Fraction of rows whose largest probability is the target's (ties: the lowest class)."""
    p, t = _validate(probabilities, target)
    return float(np.mean(p.argmax(axis=1) == t))


def nll(probabilities: ArrayLike, target: ArrayLike) -> float:
    """Mean negative log-likelihood in nats, probabilities clipped from below at `EPSILON`."""
    p, t = _validate(probabilities, target)
    return nll_of_target(target_column(p, t))


def brier(probabilities: ArrayLike, target: ArrayLike) -> float:
    """Mean over rows of the squared distance to the one-hot target: 0 (perfect) to 2 (Brier 1950)."""
    p, t = _validate(probabilities, target)
    # |p - e_t|^2 = |p|^2 - 2 p_t + 1, without building the one-hot matrix; rounding may leave a hair below 0.
    return float(max(0.0, np.mean(np.einsum("nc,nc->n", p, p) - 2 * target_column(p, t) + 1)))


def ece(probabilities: ArrayLike, target: ArrayLike, bins: int = BINS) -> float:
    """Expected calibration error: the mean over rows of |accuracy - confidence| of the row's bin.

    Guo et al. 2017, eq. 3, with `bins` equal-width bins of the largest probability, each open below and closed
    above.
    """
    curve = reliability(probabilities, target, bins)
    total = sum(count for _, _, count in curve)
    return float(sum(count * abs(right - confidence) for confidence, right, count in curve) / total)


def reliability(probabilities: ArrayLike, target: ArrayLike, bins: int = BINS) -> list[tuple[float, float, int]]:
    """The reliability curve: (mean confidence, accuracy, rows) of each bin that holds a row, by confidence.

    Points below the diagonal accuracy = confidence are overconfident. The bins are those of `ece`.
    """
    p, t = _validate(probabilities, target)
    confidence = p.max(axis=1)
    right = p.argmax(axis=1) == t
    bin_of = np.digitize(confidence, np.linspace(0, 1, bins + 1)[1:-1], right=True)
    count = np.bincount(bin_of, minlength=bins)
    confidence_sum = np.bincount(bin_of, weights=confidence, minlength=bins)
    right_sum = np.bincount(bin_of, weights=right, minlength=bins)
    return [
        (float(confidence_sum[b] / count[b]), float(right_sum[b] / count[b]), int(count[b]))
        for b in range(bins)
        if count[b]
    ]


def all_metrics(probabilities: ArrayLike, target: ArrayLike) -> dict[str, float]:
    """`{"accuracy", "nll", "ece", "brier"}` of one set of predictions."""
    return {
        "accuracy": accuracy(probabilities, target),
        "nll": nll(probabilities, target),
        "ece": ece(probabilities, target),
        "brier": brier(probabilities, target),
    }


def target_column(probabilities: Array, target: Array) -> Array:
    """The probability given to the true class: float64 [n]."""
    column: Array = probabilities[np.arange(len(target)), target].astype(np.float64)
    return column


def nll_of_target(column: Array) -> float:
    """NLL from the probabilities [n] given to the true classes."""
    return float(-np.log(np.maximum(column, EPSILON)).mean())


def explain_invalid_probabilities(outputs: Array) -> str | None:
    """Returns why `outputs` are not class probabilities [n, C]; None where they are, within rounding."""
    shape = list(outputs.shape)
    if outputs.ndim != 2 or outputs.shape[1] < 2:
        return f"outputs of shape {shape} are not probabilities [n, classes] with two classes or more"
    if not outputs.shape[0]:
        return "there are no samples"
    if not np.isfinite(outputs).all():
        return f"outputs of shape {shape} hold NaN or infinity"
    sums = outputs.sum(axis=1, dtype=np.float64)
    if outputs.min() < -1e-6 or np.abs(sums - 1).max() > SUM_TOLERANCE:
        row = int(np.abs(sums - 1).argmax())
        return (
            f"outputs of shape {shape} are not probabilities: smallest {outputs.min():.3g}, row {row} sums to "
            f"{sums[row]:.3g}"
        )
    return None


def _validate(probabilities: ArrayLike, target: ArrayLike) -> tuple[Array, Array]:
    p, t = np.asarray(probabilities, dtype=np.float64), np.asarray(target)
    check_target(p.shape, t)
    return p, t


def check_target(shape: tuple[int, ...], target: Array) -> None:
    """Raise `CombineError` unless `target` [n] names a class of probabilities of `shape` (n, C), n > 0."""
    if len(shape) != 2 or target.shape != shape[:1] or not len(target):
        raise CombineError(
            f"expected probabilities [n, C] and targets [n] with n > 0, got {list(shape)} and {list(target.shape)}"
        )
    if not np.issubdtype(target.dtype, np.integer):
        raise CombineError(f"targets must be integer classes, got {target.dtype}")
    low, high = int(target.min()), int(target.max())
    if low < 0 or high >= shape[1]:
        raise CombineError(f"targets must be classes 0 ... {shape[1] - 1}, found {low if low < 0 else high}")
