"""Calibrates probabilities by temperature scaling.

Guo et al. 2017, "On Calibration of Modern Neural Networks": divide the logits by T > 0 and take the softmax
again. T > 1 softens, T < 1 sharpens, the ranking of the classes (and so the accuracy) stays. The logarithm of a
probability is a logit up to a constant per row, which the softmax removes, so no logits need to be kept; and an
ensemble's averaged probabilities are calibrated as a whole, after pooling (Rahaman and Thiery 2021: pooling
calibrated members leaves the pool underconfident).
"""

from __future__ import annotations

import math

import numpy as np

from ensemble.combine.metrics import EPSILON, Array, fold

MIN_TEMPERATURE, MAX_TEMPERATURE = 0.05, 20.0
"""Bounds of T: beyond them a model is broken rather than badly calibrated."""

PRIOR = 0.5
"""Standard deviation of log T before any row is seen. In parts of the test NLL without a temperature, pools of 4
small networks have 3.7 times it with the temperature of least NLL on wine (34 rows to fit it on), 1.14 on 300
digits (75), 0.96 on breast cancer (107), but 1.02, 1.03 and 0.92 with the prior (means of 24 partitions)."""

CHUNK = 2**20
"""Elements that are worked on at once: temporaries stay in the processor's cache."""


def fit_temperature_of(logits: Array, target: Array, rows_of_sample: int = 1) -> float:
    """The most probable temperature for these rows [k, C], or 1.0 where none is better than 1.

    It has the least NLL, summed over the rows, plus (log T)² / (2 `PRIOR`²): of few rows the NLL says little, and
    where nearly all are right it falls until the pool is far too sure. From some hundred rows on the second term
    does not count. T is 1.0 where all rows are right: nothing but a wrong row can tell how sure is too sure.

    The NLL is convex in 1/T (it is a log-sum-exp minus a linear term): a bounded one-dimensional minimisation over
    log T finds the minimum.

    NLL and ECE on the rows it was fitted on are a little optimistic, and more so when members or weights were
    chosen on the same rows.

    Args:
        rows_of_sample: rows of one sample, which count as one: the labels of a multi-label task.
    """
    from scipy.optimize import minimize_scalar  # type: ignore[import-untyped]

    own = logits[np.arange(len(target)), target]
    true, step = own.mean(), max(1, CHUNK // logits.shape[1])
    chunks = [logits[start : start + step] for start in range(0, len(logits), step)]
    if ((own[:, None] > logits).sum(axis=1) == logits.shape[1] - 1).all():
        return 1.0

    def loss(log_temperature: float) -> float:
        beta, prior = math.exp(-log_temperature), rows_of_sample * log_temperature**2 / (2 * PRIOR**2)
        summed = sum(_log_sum_exp(chunk * beta).sum() for chunk in chunks)
        return float((summed + prior) / len(logits) - true * beta)

    found = minimize_scalar(
        loss,
        bounds=(math.log(MIN_TEMPERATURE), math.log(MAX_TEMPERATURE)),
        method="bounded",
        options={"xatol": 1e-6},
    )
    return math.exp(found.x) if found.fun < loss(0.0) - 1e-9 else 1.0


def scale_probabilities(probabilities: Array, temperature: float) -> Array:
    """softmax(log(probabilities) / temperature) over the last axis, float64, of probabilities [n, ..., C] kept
    `EPSILON` away from 0.
    """
    scaled = np.empty(probabilities.shape)
    step = max(1, CHUNK * len(scaled) // max(1, scaled.size))
    for start in range(0, len(scaled), step):
        at = slice(start, start + step)
        logits = np.log(np.maximum(probabilities[at].astype(np.float64), EPSILON))
        scaled[at] = softmax(logits / temperature)
    return scaled


def softmax(logits: Array) -> Array:
    """Scores [..., C] to probabilities; large scores do not overflow."""
    powers = np.exp(logits - fold(np.maximum, logits)[..., None])
    normalised: Array = powers / fold(np.add, powers)[..., None]
    return normalised


def _log_sum_exp(logits: Array) -> Array:
    top = fold(np.maximum, logits)
    summed: Array = np.log(fold(np.add, np.exp(logits - top[:, None]))) + top
    return summed
