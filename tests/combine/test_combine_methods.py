"""Weights, stacking and temperature: optimal where an optimum is known, never worse than what they start at."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from class_figures import MATH, accuracy, nll
from hypothesis import given
from hypothesis import strategies as st
from kit.property_examples import examples

from ensemble.combine import CombineError, fit
from ensemble.combine.combination import CALIBRATION_SAMPLES, call_function
from ensemble.combine.methods import average_weights, mix
from ensemble.spec import COMBINERS
from ensemble.spec.task import Task

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


def test_equal_members_tie_to_the_first() -> None:
    p, target = members_of(3, 1)
    for criterion in ("nll", "accuracy", "brier"):
        assert MATH.greedy_weights([p[0], p[0].copy(), p[0].copy()], target, criterion).tolist() == [1.0, 0.0, 0.0]


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


def test_temperature_stays_at_one_where_nothing_is_gained() -> None:
    assert MATH.fit_calibration(np.full((10, 2), 0.5), np.arange(10) % 2) == 1.0


def test_temperature_is_bounded_where_the_optimum_is_not() -> None:
    """All sure and wrong: the softer the better, without end."""
    assert 19 < MATH.fit_calibration([[0.99, 0.01]] * 5000, [1] * 5000) <= 20


def test_few_rows_change_the_temperature_little() -> None:
    """Nine of ten sure rows right: a hundred such rows say that the pool is too sure, ten may be bad luck."""
    few, many = (
        MATH.fit_calibration([[0.999, 0.001]] * 10 * times, ([0] * 9 + [1]) * times) for times in (1, 100)
    )
    assert 1.3 < few < 2.5 < 3 < many < math.log(999) / math.log(9)


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


def test_nothing_is_calibrated_on_few_samples() -> None:
    sure, target = np.tile([[0.99, 0.01]], (CALIBRATION_SAMPLES, 1)), np.arange(CALIBRATION_SAMPLES) % 2
    assert fit("average", [sure], target).calibration > 1
    assert fit("average", [sure[1:]], target[1:]).calibration == 1


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


def test_one_member_is_itself_under_every_mixture() -> None:
    p, target = members_of(0, 1)
    for method in ("average", "weighted", "greedy"):
        assert np.array_equal(fit(method, p, target, calibrate=False).predict(p), p[0].astype(np.float64))


def test_an_unknown_method_is_answered_with_the_valid_ones() -> None:
    p, target = members_of(0, 1)
    with pytest.raises(CombineError, match=r"did you mean 'greedy'\? \(valid: average, weighted, greedy, stack\)"):
        fit("gredy", p, target)


def widen(values: torch.Tensor) -> torch.Tensor:
    mean, variance = values.mean(dim=0).unbind(dim=-1)
    return torch.stack([mean, variance * torch.linspace(1, 2, len(mean))], dim=-1)


def test_a_small_variance_that_depends_on_the_batch_is_seen_beside_large_means() -> None:
    rng = np.random.default_rng(0)
    values = [np.stack([1e4 + rng.normal(size=50), rng.uniform(0.01, 0.02, 50)], axis=-1) for _ in range(3)]
    with pytest.raises(CombineError, match="other values for a sample when the batch has other samples"):
        call_function(widen, values, Task("gaussian"))
