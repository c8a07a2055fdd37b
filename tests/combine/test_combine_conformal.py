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
from scipy.stats import binom
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin

from ensemble.combine import CombineError
from ensemble.combine.conformal import (
    Conformal,
    ConformalSets,
    calibrate,
    calibrate_interval,
    calibrate_sets,
    load_conformal,
    measure,
)
from ensemble.combine.conformal_scores import choose_tuning, draw_uniform, find_threshold, score_classes
from ensemble.spec.task import CLASSIFICATION, IGNORED, Task, quantiles

MULTILABEL, REGRESSION, GAUSSIAN, FREE = (Task(kind) for kind in ("multilabel", "regression", "gaussian", "free"))
CQR = quantiles(0.05, 0.5, 0.95)
LEVELS = st.sampled_from([0.5, 0.8, 0.9, 0.95])


class Column(RegressorMixin, BaseEstimator):
    """A fitted regressor for MAPIE: the prediction is a column of X."""

    def __init__(self, column: int = 0) -> None:
        self.column, self.fitted_ = column, True

    def fit(self, x: Any, y: Any) -> Column:
        return self

    def predict(self, x: np.ndarray) -> np.ndarray:
        return np.asarray(x)[:, self.column]


class Given(ClassifierMixin, BaseEstimator):
    """A fitted classifier for MAPIE: X are the probabilities."""

    def __init__(self, classes: int = 2) -> None:
        self.classes, self.classes_, self.fitted_ = classes, np.arange(classes), True

    def fit(self, x: Any, y: Any) -> Given:
        return self

    def predict(self, x: np.ndarray) -> np.ndarray:
        return np.asarray(x).argmax(axis=1)

    def predict_proba(self, x: np.ndarray) -> np.ndarray:
        return np.asarray(x)


def draw_classes(
    rng: np.random.Generator, n: int, classes: int, skew: float = 1.0
) -> tuple[np.ndarray, np.ndarray]:
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


def test_ten_samples_and_a_level_of_nine_tenths_need_no_rounding_up() -> None:
    assert find_threshold(np.arange(9.0), np.ones(9, bool), 0.9) == 8.0
    assert find_threshold(np.arange(8.0), np.ones(8, bool), 0.9) == math.inf
    assert find_threshold(np.empty(0), np.ones(0, bool), 0.9) == math.inf


def test_every_sample_counts_once_however_many_positions_it_has() -> None:
    scores = np.array([[0.0] * 4, [1.0] * 4, [2.0] * 4, [9.0] * 4])
    part = np.ones((4, 4), bool)
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
    assert score_classes("aps", p, np.array([0.5])) == pytest.approx(np.array([[0.9, 0.25, 0.65]]))
    assert score_classes("thr", p) == pytest.approx(1 - p)
    sets = [ConformalSets("aps", 0.9, (q,)).predict(p)[0].tolist() for q in (0.0, 0.49, 0.51, 0.81)]
    assert sets == [[False, True, False], [False, True, False], [False, True, True], [True, True, True]]


def test_aps_scores_are_mapies() -> None:
    p, target = draw_classes(np.random.default_rng(0), 500, 6)
    oracle = APSConformityScore()
    oracle.set_external_attributes(classes=np.arange(6), random_state=7)
    random = oracle.get_conformity_scores(target, p, y_enc=target)[:, 0]
    # MAPIE takes u times p_y off the sum with y; here 1 - u times p_y comes on top of the sum without y.
    draws = 1 - np.random.RandomState(7).uniform(size=len(p))
    ours = np.take_along_axis(score_classes("aps", p, draws), target[:, None], 1)[:, 0]
    assert ours == pytest.approx(random, abs=1e-12)
    cumulated, _ = oracle.get_true_label_cumsum_proba(target, p, np.arange(6))
    own = np.take_along_axis(p, target[:, None], 1)
    plain = np.take_along_axis(score_classes("aps", p), target[:, None], 1)
    assert plain == pytest.approx(cumulated - own, abs=1e-12)


def test_raps_scores_penalise_ranks_beyond_the_free_ones() -> None:
    p = np.array([[0.2, 0.5, 0.3], [0.4, 0.4, 0.2]])
    found = score_classes("raps", p, lam=0.1, k_reg=1)
    assert found == pytest.approx(np.array([[0.8 + 0.2, 0.0, 0.5 + 0.1], [0.0, 0.4 + 0.1, 0.8 + 0.2]]))
    drawn = score_classes("raps", p, np.array([0.5, 1.0]), lam=0.1, k_reg=2)
    assert drawn == pytest.approx(np.array([[0.9 + 0.1, 0.25, 0.65], [0.4, 0.8, 1.0 + 0.1]]))
    assert np.array_equal(score_classes("raps", p, lam=0.0, k_reg=1), score_classes("aps", p))


def brute_force_raps(p: np.ndarray, target: np.ndarray, level: float) -> tuple[float, int, float]:
    """lam, k_reg and the threshold of a sample at a time, by the definitions alone."""

    def ranked(row: np.ndarray) -> list[int]:
        return sorted(range(len(row)), key=lambda k: (-row[k], k))

    def score(row: np.ndarray, k: int, lam: float, k_reg: int) -> float:
        order = ranked(row)
        at = order.index(k)
        return float(sum(row[other] for other in order[:at]) + lam * max(0, at + 1 - k_reg))

    def kth(scores: list[float]) -> float:
        k = next(k for k in range(len(scores) + 2) if k >= round((len(scores) + 1) * level, 6))
        return math.inf if k > len(scores) else sorted(scores)[k - 1]

    draws = draw_uniform(0, np.arange(len(p)), "tune")
    first = sorted(range(len(p)), key=lambda i: draws[i])[: math.ceil(len(p) / 5)]
    rest = [i for i in range(len(p)) if i not in first]
    k_reg = int(min(kth([ranked(p[i]).index(target[i]) + 1 for i in first]), p.shape[1]))
    best = None
    for lam in (0.001, 0.01, 0.1, 0.2, 0.5):
        at = kth([score(p[i], target[i], lam, k_reg) for i in first])
        size = sum(score(p[i], k, lam, k_reg) <= at for i in first for k in range(p.shape[1]))
        if best is None or size < best[0]:
            best = size, lam
    assert best is not None
    return best[1], k_reg, kth([score(p[i], target[i], best[1], k_reg) for i in rest])


@pytest.mark.parametrize("level", [0.7, 0.9])
@pytest.mark.parametrize("n", [8, 60, 150])
def test_raps_is_what_its_definition_gives_a_sample_at_a_time(n: int, level: float) -> None:
    p, target = draw_classes(np.random.default_rng(n), n, 7, 0.3)
    sets = calibrate_sets(CLASSIFICATION, p, target, method="raps", level=level)
    lam, k_reg, threshold = brute_force_raps(p, target, level)
    assert (sets.lam, sets.k_reg) == (lam, k_reg)
    assert sets.thresholds == (pytest.approx(threshold, abs=1e-12),)
    order = np.random.default_rng(0).permutation(n)  # a sample's index, not its row, says what it is for
    assert calibrate_sets(CLASSIFICATION, p[order], target[order], method="raps", level=level, index=order) == sets


def test_the_threshold_of_raps_is_of_the_samples_that_did_not_choose_its_penalty() -> None:
    p, target = draw_classes(np.random.default_rng(0), 200, 6, 0.4)
    tuning = choose_tuning(np.arange(200))
    assert tuning.sum() == 40
    own = calibrate_sets(CLASSIFICATION, p, target, method="raps")
    kept, true = p[~tuning], target[~tuning]
    scores = score_classes("raps", kept, lam=own.lam, k_reg=own.k_reg)[np.arange(160), true]
    assert own.thresholds[0] == np.sort(scores)[math.ceil(161 * 0.9) - 1]


def test_raps_has_smaller_sets_than_aps_where_improbable_classes_are_many() -> None:
    # 50 classes: the true one is mostly among the first, and the others share a tail that says nothing.
    rng = np.random.default_rng(1)
    logits = rng.normal(size=(3000, 50))
    logits[:, :1] += 3 + rng.normal(size=(3000, 1))
    target = np.where(rng.random(3000) < 0.93, logits.argmax(axis=1), logits.argsort(axis=1)[:, -2])
    p = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    aps, raps = (
        measure(calibrate_sets(CLASSIFICATION, p[:1500], target[:1500], method=m, randomised=True, level=0.95),
                p[1500:], target[1500:])
        for m in ("aps", "raps")
    )  # fmt: skip
    assert raps["size"] < 0.5 * aps["size"] and raps["coverage"] > 0.93


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
    """The mean coverage of one new sample over calibrations of n samples by a model that is wrong."""
    covered = 0.0
    for round_ in range(rounds):
        if way.split()[-1] in ("thr", "aps", "raps"):
            p, target = draw_classes(rng, n + 1, 4, 3.0)
            random, method = way.startswith("random"), way.split()[-1]
            sets = calibrate_sets(
                CLASSIFICATION, p[:n], target[:n], method=method, level=level, randomised=random, seed=round_
            )
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


@pytest.mark.parametrize("way", ["thr", "aps", "random aps", "absolute", "normalised", "cqr"])
def test_a_new_sample_is_covered_as_promised_however_wrong_the_model(way: str) -> None:
    n, level, rounds = 29, 0.8, 1500
    found = coverages(np.random.default_rng(5), way, n, level, rounds)
    noise = 4 * math.sqrt(level * (1 - level) / rounds)
    assert found >= level - noise
    # Scores without ties keep it from above, too; deterministic aps always holds the most probable class.
    assert way == "aps" or found <= level + 1 / (n + 1) + noise


@pytest.mark.parametrize("way", ["raps", "random raps"])
def test_raps_covers_a_new_sample_as_promised_although_it_is_tuned(way: str) -> None:
    # Each of 1000 calibrations meets one new sample: the number of those covered is binomial with a probability of
    # `level` at least, and below this quantile with one of less than 1e-6.
    level, rounds = 0.8, 1000
    found = coverages(np.random.default_rng(8), way, 40, level, rounds)
    assert round(found * rounds) >= binom.ppf(1e-6, rounds, level)
    most = level + 1 / (32 + 1)  # without ties; 32 of the 40 samples calibrate
    assert way == "raps" or round(found * rounds) <= binom.isf(1e-6, rounds, most)


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
    for method in ("thr", "aps", "raps"):
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


def test_random_sets_are_a_function_of_seed_and_index() -> None:
    p, target = draw_classes(np.random.default_rng(3), 300, 5)
    index = np.arange(1000, 1300)
    sets = calibrate_sets(CLASSIFICATION, p, target, method="aps", randomised=True, seed=1, index=index)
    whole = sets.predict(p, index)
    order = np.random.default_rng(0).permutation(300)
    assert np.array_equal(sets.predict(p[order], index[order]), whole[order])
    again = load_conformal(json.loads(json.dumps(sets.as_record())))
    assert again == sets and np.array_equal(predict(again, p), sets.predict(p))
    other = ConformalSets("aps", sets.level, sets.thresholds, randomised=True, seed=2)
    assert not np.array_equal(other.predict(p, index), whole)
    # Drawn as they were for calibration, the same rows would be covered exactly as often as it counted them.
    assert measure(sets, p, target, index)["coverage"] != math.ceil(301 * 0.9) / 300
    assert not calibrate_sets(CLASSIFICATION, p, target, method="aps").randomised
    draws = draw_uniform(1, np.arange(20_000), "predict")
    assert draws.min() >= 0 and draws.max() < 1
    assert np.histogram(draws, 10, (0, 1))[0] == pytest.approx(np.full(10, 2000), abs=250)
    assert abs(np.corrcoef(draws, draw_uniform(1, np.arange(20_000), "calibrate"))[0, 1]) < 0.03


def test_chunks_are_invisible(monkeypatch: pytest.MonkeyPatch) -> None:
    p, target = draw_classes(np.random.default_rng(4), 90, 5)
    made = [calibrate_sets(CLASSIFICATION, p, target, method="raps", randomised=r) for r in (False, True)]
    whole = [sets.predict(p) for sets in made]
    monkeypatch.setattr("ensemble.combine.conformal_scores._CHUNK", 20)
    assert [calibrate_sets(CLASSIFICATION, p, target, method="raps", randomised=r) for r in (False, True)] == made
    for sets, expected in zip(made, whole, strict=True):
        assert np.array_equal(sets.predict(p), expected)


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


def predict(conformal: Conformal, values: np.ndarray) -> np.ndarray:
    return np.asarray(conformal.predict(values))


@pytest.mark.parametrize("task", [CLASSIFICATION, MULTILABEL, REGRESSION, GAUSSIAN, CQR], ids=lambda t: t.kind)
@pytest.mark.parametrize("enough", [True, False])
def test_what_is_calibrated_goes_through_json(task: Task, enough: bool) -> None:
    values, target = example(task)
    few = slice(None) if enough else slice(5)
    for conformal in calibrate(task, values[few], target[few]):
        record = json.loads(json.dumps(conformal.as_record(), allow_nan=False))
        assert load_conformal(record) == conformal
        assert np.array_equal(predict(load_conformal(record), values), predict(conformal, values))
        if not enough:  # nothing can be promised: everything is predicted
            assert measure(conformal, values, target)["coverage"] == 1


def test_an_interval_that_would_be_empty_is_its_middle() -> None:
    quantile = np.array([[0.0, 5.0, 10.0]] * 50)
    interval = calibrate_interval(CQR, quantile, np.full(50, 5.0))
    assert interval.threshold == -5.0
    low, high = interval.predict(np.array([[0.0, 1.0, 2.0]]))
    assert (low, high) == (1.0, 1.0)


@pytest.mark.parametrize(
    ("levels", "columns"), [((0.05, 0.5, 0.95), (0, 2)), ((0.01, 0.1, 0.5, 0.9, 0.99), (0, 4)), ((0.5,), (0, 0))]
)
def test_the_quantiles_nearest_to_the_level_are_corrected(
    levels: tuple[float, ...], columns: tuple[int, int]
) -> None:
    values = np.sort(np.random.default_rng(0).random((50, len(levels))), axis=1)
    assert calibrate_interval(quantiles(*levels), values, np.zeros(50)).columns == columns


def test_what_has_no_meaning_is_refused() -> None:
    p, target = draw_classes(np.random.default_rng(0), 20, 3)
    for act in (
        lambda: calibrate(FREE, p, target),
        lambda: calibrate_sets(REGRESSION, p, target),
        lambda: calibrate_interval(CLASSIFICATION, p, target),
        lambda: calibrate_sets(CLASSIFICATION, p, target, randomised=True),
        lambda: calibrate_sets(MULTILABEL, p, (p > 0.5).astype(int), method="raps"),
        lambda: calibrate_sets(CLASSIFICATION, p, target, level=1.0),
        lambda: measure(calibrate_sets(CLASSIFICATION, p, target), p, np.full(20, IGNORED)),
    ):
        with pytest.raises(CombineError):
            act()
