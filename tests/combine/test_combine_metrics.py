"""Metrics: known values, agreement with scikit-learn, and what holds for any predictions."""

from __future__ import annotations

import math

import numpy as np
import pytest
from class_figures import MATH, accuracy, nll
from hypothesis import given
from hypothesis import strategies as st

from ensemble.combine import CombineError, find_math
from ensemble.combine.split_metrics import compute
from ensemble.spec.task import IGNORED, Task


def predictions(seed: int, n: int = 40, classes: int = 4) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    scores = rng.normal(size=(n, classes)) * rng.uniform(0.1, 5)
    p = np.exp(scores) / np.exp(scores).sum(axis=1, keepdims=True)
    return p.astype(np.float32), rng.integers(0, classes, n)


def test_metrics_of_a_hand_computed_case() -> None:
    p = np.array([[0.8, 0.2], [0.6, 0.4], [0.3, 0.7], [0.9, 0.1]])
    target = np.array([0, 1, 1, 0])
    assert accuracy(p, target) == 0.75
    assert nll(p, target) == pytest.approx(-(math.log(0.8) + math.log(0.4) + math.log(0.7) + math.log(0.9)) / 4)
    assert MATH.measure(p, target)["brier"] == pytest.approx((2 * 0.04 + 2 * 0.36 + 2 * 0.09 + 2 * 0.01) / 4)
    # Every confidence falls into a bin of its own: |1-0.8|, |0-0.6|, |1-0.7|, |1-0.9|
    assert MATH.measure(p, target)["ece"] == pytest.approx((0.2 + 0.6 + 0.3 + 0.1) / 4)
    curve = MATH.reliability(p, target)
    assert [(round(c, 6), a, n) for c, a, n in curve] == [
        (0.6, 0.0, 1),
        (0.7, 1.0, 1),
        (0.8, 1.0, 1),
        (0.9, 1.0, 1),
    ]


def test_a_class_declared_impossible_costs_a_finite_nll() -> None:
    assert nll([[1.0, 0.0]], [1]) == pytest.approx(-math.log(1e-12))


def test_bins_are_closed_above() -> None:
    assert MATH.reliability(np.array([[0.6, 0.4], [0.61, 0.39]]), np.array([0, 0]), bins=5) == [
        (0.6, 1.0, 1),
        (0.61, 1.0, 1),
    ]


@given(st.integers(0, 10_000), st.integers(1, 30))
def test_the_reliability_curve_counts_every_row_and_gives_accuracy_and_ece(seed: int, bins: int) -> None:
    p, target = predictions(seed)
    curve = MATH.reliability(p, target, bins)
    assert sum(count for _, _, count in curve) == len(target)
    assert sum(right * count for _, right, count in curve) / len(target) == pytest.approx(accuracy(p, target))
    mean_gap = abs(p.max(axis=1).mean() - accuracy(p, target))
    assert mean_gap - 1e-6 <= sum(count * abs(right - sure) for sure, right, count in curve) / len(target) <= 1
    assert 0 <= MATH.measure(p, target)["brier"] <= 2


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


def test_a_label_that_nobody_has_said_anything_of_takes_no_part_in_the_mean_of_labels() -> None:
    p, target = np.array([[0.9, 0.1, 0.3], [0.2, 0.8, 0.4]]), np.array([[1, 0, IGNORED], [0, 1, IGNORED]])
    task = Task("multilabel")
    found = find_math(task).measure(p, target)
    assert found["f1_macro"] == compute(["f1_macro"], p, target, task)["f1_macro"] == 1
