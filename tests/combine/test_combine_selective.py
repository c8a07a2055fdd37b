"""Selective prediction: against loops over k and over all orders of equal samples, and scikit-learn's accuracy."""

from __future__ import annotations

import itertools
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import accuracy_score, mean_squared_error

from ensemble.combine.selective import find_answer_threshold, measure_area, measure_selective
from ensemble.spec.task import CLASSIFICATION, IGNORED, Task, quantiles

MULTILABEL, REGRESSION, GAUSSIAN, FREE = (Task(kind) for kind in ("multilabel", "regression", "gaussian", "free"))

pairs = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3)), min_size=1, max_size=6)


def area_of(losses: list[float]) -> float:
    """The mean of the mean losses of the first k, of losses in the order in which samples are answered."""
    return float(np.mean([np.mean(losses[: k + 1]) for k in range(len(losses))]))


@given(drawn=pairs)
def test_the_area_is_the_mean_over_all_orders_of_equal_samples(drawn: list[tuple[int, int]]) -> None:
    orders = [
        o for o in itertools.permutations(drawn) if [c for c, _ in o] == sorted((c for c, _ in o), reverse=True)
    ]
    expected = np.mean([area_of([float(loss) for _, loss in order]) for order in orders])
    confidence, losses = np.array(drawn, float).T
    assert measure_area(confidence, losses) == pytest.approx(expected, abs=1e-12)
    shuffled = np.random.default_rng(0).permutation(len(drawn))
    assert measure_area(confidence[shuffled], losses[shuffled]) == pytest.approx(expected, abs=1e-12)


def test_areas_that_are_known_by_hand() -> None:
    losses = np.array([0.0, 0.0, 1.0, 0.0])
    assert measure_area(np.array([4, 3, 2, 1]), losses) == pytest.approx((0 + 0 + 1 / 3 + 1 / 4) / 4)
    assert measure_area(np.ones(4), losses) == 0.25, "of no use: the risk at every coverage"
    assert measure_area(-losses, losses) == pytest.approx((1 / 4) / 4), "the best that there is"


@pytest.mark.parametrize("kept", [0.8, 0.9])
def test_a_threshold_keeps_equal_samples_together_and_enough_of_them(kept: float) -> None:
    rng = np.random.default_rng(0)
    for n in range(1, 40):
        confidence = rng.integers(0, 8, n) / 8
        at = find_answer_threshold(confidence, kept)
        enough = [t for t in confidence if round((confidence >= t).mean(), 9) >= kept]
        assert at == max(enough)
    assert find_answer_threshold(np.arange(10.0), 0.8) == 2.0, "8 of 10, not 9 for a rounding"


def test_classes_against_scikit_learn() -> None:
    rng = np.random.default_rng(1)
    p = rng.dirichlet(np.ones(4), 500)
    target = (p.cumsum(axis=1) > rng.random((500, 1))).argmax(axis=1)
    found = measure_selective(CLASSIFICATION, p, target)
    assert found is not None and json.loads(json.dumps(found, allow_nan=False)) == found
    assert (found["score"], found["loss"]) == ("probability", "error")
    order = np.argsort(-p.max(axis=1))
    ranked, answers = target[order], p.argmax(axis=1)[order]
    risks = [1 - accuracy_score(ranked[:k], answers[:k]) for k in range(1, 501)]
    wrong = np.sort(ranked != answers)
    assert found["risk"] == pytest.approx(risks[-1])
    assert found["aurc"] == pytest.approx(np.mean(risks), abs=1e-12)
    assert found["eaurc"] == pytest.approx(np.mean(risks) - area_of(wrong.tolist()), abs=1e-12)
    for percent, k in ((80, 400), (90, 450)):
        assert found[f"risk_{percent}"] == pytest.approx(risks[k - 1])
        assert found[f"threshold_{percent}"] == p.max(axis=1)[order][k - 1]
        assert found[f"coverage_{percent}"] == k / 500
    assert found["risk_80"] < found["risk_90"] < found["risk"]


def test_numbers_are_ordered_by_variance_epistemic_part_or_width() -> None:
    rng = np.random.default_rng(2)
    spread = rng.random(200) + 0.1
    target, mean = rng.normal(size=200) * spread, np.zeros(200)
    order = np.argsort(spread)

    gaussian = measure_selective(GAUSSIAN, np.stack([mean, spread**2], axis=1), target)
    points = measure_selective(REGRESSION, mean, target, spread)
    three = measure_selective(quantiles(0.1, 0.5, 0.9), mean[:, None] + spread[:, None] * [-1, 0, 1], target)
    assert gaussian is not None and points is not None and three is not None
    assert gaussian["risk_80"] == pytest.approx(mean_squared_error(target[order[:160]], mean[:160]))
    assert gaussian["aurc"] == pytest.approx(area_of((target[order] ** 2).tolist()))
    assert gaussian["threshold_90"] == np.sort(spread)[179] ** 2
    assert (points["score"], points["loss"]) == ("epistemic", "squared_error")
    assert {name: points[name] for name in ("risk", "aurc", "eaurc", "risk_80")} == {
        name: pytest.approx(gaussian[name]) for name in ("risk", "aurc", "eaurc", "risk_80")
    }
    assert (three["score"], three["loss"]) == ("width", "absolute_error")
    assert three["aurc"] == pytest.approx(area_of(np.abs(target[order]).tolist()))


def test_a_sample_is_answered_as_a_whole_by_the_positions_that_take_part() -> None:
    rng = np.random.default_rng(3)
    p = rng.dirichlet(np.ones(3), (60, 2))
    target = rng.integers(0, 3, (60, 2))
    target[:20, 1], target[20] = IGNORED, IGNORED
    found = measure_selective(CLASSIFICATION, p, target)
    rows = []
    for own, true in zip(p, target, strict=True):
        at = true != IGNORED
        if at.any():
            rows.append((own[at].max(axis=1).mean(), (own[at].argmax(axis=1) != true[at]).mean()))
    losses = [loss for _, loss in sorted(rows, key=lambda row: -row[0])]
    assert found is not None and len(rows) == 59
    assert found["aurc"] == pytest.approx(area_of(losses)) and found["risk"] == pytest.approx(np.mean(losses))

    labels, yes = rng.random((50, 3)), rng.integers(0, 2, (50, 3))
    of_labels = measure_selective(MULTILABEL, labels, yes)
    order = np.argsort(-np.maximum(labels, 1 - labels).mean(axis=1))
    assert of_labels is not None
    assert of_labels["aurc"] == pytest.approx(area_of(((labels >= 0.5) != yes).mean(axis=1)[order].tolist()))


def test_without_a_score_there_are_no_figures() -> None:
    points = np.arange(4.0)
    assert measure_selective(REGRESSION, points, points) is None, "a single member"
    assert measure_selective(REGRESSION, points, points, np.zeros(4)) is None, "members that never differ"
    assert measure_selective(quantiles(0.5), points[:, None], points) is None
    assert measure_selective(FREE, points, points) is None
