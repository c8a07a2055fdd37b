"""Weights, stacking and temperature: optimal where an optimum is known, never worse than what they start at."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from class_figures import MATH, accuracy, nll
from hypothesis import given
from hypothesis import strategies as st
from kit.property_examples import examples
from kit.task_members import TASKS, make_members

from ensemble.combine import CombineError, find_math, fit
from ensemble.combine.combination import CALIBRATION_SAMPLES, call_function, fit_held_out
from ensemble.combine.methods import average_weights, mix, share_out
from ensemble.combine.out_of_fold import merge_folds
from ensemble.combine.split_metrics import compute
from ensemble.spec import COMBINERS
from ensemble.spec.task import IGNORED, Task
from ensemble.store import Predictions

Members = list[np.ndarray]


def softmax(scores: np.ndarray) -> np.ndarray:
    powers = np.exp(scores - scores.max(axis=1, keepdims=True))
    return powers / powers.sum(axis=1, keepdims=True)


def members_of(seed: int, members: int, n: int = 60, classes: int = 3) -> tuple[Members, np.ndarray]:
    rng = np.random.default_rng(seed)
    target = rng.integers(0, classes, n)
    quality = rng.uniform(-0.5, 3, members)
    sharpness = rng.uniform(0.2, 6, members)
    one_hot = np.eye(classes)[target]
    return [
        softmax(s * (q * one_hot + rng.normal(size=(n, classes)))).astype(np.float32)
        for q, s in zip(quality, sharpness, strict=True)
    ], target


seeds = st.integers(0, 100_000)


@examples(15)
@given(seeds, st.integers(1, 6), st.sampled_from(COMBINERS), st.booleans())
def test_any_method_gives_weights_and_probabilities(seed: int, members: int, method: str, calibrate: bool) -> None:
    p, target = members_of(seed, members)
    combination = fit(method, p, target, calibrate=calibrate)
    assert combination.weights.min() >= 0
    assert combination.weights.sum() == pytest.approx(1)
    assert calibrate or combination.calibration == 1.0
    out = combination.predict(p)
    assert out.min() >= 0
    assert np.allclose(out.sum(axis=1), 1)


@given(seeds, st.integers(2, 6))
def test_weighted_reaches_the_optimum_of_a_convex_problem(seed: int, members: int) -> None:
    """At the minimum over the simplex the gradient is least, and equal, where weights are positive (KKT)."""
    p, target = members_of(seed, members)
    weights = MATH.weighted_weights(p, target)
    mixed = mix(p, weights)[np.arange(len(target)), target]
    gain = np.array([(one[np.arange(len(target)), target] / np.maximum(mixed, 1e-12)).mean() for one in p])
    assert gain.max() <= 1 + 5e-3
    assert nll(mix(p, weights), target) <= nll(mix(p, average_weights(members)), target) + 1e-12


def test_greedy_follows_the_published_procedure() -> None:
    """Against a literal transcription with exact scores, on a case without ties."""
    p, target = members_of(5, 5, n=200)
    scores = [nll(one, target) for one in p]
    order = sorted(range(5), key=scores.__getitem__)
    starts = [nll(np.mean([p[i].astype(float) for i in order[:k]], axis=0), target) for k in range(1, 6)]
    bag = order[: int(np.argmin(starts)) + 1]
    best, kept = min(starts), list(bag)
    for _ in range(50):
        tried = [nll(np.mean([p[i].astype(float) for i in [*bag, j]], axis=0), target) for j in range(5)]
        bag.append(int(np.argmin(tried)))
        if min(tried) < best - 1e-12:
            best, kept = min(tried), list(bag)
    assert np.allclose(MATH.greedy_weights(p, target), np.bincount(kept, minlength=5) / len(kept))


def test_equal_members_tie_to_the_first_and_one_member_is_itself_under_every_mixture() -> None:
    (p,), target = members_of(3, 1)
    for criterion in ("nll", "accuracy", "brier"):
        assert MATH.greedy_weights([p, p.copy(), p.copy()], target, criterion).tolist() == [1.0, 0.0, 0.0]
    for method in ("average", "weighted", "greedy"):
        assert np.array_equal(fit(method, [p], target, calibrate=False).predict([p]), p.astype(np.float64))


@examples(10)
@given(seeds, st.floats(0.2, 8))
def test_the_fitted_temperature_undoes_a_known_one(seed: int, made: float) -> None:
    """Targets drawn from p itself: scaling p by `made` is undone by 1/made, up to sampling error."""
    rng = np.random.default_rng(seed)
    p = softmax(rng.normal(size=(4000, 4)))
    target = (p.cumsum(axis=1) > rng.random((4000, 1))).argmax(axis=1)
    again = MATH.fit_calibration(MATH.calibrate(p, made), target)
    assert again * made == pytest.approx(MATH.fit_calibration(p, target), rel=1e-2)
    assert again * made == pytest.approx(1, rel=0.15)


def test_few_rows_change_the_temperature_little_and_all_within_bounds() -> None:
    """Nine of ten sure rows right: a hundred such rows say that the pool is too sure, ten may be bad luck."""
    assert MATH.fit_calibration(np.full((10, 2), 0.5), np.arange(10) % 2) == 1.0, "nothing is gained"
    assert 19 < MATH.fit_calibration([[0.99, 0.01]] * 5000, [1] * 5000) <= 20, "the softer the better, without end"
    few, many = (MATH.fit_calibration([[0.999, 0.001]] * 10 * n, ([0] * 9 + [1]) * n) for n in (1, 100))
    assert 1.3 < few < 2.5 < 3 < many < math.log(999) / math.log(9)
    sure, target = np.tile([[0.99, 0.01]], (CALIBRATION_SAMPLES, 1)), np.arange(CALIBRATION_SAMPLES) % 2
    assert fit("average", [sure], target).calibration > 1 == fit("average", [sure[1:]], target[1:]).calibration


def test_rows_that_are_all_right_leave_the_temperature_alone() -> None:
    """The sharper the better for them, without end: of 30 rows with 97 % right in truth that is often so, and the
    NLL of other rows would be three times as high.
    """
    assert MATH.fit_calibration([[0.6, 0.4]] * 5, [0] * 5) == 1.0
    rng, before, after = np.random.default_rng(0), [], []
    for _ in range(100):
        conf = rng.uniform(0.9, 0.999, 1030)
        p, target = np.stack([conf, 1 - conf], axis=1), (rng.random(1030) > 0.97).astype(np.int64)
        temperature = MATH.fit_calibration(p[:30], target[:30])
        before.append(nll(p[30:], target[30:]))
        after.append(nll(MATH.calibrate(p[30:], temperature), target[30:]))
    assert np.mean(after) < 1.1 * np.mean(before)


def test_a_stack_corrects_classes_that_a_member_mixes_up() -> None:
    rng = np.random.default_rng(0)
    target = rng.integers(0, 3, 300)
    swapped = softmax(4 * np.eye(3)[np.array([1, 0, 2])[target]] + rng.normal(size=(300, 3)))
    stack, held_out = MATH.fit_stack([swapped], target)
    assert accuracy(swapped, target) < 0.5
    assert accuracy(stack.predict([swapped]), target) > 0.95
    assert accuracy(held_out, target) > 0.95


def test_a_stack_of_two_classes_is_scikit_learns_own() -> None:
    from sklearn.linear_model import LogisticRegression

    from ensemble.combine.formulas import log
    from ensemble.combine.stacks import _fit

    p, target = members_of(2, 2, classes=2)
    features = np.concatenate([log(one.astype(np.float64)) for one in p], axis=1)
    theirs = LogisticRegression(C=0.1, max_iter=1000).fit(features, target).predict_proba(features)
    assert np.allclose(_fit(p, target, 0.1).predict(p), theirs)


def test_a_class_that_validation_never_showed_keeps_its_average_share() -> None:
    p, target = members_of(4, 2, classes=4)
    keep = target != 2
    stack, _ = MATH.fit_stack([one[keep] for one in p], target[keep])
    out = stack.predict(p)
    assert np.allclose(out[:, 2], mix(p, average_weights(2))[:, 2])
    assert np.allclose(out.sum(axis=1), 1)


def widen(values: torch.Tensor) -> torch.Tensor:
    mean, variance = values.mean(dim=0).unbind(dim=-1)
    return torch.stack([mean, variance * torch.linspace(1, 2, len(mean))], dim=-1)


def test_a_small_variance_that_depends_on_the_batch_is_seen_beside_large_means() -> None:
    rng = np.random.default_rng(0)
    values = [np.stack([1e4 + rng.normal(size=50), rng.uniform(0.01, 0.02, 50)], axis=-1) for _ in range(3)]
    with pytest.raises(CombineError, match="one sample different values in different batches"):
        call_function(widen, values, Task("gaussian"))


def predictions(seed: int, n: int = 40, classes: int = 4) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    p = softmax(rng.normal(size=(n, classes)) * rng.uniform(0.1, 5))
    return p.astype(np.float32), rng.integers(0, classes, n)


def test_metrics_of_a_hand_computed_case() -> None:
    p = np.array([[0.8, 0.2], [0.6, 0.4], [0.3, 0.7], [0.9, 0.1]])
    figures = MATH.measure(p, np.array([0, 1, 1, 0]))
    # Every confidence falls into a bin of its own: |1-0.8|, |0-0.6|, |1-0.7|, |1-0.9|
    expected = {"accuracy": 0.75, "brier": (2 * 0.04 + 2 * 0.36 + 2 * 0.09 + 2 * 0.01) / 4, "ece": 1.2 / 4}
    expected["nll"] = -(math.log(0.8) + math.log(0.4) + math.log(0.7) + math.log(0.9)) / 4
    assert {name: figures[name] for name in expected} == pytest.approx(expected)
    curve = MATH.reliability(p, np.array([0, 1, 1, 0]))
    assert [(round(c, 6), a, n) for c, a, n in curve] == [(0.6, 0, 1), (0.7, 1, 1), (0.8, 1, 1), (0.9, 1, 1)]
    closed_above = MATH.reliability(np.array([[0.6, 0.4], [0.61, 0.39]]), np.array([0, 0]), bins=5)
    assert closed_above == [(0.6, 1.0, 1), (0.61, 1.0, 1)]
    assert nll([[1.0, 0.0]], [1]) == pytest.approx(-math.log(1e-12)), "a class declared impossible"


@given(st.integers(0, 10_000), st.integers(1, 30))
def test_the_reliability_curve_counts_every_row_and_gives_accuracy_and_ece(seed: int, bins: int) -> None:
    p, target = predictions(seed)
    curve = MATH.reliability(p, target, bins)
    assert sum(count for _, _, count in curve) == len(target)
    assert sum(right * count for _, right, count in curve) / len(target) == pytest.approx(accuracy(p, target))
    mean_gap = abs(p.max(axis=1).mean() - accuracy(p, target))
    assert mean_gap - 1e-6 <= sum(count * abs(right - sure) for sure, right, count in curve) / len(target) <= 1
    assert 0 <= MATH.measure(p, target)["brier"] <= 2


def test_what_is_not_classification_is_refused_and_a_label_that_is_never_known_takes_no_part() -> None:
    p: Any = [[0.5, 0.5]]
    refused = ((p, [2], "classes 0 ... 1, found 2"), (p, [-1], "found -1"), (p, [0.5], "integer classes"))
    for values, target, says in (*refused, (p, [0, 1], r"\[1, 2\] and \[2\]"), ([0.5], [0], r"\[n, ..., C\]")):
        with pytest.raises(CombineError, match=says):
            accuracy(values, target)
    p, of_labels = np.array([[0.9, 0.1, 0.3], [0.2, 0.8, 0.4]]), np.array([[1, 0, IGNORED], [0, 1, IGNORED]])
    task = Task("multilabel")
    found = find_math(task).measure(p, of_labels)
    assert found["f1_macro"] == compute(["f1_macro"], p, of_labels, task)["f1_macro"] == 1


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.kind)
def test_folds_are_merged_by_sample_and_repeats_are_mixed(task: Task) -> None:
    values, target = make_members(task, seed=3, members=2, n=30)
    rng = np.random.default_rng(1)
    saved = []
    for own in values:  # two partitions: one of all samples, one of the first 20
        order = rng.permutation(30 if own is values[0] else 20)
        for start, stop in pairwise((0, 7, 13, len(order))):
            index = np.sort(order[start:stop])
            saved.append(Predictions(own[index], index, target[index], task))
    found = merge_folds([f"member-{at}" for at in range(6)], saved)
    assert np.array_equal(found.index, np.arange(30)) and np.array_equal(found.target, target, equal_nan=True)
    both = find_math(task).mix([values[0][:20], values[1][:20]], np.array([0.5, 0.5]))
    assert np.allclose(found.values[:20], both, atol=1e-6) and np.array_equal(found.values[20:], values[0][20:])


def test_folds_that_do_not_fit_are_refused() -> None:
    one = Predictions(np.full((2, 2), 0.5, np.float32), np.arange(2), np.array([0, 1]))
    for values, index, target, says in (
        (one.values[:1], [1], np.array([0]), "a, b saw different targets for one sample"),
        (np.full((1, 3), 1 / 3, np.float32), [2], np.array([0]), "a and b, .* predict values of different kinds"),
        (one.values[:1], [2], None, "one saved targets"),
    ):
        with pytest.raises(CombineError, match=says):
            merge_folds(["a", "b"], [one, Predictions(values, np.array(index), target)])


@pytest.mark.parametrize("method", ["average", "weighted", "greedy", "stack"])
@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.kind)
def test_a_fit_by_configurations_is_that_of_their_rows_alone(task: Task, method: str) -> None:
    values, target = make_members(task, seed=5, members=3, n=80)
    groups = (0, 1, 0, 0, 2, 1)  # members of one configuration need not be neighbours
    rows = [values[group] for group in groups]
    try:
        alone, expected = fit_held_out(method, values, target, task=task)
    except CombineError:
        with pytest.raises(CombineError):
            fit_held_out(method, rows, target, task=task, groups=groups)
        return
    found, held_out = fit_held_out(method, rows, target, task=task, groups=groups)
    assert found.method == alone.method and found.calibration == pytest.approx(alone.calibration, rel=1e-6)
    assert np.allclose(held_out, expected, atol=1e-6)
    assert np.allclose(found.predict(rows), alone.predict(values), atol=1e-6)
    assert np.allclose(np.bincount(groups, weights=found.weights), alone.weights, atol=1e-9)
    assert np.ptp(found.weights[[0, 2, 3]]) < 1e-12
    assert share_out(np.array([[6.0, 1.0]]), (4, 2, 4, 4)).tolist() == [[2.0, 1.0, 2.0, 2.0]]
