"""Metrics: known values, agreement with scikit-learn, and what holds for any predictions."""

from __future__ import annotations

import math

import numpy as np
import pytest
from class_figures import MATH, accuracy, nll
from hypothesis import given
from hypothesis import strategies as st

from ensemble.combine import CombineError, find_math
from ensemble.combine.metrics import BINS
from ensemble.spec.split_metrics import compute
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


def draw_calibrated(rng: np.random.Generator, n: int, steps: int) -> tuple[np.ndarray, np.ndarray]:
    """Probabilities that are the true ones; all steps of a sample are the same."""
    p = rng.dirichlet(np.ones(3), n)
    target = (p.cumsum(axis=1) > rng.random((n, 1))).argmax(axis=1)
    return np.repeat(p[:, None], steps, axis=1), np.repeat(target[:, None], steps, axis=1)


def test_the_debiased_error_knows_that_the_steps_of_a_sample_go_together() -> None:
    """Fifty equal steps a sample say no more than one. Taken as independent they leave all of the bias."""
    rng, found = np.random.default_rng(0), []
    for _ in range(100):
        p, target = draw_calibrated(rng, 100, 50)
        one = MATH.measure(p[:, 0], target[:, 0])
        many = MATH.measure(p, target)
        assert many["ece_debiased"] == pytest.approx(one["ece_debiased"], abs=1e-7)
        found.append(many)
    assert np.mean([each["ece_debiased"] for each in found]) < 0.5 * np.mean([each["ece"] for each in found])


@given(st.integers(0, 10_000))
def test_the_debiased_error_is_that_of_a_loop_over_bins_and_samples(seed: int) -> None:
    rng = np.random.default_rng(seed)
    p = rng.random((30, 4))
    target = np.where(rng.random((30, 4)) < 0.2, IGNORED, rng.random((30, 4)) < p**2)
    squared = rows = 0.0
    for low in range(BINS):
        inside = (target != IGNORED) & (np.ceil(p * BINS) == low + 1)
        samples = [(row.sum(), t[row].sum()) for row, t in zip(inside, target, strict=True) if row.any()]
        if len(samples) < 2:
            continue
        r, m = inside.sum(), len(samples)
        share = target[inside].mean()
        variance = sum((right - share * count) ** 2 for count, right in samples) * m / (m - 1) / r**2
        squared += r * ((p[inside].mean() - share) ** 2 - variance)
        rows += r
    found = find_math(Task("multilabel")).measure(p, target)["ece_debiased"]
    assert found == pytest.approx(math.sqrt(max(squared / max(rows, 1), 0)), abs=1e-9)


def test_a_label_that_nobody_has_said_anything_of_takes_no_part_in_the_mean_of_labels() -> None:
    p, target = np.array([[0.9, 0.1, 0.3], [0.2, 0.8, 0.4]]), np.array([[1, 0, IGNORED], [0, 1, IGNORED]])
    task = Task("multilabel")
    found = find_math(task).measure(p, target)
    assert found["f1_macro"] == compute(["f1_macro"], p, target, task)["f1_macro"] == 1
