"""Telling shifted samples by their uncertainty: hand-computed cases, and all pairs counted one by one."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ensemble.combine.shifted import measure_shift

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
