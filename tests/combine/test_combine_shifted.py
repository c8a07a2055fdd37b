"""Telling shifted samples by their uncertainty: hand-computed cases, and all pairs counted one by one."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import accuracy_score, log_loss

from ensemble.combine.metrics import CombineError
from ensemble.combine.shifted import measure_change, measure_shift
from ensemble.combine.tasks import find_math
from ensemble.spec.task import CLASSIFICATION

scores = st.lists(st.integers(0, 9), min_size=1, max_size=30).map(lambda drawn: np.array(drawn, float))


def test_a_score_that_is_higher_for_all_shifted_samples_tells_them() -> None:
    inside, shifted = {"total": np.array([0.1, 0.2, 0.3])}, {"total": np.array([0.4, 0.5])}
    assert measure_shift(inside, shifted) == {"total": {"auroc": 1.0, "aupr": 1.0, "fpr95": 0.0}}
    assert measure_shift(shifted, inside)["total"] == {
        "auroc": 0.0,
        "aupr": pytest.approx((1 / 3 + 2 / 4 + 3 / 5) / 3),
        "fpr95": 1.0,
    }


def test_a_score_that_knows_nothing() -> None:
    found = measure_shift({"total": np.zeros(6)}, {"total": np.zeros(2)})
    assert found == {"total": {"auroc": 0.5, "aupr": 0.25, "fpr95": 1.0}}


@given(inside=scores, shifted=scores)
def test_auroc_counts_pairs_and_fpr95_the_false_alarms(inside: np.ndarray, shifted: np.ndarray) -> None:
    found = measure_shift({"total": inside}, {"total": shifted})["total"]
    higher = (shifted[:, None] > inside).mean() + (shifted[:, None] == inside).mean() / 2
    assert found["auroc"] == pytest.approx(higher)
    thresholds = [t for t in np.unique(shifted) if (shifted >= t).mean() >= 0.95]
    assert found["fpr95"] == pytest.approx((inside >= max(thresholds)).mean())


def test_parts_that_one_split_lacks_and_samples_without_a_value_are_left_out() -> None:
    nothing = np.array([np.nan])
    inside = {"total": np.array([0.0, np.nan]), "epistemic": np.ones(3), "aleatoric": nothing}
    shifted = {"total": np.array([1.0]), "disagreement": np.ones(2), "aleatoric": np.ones(2)}
    assert measure_shift(inside, shifted) == {"total": {"auroc": 1.0, "aupr": 1.0, "fpr95": 0.0}}


def test_figures_on_shifted_samples_stand_beside_their_change() -> None:
    rng = np.random.default_rng(0)
    target = rng.integers(0, 3, 400)
    sharp, flat = (np.full((400, 3), (1 - top) / 2) for top in (0.9, 0.6))
    sharp[np.arange(400), target], flat[np.arange(400), (target + rng.integers(0, 2, 400)) % 3] = 0.9, 0.6
    math = find_math(CLASSIFICATION)
    usual = {"ensemble": math.measure(sharp, target), "best": {"accuracy": 0.5, "other": 1.0}}
    found = measure_change(math, usual, {"ensemble": flat, "best": flat}, target)
    accuracy, nll = accuracy_score(target, flat.argmax(axis=1)), log_loss(target, flat)
    assert found["accuracy"] == {
        "ensemble": pytest.approx(accuracy),
        "ensemble_change": pytest.approx(accuracy - 1),
        "best": pytest.approx(accuracy),
        "best_change": pytest.approx(accuracy - 0.5),
    }
    assert found["nll"] == {
        "ensemble": pytest.approx(nll),
        "ensemble_change": pytest.approx(nll + np.log(0.9)),
    }
    confidence_gap = abs(accuracy - 0.6)  # all confidences are 0.6: one bin
    assert found["ece"]["ensemble"] == pytest.approx(confidence_gap) and "other" not in found
    with pytest.raises(CombineError, match="found 7"):
        measure_change(math, usual, {"ensemble": flat}, np.full(400, 7))
