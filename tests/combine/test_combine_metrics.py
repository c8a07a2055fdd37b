"""Metrics: known values, agreement with scikit-learn, and what holds for any predictions."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ensemble.combine import CombineError, accuracy, brier, ece, nll, reliability


def predictions(seed: int, n: int = 40, classes: int = 4) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    scores = rng.normal(size=(n, classes)) * rng.uniform(0.1, 5)
    p = np.exp(scores) / np.exp(scores).sum(axis=1, keepdims=True)
    return p.astype(np.float32), rng.integers(0, classes, n)


def test_metrics_of_a_hand_computed_case() -> None:
    p = [[0.8, 0.2], [0.6, 0.4], [0.3, 0.7], [0.9, 0.1]]
    target = [0, 1, 1, 0]
    assert accuracy(p, target) == 0.75
    assert nll(p, target) == pytest.approx(-(math.log(0.8) + math.log(0.4) + math.log(0.7) + math.log(0.9)) / 4)
    assert brier(p, target) == pytest.approx((2 * 0.04 + 2 * 0.36 + 2 * 0.09 + 2 * 0.01) / 4)
    # Every confidence falls into a bin of its own: |1-0.8|, |0-0.6|, |1-0.7|, |1-0.9|
    assert ece(p, target) == pytest.approx((0.2 + 0.6 + 0.3 + 0.1) / 4)
    curve = reliability(p, target)
    assert [(round(c, 6), a, n) for c, a, n in curve] == [
        (0.6, 0.0, 1),
        (0.7, 1.0, 1),
        (0.8, 1.0, 1),
        (0.9, 1.0, 1),
    ]


def test_a_class_declared_impossible_costs_a_finite_nll() -> None:
    assert nll([[1.0, 0.0]], [1]) == pytest.approx(-math.log(1e-12))


def test_bins_are_closed_above() -> None:
    assert reliability([[0.6, 0.4], [0.61, 0.39]], [0, 0], bins=5) == [(0.6, 1.0, 1), (0.61, 1.0, 1)]


@given(st.integers(0, 10_000))
@example(2764)
def test_nll_and_brier_agree_with_scikit_learn(seed: int) -> None:
    from sklearn.metrics import brier_score_loss, log_loss

    p, target = predictions(seed)
    q = np.maximum(p.astype(np.float64), 1e-9)  # below 1e-12 we clip, scikit-learn at float64's epsilon
    q /= q.sum(axis=1, keepdims=True)
    assert nll(q, target) == pytest.approx(log_loss(target, q, labels=range(4)))
    assert brier(q, target) == pytest.approx(brier_score_loss(target, q, labels=range(4), scale_by_half=False))


@given(st.integers(0, 10_000), st.integers(1, 30))
def test_the_reliability_curve_counts_every_row_and_gives_accuracy_and_ece(seed: int, bins: int) -> None:
    p, target = predictions(seed)
    curve = reliability(p, target, bins)
    assert sum(count for _, _, count in curve) == len(target)
    assert sum(right * count for _, right, count in curve) / len(target) == pytest.approx(accuracy(p, target))
    mean_gap = abs(p.max(axis=1).mean() - accuracy(p, target))
    assert mean_gap - 1e-6 <= ece(p, target, bins) <= 1
    assert 0 <= brier(p, target) <= 2


@pytest.mark.parametrize(
    ("p", "target", "says"),
    [
        ([[0.5, 0.5]], [2], "classes 0 ... 1, found 2"),
        ([[0.5, 0.5]], [-1], "found -1"),
        ([[0.5, 0.5]], [0.5], "integer classes"),
        ([[0.5, 0.5]], [0, 1], r"\[1, 2\] and \[2\]"),
        ([0.5], [0], r"\[n, ..., C\]"),
    ],
)
def test_what_is_not_classification_is_refused_in_one_line(p: list, target: list, says: str) -> None:
    with pytest.raises(CombineError, match=says):
        accuracy(p, target)
