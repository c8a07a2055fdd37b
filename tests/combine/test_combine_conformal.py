"""Conformal sets and intervals: against MAPIE, hand-computed cases, and the promised coverage on drawn data."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mapie.classification import SplitConformalClassifier
from mapie.conformity_scores import APSConformityScore
from mapie.regression import ConformalizedQuantileRegressor, SplitConformalRegressor
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin

from ensemble.combine import CombineError
from ensemble.combine.conformal import (
    ConformalSets,
    calibrate,
    calibrate_interval,
    calibrate_sets,
    find_threshold,
    load_conformal,
    measure,
    score_classes,
)
from ensemble.spec.task import CLASSIFICATION, IGNORED, Task, quantiles

MULTILABEL, REGRESSION, GAUSSIAN, FREE = (Task(kind) for kind in ("multilabel", "regression", "gaussian", "free"))
CQR = quantiles(0.05, 0.5, 0.95)
LEVELS = st.sampled_from([0.5, 0.8, 0.9, 0.95])


class Column(RegressorMixin, BaseEstimator):
    def __init__(self, column: int = 0) -> None:
        self.column, self.fitted_ = column, True

    def fit(self, x: Any, y: Any) -> Column:
        return self

    def predict(self, x: np.ndarray) -> np.ndarray:
        return np.asarray(x)[:, self.column]


class Given(ClassifierMixin, BaseEstimator):
    def __init__(self, classes: int = 2) -> None:
        self.classes, self.classes_, self.fitted_ = classes, np.arange(classes), True

    def fit(self, x: Any, y: Any) -> Given:
        return self

    def predict(self, x: np.ndarray) -> np.ndarray:
        return np.asarray(x).argmax(axis=1)

    def predict_proba(self, x: np.ndarray) -> np.ndarray:
        return np.asarray(x)


def draw_classes(rng: Any, n: int, classes: int, skew: float = 1.0) -> tuple[np.ndarray, np.ndarray]:
    """Probabilities [n, C] that are wrong by a power, and classes drawn by the true ones."""
    truth = rng.dirichlet(np.full(classes, 0.4), size=n)
    target = (truth.cumsum(axis=1) > rng.random((n, 1))).argmax(axis=1)
    wrong = np.maximum(truth, 1e-9) ** skew
    return wrong / wrong.sum(axis=1, keepdims=True), target


@given(seed=st.integers(0, 2**32), n=st.integers(1, 60), level=LEVELS)
def test_the_threshold_is_the_kth_smallest_score(seed: int, n: int, level: float) -> None:
    scores = np.random.default_rng(seed).normal(size=n)
    k = next(k for k in range(n + 2) if k >= round((n + 1) * level, 6))
    expected = math.inf if k > n else np.sort(scores)[k - 1]
    assert find_threshold(scores, np.ones(n, bool), level) == expected


def test_every_sample_counts_once_however_many_positions_it_has() -> None:
    for n, threshold in ((9, 8.0), (8, math.inf), (0, math.inf)):  # ten samples need no rounding up
        assert find_threshold(np.arange(float(n)), np.ones(n, bool), 0.9) == threshold
    scores, part = np.array([[0.0] * 4, [1.0] * 4, [2.0] * 4, [9.0] * 4]), np.ones((4, 4), bool)
    part[0, 1:] = False
    # weights: 1 for the score 0, then 4 x 1/4 each; (4 + 1) * 0.5 = 2.5 is reached at the third sample
    assert find_threshold(scores, part, 0.5) == 2.0
    part[3] = False  # three samples are left: 4 * 0.5 = 2
    assert find_threshold(scores, part, 0.5) == 1.0


@pytest.mark.parametrize("level", [0.8, 0.9, 0.95])
@pytest.mark.parametrize("n", [39, 99, 100, 257])
def test_thr_is_mapies_lac(n: int, level: float) -> None:
    rng = np.random.default_rng(n)
    (p, target), (new, _) = draw_classes(rng, n, 5, 2.0), draw_classes(rng, 400, 5, 2.0)
    oracle = SplitConformalClassifier(Given(5), confidence_level=level, conformity_score="lac", prefit=True)
    oracle.conformalize(p, target)
    sets = calibrate_sets(CLASSIFICATION, p, target, level=level)
    assert np.array_equal(sets.predict(new), oracle.predict_set(new)[1][..., 0])


def test_aps_is_the_smallest_set_of_the_most_probable_classes_beyond_the_threshold() -> None:
    p = np.array([[0.2, 0.5, 0.3]])
    assert score_classes("aps", p) == pytest.approx(np.array([[0.8, 0.0, 0.5]]))
    assert score_classes("thr", p) == pytest.approx(1 - p)
    sets = [ConformalSets("aps", 0.9, (q,)).predict(p)[0].tolist() for q in (0.0, 0.49, 0.51, 0.81)]
    assert sets == [[False, True, False], [False, True, False], [False, True, True], [True, True, True]]


def test_aps_scores_are_mapies() -> None:
    p, target = draw_classes(np.random.default_rng(0), 500, 6)
    oracle = APSConformityScore()
    oracle.set_external_attributes(classes=np.arange(6), random_state=7)
    cumulated, _ = oracle.get_true_label_cumsum_proba(target, p, np.arange(6))
    own = np.take_along_axis(p, target[:, None], 1)
    plain = np.take_along_axis(score_classes("aps", p), target[:, None], 1)
    assert plain == pytest.approx(cumulated - own, abs=1e-12)


@pytest.mark.parametrize("n", [39, 100, 257])
def test_intervals_are_mapies(n: int) -> None:
    rng = np.random.default_rng(n)
    x, new = rng.normal(size=(2, n, 1))
    y = x[:, 0] + rng.normal(size=n)
    oracle = SplitConformalRegressor(Column(), confidence_level=0.9, prefit=True).conformalize(x, y)
    low, high = calibrate_interval(REGRESSION, x[:, 0], y).predict(new[:, 0])
    assert np.stack([low, high], 1) == pytest.approx(oracle.predict_interval(new)[1][..., 0], abs=1e-12)

    sigma, variance = np.abs(x[:, 0]) + 0.5, (np.abs(new[:, 0]) + 0.5) ** 2
    scaled = SplitConformalRegressor(Column(), confidence_level=0.9, prefit=True)
    scaled.conformalize(0 * x, (y - x[:, 0]) / sigma)
    gaussian = calibrate_interval(GAUSSIAN, np.stack([x[:, 0], sigma**2], 1), y)
    low, high = gaussian.predict(np.stack([new[:, 0], variance], 1))
    expected = new + scaled.predict_interval(0 * new)[1][..., 0] * np.sqrt(variance)[:, None]
    assert np.stack([low, high], 1) == pytest.approx(expected, abs=1e-12)

    def spread(center: np.ndarray) -> np.ndarray:  # far too narrow
        return np.stack([center - 0.3, center, center + 0.5], axis=1)

    cqr = ConformalizedQuantileRegressor([Column(0), Column(2), Column(1)], confidence_level=0.9, prefit=True)
    cqr.conformalize(spread(x[:, 0]), y)
    expected = cqr.predict_interval(spread(new[:, 0]), symmetric_correction=True)[1][..., 0]
    low, high = calibrate_interval(CQR, spread(x[:, 0]), y).predict(spread(new[:, 0]))
    assert np.stack([low, high], 1) == pytest.approx(expected, abs=1e-12)


def coverages(rng: np.random.Generator, way: str, n: int, level: float, rounds: int) -> float:
    covered = 0.0
    for _ in range(rounds):
        if way in ("thr", "aps"):
            p, target = draw_classes(rng, n + 1, 4, 3.0)
            sets = calibrate_sets(CLASSIFICATION, p[:n], target[:n], method=way, level=level)
            covered += measure(sets, p[n:], target[n:])["coverage"]
            continue
        mean = rng.normal(size=n + 1)
        target = mean + 0.7 + rng.standard_t(3, size=n + 1) * (1 + np.abs(mean))
        task, values = {
            "absolute": (REGRESSION, mean),
            "normalised": (GAUSSIAN, np.stack([mean, np.full(n + 1, 0.2)], axis=1)),
            "cqr": (CQR, np.stack([mean - 3, mean, mean + 1], axis=1)),
        }[way]
        interval = calibrate_interval(task, values[:n], target[:n], level=level)
        covered += measure(interval, values[n:], target[n:])["coverage"]
    return covered / rounds


@pytest.mark.parametrize("way", ["thr", "aps", "absolute", "normalised", "cqr"])
def test_a_new_sample_is_covered_as_promised_however_wrong_the_model(way: str) -> None:
    n, level, rounds = 29, 0.8, 1500
    found = coverages(np.random.default_rng(5), way, n, level, rounds)
    noise = 4 * math.sqrt(level * (1 - level) / rounds)
    assert found >= level - noise
    # Scores without ties keep it from above, too; deterministic aps always holds the most probable class.
    assert way == "aps" or found <= level + 1 / (n + 1) + noise


def test_positions_are_covered_as_promised_although_those_of_a_sample_go_together() -> None:
    rng, n, level, rounds = np.random.default_rng(6), 19, 0.8, 2000
    covered, pooled = [], []
    for _ in range(rounds):
        # Samples with a large error have many positions: pooled without weights, they would count for more.
        error = np.abs(rng.normal(size=n + 1))
        length = np.minimum(1 + (error * 10).astype(int), 30)
        target = np.where(np.arange(30) < length[:, None], error[:, None] + 0.1 * rng.random((n + 1, 30)), np.nan)
        interval = calibrate_interval(REGRESSION, np.zeros((n, 30)), target[:n], level=level)
        covered.append(measure(interval, np.zeros((1, 30)), target[n:])["coverage"])
        flat = target[:n][~np.isnan(target[:n])]
        naive = calibrate_interval(REGRESSION, np.zeros(len(flat)), flat, level=level)
        pooled.append(measure(naive, np.zeros((1, 30)), target[n:])["coverage"])
    noise = 4 * math.sqrt(level * (1 - level) / rounds)
    assert level - noise <= np.mean(covered) <= level + 1 / (n + 1) + noise
    assert np.mean(pooled) > level + 1 / (n + 1) + noise


def test_positions_that_take_no_part_change_nothing() -> None:
    p, target = draw_classes(np.random.default_rng(1), 60, 3)
    padded = np.concatenate([p[:, None], np.full((60, 2, 3), 1 / 3)], axis=1)
    longer = np.concatenate([target[:, None], np.full((60, 2), IGNORED)], axis=1)
    for method in ("thr", "aps"):
        alone = calibrate_sets(CLASSIFICATION, p, target, method=method)
        assert calibrate_sets(CLASSIFICATION, padded, longer, method=method) == alone
        assert alone.predict(padded).shape == (60, 3, 3)
        assert measure(alone, padded, longer) == measure(alone, p, target)


def test_each_label_has_a_threshold_of_its_own() -> None:
    rng = np.random.default_rng(2)
    p = rng.random((800, 2))
    p[:, 1] = 0.5 + 0.4 * (p[:, 1] - 0.5)  # of which the truth knows more than the second label tells
    target = (rng.random((800, 2)) < np.stack([p[:, 0], (p[:, 1] > 0.5) * 0.98], axis=1)).astype(np.int64)
    sets = calibrate_sets(MULTILABEL, p[:400], target[:400])
    assert len(sets.thresholds) == 2 and sets.thresholds[0] != sets.thresholds[1]
    inside = sets.predict(p[400:])
    assert inside.shape == (400, 2, 2)
    truth = np.take_along_axis(inside, target[400:, :, None], axis=2)[..., 0]
    assert (truth.mean(axis=0) > 0.85).all()
    assert measure(sets, p[400:], target[400:])["coverage"] == pytest.approx(truth.mean())
    alone = [
        calibrate_sets(CLASSIFICATION, np.stack([1 - p[:400, k], p[:400, k]], 1), target[:400, k]) for k in (0, 1)
    ]
    assert sets.thresholds == (*alone[0].thresholds, *alone[1].thresholds)


def example(task: Task) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(7)
    values = {
        "classification": rng.dirichlet(np.ones(3), 50),
        "multilabel": rng.random((50, 2)),
        "regression": rng.random(50),
        "gaussian": rng.random((50, 2)) + 0.1,
        "quantiles": np.sort(rng.random((50, 3)), axis=1),
    }[task.kind]
    classes = rng.integers(0, 2, (50, 2) if task.kind == "multilabel" else 50)
    return values, classes if task.kind in ("classification", "multilabel") else rng.normal(size=50)


@pytest.mark.parametrize("task", [CLASSIFICATION, MULTILABEL, REGRESSION, GAUSSIAN, CQR], ids=lambda t: t.kind)
def test_what_is_calibrated_goes_through_json(task: Task) -> None:
    values, target = example(task)
    for few in (slice(None), slice(5)):
        for conformal in calibrate(task, values[few], target[few]):
            again = load_conformal(json.loads(json.dumps(conformal.as_record(), allow_nan=False)))
            assert again == conformal and np.array_equal(again.predict(values), conformal.predict(values))
            if few.stop == 5:  # nothing can be promised: everything is predicted
                assert measure(conformal, values, target)["coverage"] == 1


def test_quantiles_nearest_to_the_level_are_corrected_and_an_empty_interval_is_its_middle() -> None:
    for levels, columns in (((0.05, 0.5, 0.95), (0, 2)), ((0.01, 0.1, 0.5, 0.9, 0.99), (0, 4)), ((0.5,), (0, 0))):
        values = np.sort(np.random.default_rng(0).random((50, len(levels))), axis=1)
        assert calibrate_interval(quantiles(*levels), values, np.zeros(50)).columns == columns
    interval = calibrate_interval(CQR, np.array([[0.0, 5.0, 10.0]] * 50), np.full(50, 5.0))
    assert interval.threshold == -5.0 and interval.predict(np.array([[0.0, 1.0, 2.0]])) == (1.0, 1.0)


def test_what_has_no_meaning_is_refused() -> None:
    (p, target), raps = draw_classes(np.random.default_rng(0), 20, 3), {"method": "raps", "thresholds": [1.0]}
    for act in (
        lambda: calibrate(FREE, p, target),
        lambda: calibrate_sets(REGRESSION, p, target),
        lambda: calibrate_interval(CLASSIFICATION, p, target),
        lambda: load_conformal({"kind": "sets", "level": 0.9, **raps}),
        lambda: calibrate_sets(CLASSIFICATION, p, target, level=1.0),
        lambda: measure(calibrate_sets(CLASSIFICATION, p, target), p, np.full(20, IGNORED)),
    ):
        with pytest.raises(CombineError):
            act()
