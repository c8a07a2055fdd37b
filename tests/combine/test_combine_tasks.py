"""The mathematics of each task: figures against other implementations, mixtures that are never worse than what
they start at, calibrations that undo what was done, and refusals.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kit.property_examples import examples
from kit.task_members import CLASSES, LABELS, LEVELS, TASKS, Array, make_members

from ensemble.combine import CombineError, find_math, fit
from ensemble.spec import COMBINERS
from ensemble.spec.task import IGNORED, Task, quantiles

seeds = st.integers(0, 100_000)
tasks = st.sampled_from(TASKS)
ONE, SEVERAL, POINTS, NORMAL, LEVELLED = TASKS
FREE = Task("free")


def list_metrics(task: Task, values: Array, target: Array) -> dict[str, float]:
    """The same figures by scikit-learn, SciPy and torch; target without ignored entries."""
    import torch
    from scipy import stats
    from sklearn import metrics

    p, t = values.astype(np.float64), target
    if task.kind == "classification":
        p, t = p.reshape(-1, CLASSES), t.reshape(-1)
        p = p / p.sum(axis=1, keepdims=True)
        return {
            "accuracy": metrics.accuracy_score(t, p.argmax(axis=1)),
            "nll": metrics.log_loss(t, p, labels=range(CLASSES)),
            "brier": metrics.brier_score_loss(t, p, labels=range(CLASSES), scale_by_half=False),
        }
    if task.kind == "multilabel":
        said = p >= 0.5
        return {
            "nll": float(torch.nn.functional.binary_cross_entropy(torch.tensor(p), torch.tensor(t * 1.0))),
            "brier": metrics.brier_score_loss(t.ravel(), p.ravel()),
            "hamming_accuracy": 1 - metrics.hamming_loss(t, said),
            "subset_accuracy": metrics.accuracy_score(t, said),
            "f1_micro": metrics.f1_score(t, said, average="micro", zero_division=0),
            "f1_macro": metrics.f1_score(t, said, average="macro", zero_division=0),
            "roc_auc_macro": metrics.roc_auc_score(t, p, average="macro"),
        }
    if task.kind == "quantiles":
        t = t.ravel()
        p = p.reshape(-1, len(LEVELS))
        losses = [metrics.mean_pinball_loss(t, q, alpha=a) for q, a in zip(p.T, LEVELS, strict=True)]
        return {
            "pinball": float(np.mean(losses)),
            "coverage": float(np.mean((t >= p[:, 0]) & (t <= p[:, -1]))),
            "width": float(np.mean(p[:, -1] - p[:, 0])),
            "crossing": 0.0,
        }
    mean, t = (p[..., 0] if task.kind == "gaussian" else p).ravel(), t.ravel()
    found = {
        "rmse": metrics.root_mean_squared_error(t, mean),
        "mae": metrics.mean_absolute_error(t, mean),
        "r2": metrics.r2_score(t, mean),
        "pearson": stats.pearsonr(t, mean).statistic,
    }
    if task.kind == "regression":
        return found
    sigma = np.sqrt(p[..., 1].ravel())
    inside = {a: np.abs(t - mean) <= stats.norm.interval(a)[1] * sigma for a in np.arange(1, 20) / 20}
    return found | {
        "nll": float(-stats.norm(mean, sigma).logpdf(t).mean()),
        "coverage_90": float(inside[0.9].mean()),
        "calibration_error": float(np.mean([abs(hit.mean() - a) for a, hit in inside.items()])),
    }


@given(seeds, tasks, st.sampled_from([(), (3,), (2, 2)]))
def test_figures_agree_with_scikit_learn_scipy_and_torch(seed: int, task: Task, positions: Any) -> None:
    (values,), target = make_members(task, seed, 1, positions=positions)
    values = find_math(task).normalise(values)
    found = find_math(task).measure(values, target)
    expected = list_metrics(task, values, target)
    assert {name: found[name] for name in expected} == pytest.approx(expected, rel=1e-7, abs=1e-9)


def test_crps_is_the_integral_of_the_squared_distance_of_distribution_functions() -> None:
    from scipy import integrate, stats

    (values,), target = make_members(NORMAL, 0, 1, n=5)
    expected = []
    for (mean, variance), t in zip(values.astype(np.float64), target, strict=True):
        of = stats.norm(mean, math.sqrt(variance))
        below = integrate.quad(lambda y, of=of: of.cdf(y) ** 2, -np.inf, t)[0]
        expected.append(below + integrate.quad(lambda y, of=of: (1 - of.cdf(y)) ** 2, t, np.inf)[0])
    assert find_math(NORMAL).measure(values, target)["crps"] == pytest.approx(np.mean(expected), rel=1e-6)


@examples(8)
@given(seeds, tasks, st.integers(1, 5))
def test_ignored_targets_take_no_part_in_anything(seed: int, task: Task, members: int) -> None:
    values, target = make_members(task, seed, members, positions=(3,), ignored=0.3)
    ignored = target == IGNORED if target.dtype.kind == "i" else np.isnan(target)
    other = [own.copy() for own in values]
    for own, again in zip(values, other, strict=True):
        again[ignored] = own[0, 0]
    task_math = find_math(task)
    assert task_math.measure(values[0], target) == task_math.measure(other[0], target)
    for method in COMBINERS:
        ours, theirs = (fit(method, each, target, task=task) for each in (values, other))
        assert np.allclose(ours.weights, theirs.weights)
        assert ours.calibration == pytest.approx(theirs.calibration)


@given(seeds, tasks)
def test_figures_with_ignored_positions_are_those_of_the_others(seed: int, task: Task) -> None:
    if task.kind == "multilabel":
        return
    (values,), target = make_members(task, seed, 1, positions=(3,), ignored=0.3)
    known = ~np.isnan(target) if target.dtype.kind == "f" else target != IGNORED
    found, alone = (find_math(task).measure(*each) for each in ((values, target), (values[known], target[known])))
    assert found == pytest.approx(alone)


@examples(12)
@given(seeds, tasks, st.integers(1, 6))
def test_greedy_by_an_objective_is_never_worse_than_the_best_member(seed: int, task: Task, members: int) -> None:
    values, target = make_members(task, seed, members, n=40)
    task_math = find_math(task)
    for criterion in task_math.criteria:
        fitted = fit("greedy", values, target, task=task, objective=criterion, calibrate=False)
        assert fitted.weights.min() >= 0 and fitted.weights.sum() == pytest.approx(1)
        combined = fitted.predict(values)
        sign = -1 if "accuracy" in criterion else 1
        alone = min(sign * task_math.measure(own, target)[criterion] for own in values)
        assert sign * task_math.measure(combined, target)[criterion] <= alone + 1e-6 * abs(alone)


@given(seeds, tasks, st.integers(1, 6))
def test_weighted_is_never_worse_than_equal_weights(seed: int, task: Task, members: int) -> None:
    values, target = make_members(task, seed, members)
    task_math = find_math(task)
    weights = task_math.weighted_weights(values, target)
    assert weights.min() >= 0 and weights.sum() == pytest.approx(1)
    name = task_math.default_criterion
    equal = task_math.mix(values, np.full(members, 1 / members))
    reached, before = (task_math.measure(own, target)[name] for own in (task_math.mix(values, weights), equal))
    assert reached <= before + 1e-9 * abs(before)


def test_weighted_points_solve_the_least_squares_problem() -> None:
    """Two members: the minimum of a parabola in one weight, in closed form."""
    values, target = make_members(POINTS, 3, 2, n=200)
    first, second = (own.astype(np.float64) for own in values)
    best = float(np.clip(((first - second) @ (target - second)) / ((first - second) @ (first - second)), 0, 1))
    assert find_math(POINTS).weighted_weights(values, target) == pytest.approx([best, 1 - best], abs=1e-4)


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.kind)
def test_gradients_are_those_of_their_losses(task: Task) -> None:
    values, target = make_members(task, 1, 1, n=6)
    criterion = find_math(task).criterion(target, find_math(task).default_criterion)
    view = criterion.view(values[0]).astype(np.float64)
    assert criterion.slope is not None
    slope = criterion.slope(view)
    for at in np.ndindex(view.shape):
        step = np.zeros_like(view)
        step[at] = 1e-6
        numeric = (criterion.score(view + step)[0] - criterion.score(view - step)[0]) / 2e-6
        assert slope[at] == pytest.approx(numeric, rel=1e-4, abs=1e-7)


@given(seeds, st.integers(1, 6))
def test_the_moments_of_a_gaussian_mixture_are_those_of_its_samples(seed: int, members: int) -> None:
    values, _ = make_members(NORMAL, seed, members, n=4)
    weights = np.random.default_rng(seed).dirichlet(np.ones(members))
    mean, variance = np.moveaxis(find_math(NORMAL).mix(values, weights), -1, 0)
    each = np.stack(values).astype(np.float64)
    assert np.allclose(mean, np.einsum("m,mn->n", weights, each[..., 0]))
    second = np.einsum("m,mn->n", weights, each[..., 1] + each[..., 0] ** 2)
    assert np.allclose(variance, second - mean**2, rtol=1e-5)
    assert (variance >= np.einsum("m,mn->n", weights, each[..., 1]) - 1e-9).all()


@given(seeds, st.floats(0.1, 10))
def test_a_variance_scale_undoes_a_known_one_and_is_the_best_there_is(seed: int, made: float) -> None:
    rng = np.random.default_rng(seed)
    variance = rng.uniform(0.5, 2, 4000)
    target = rng.normal(size=4000) * np.sqrt(variance)
    values = np.stack([np.zeros(4000), variance * made], axis=1)
    task_math = find_math(NORMAL)
    factor = task_math.fit_calibration(values, target)
    assert factor * made == pytest.approx(1, rel=0.15)
    best = task_math.measure(task_math.calibrate(values, factor), target)["nll"]
    for other in (0.98 * factor, 1.02 * factor, 1.0):
        assert best <= task_math.measure(task_math.calibrate(values, other), target)["nll"] + 1e-12


@examples(12)
@given(seeds, st.floats(0.3, 4))
def test_one_temperature_of_all_labels_undoes_a_known_one(seed: int, made: float) -> None:
    rng, labels = np.random.default_rng(seed), find_math(SEVERAL)
    p = 1 / (1 + np.exp(-rng.normal(size=(3000, LABELS))))
    target = (rng.random(p.shape) < p).astype(np.int64)
    scaled = labels.calibrate(p, made)
    assert np.allclose(scaled, 1 / (1 + np.exp(-np.log(p / (1 - p)) / made)))
    assert labels.fit_calibration(scaled, target) * made == pytest.approx(1, rel=0.15)
    values, target = np.full((30, LABELS), 0.1 / (CLASSES - 1)), np.zeros((30, LABELS), np.int64)
    assert labels.fit_calibration(values, target) == 1.0, "labels that are all right say nothing"
    target[:6, 0] = 1
    assert labels.fit_calibration(values, target) > 1.1


@given(seeds, st.sampled_from([ONE, SEVERAL, NORMAL]))
def test_calibration_never_worsens_the_nll_it_is_fitted_to(seed: int, task: Task) -> None:
    (values,), target = make_members(task, seed, 1, ignored=0.2)
    task_math = find_math(task)
    calibrated = task_math.calibrate(values, task_math.fit_calibration(values, target))
    before, after = task_math.measure(values, target), task_math.measure(calibrated, target)
    assert after["nll"] <= before["nll"] + 1e-9
    for kept in ("accuracy", "hamming_accuracy", "rmse", "roc_auc_macro"):
        assert after.get(kept) == pytest.approx(before.get(kept))


@pytest.mark.parametrize("task", [POINTS, LEVELLED], ids=lambda task: task.kind)
def test_what_has_no_spread_is_not_calibrated_and_says_why(task: Task) -> None:
    values, target = make_members(task, 0, 2)
    combination = fit("average", values, target, task=task)
    assert combination.calibration == 1.0
    assert np.array_equal(combination.predict(values), find_math(task).mix(values, combination.weights))
    assert "calibrate" in str(find_math(task).no_calibration)


def test_a_stack_of_points_undoes_a_bias_and_never_subtracts_a_member() -> None:
    rng, points = np.random.default_rng(0), find_math(POINTS)
    target = rng.normal(size=400)
    values = [0.5 * target + 3 + 0.3 * rng.normal(size=400), -target, rng.normal(size=400)]
    stack, held_out = points.fit_stack(values, target)
    assert stack.coefficients.min() >= 0
    assert max(points.measure(own, target)["rmse"] for own in (stack.predict(values), held_out)) < 0.6
    assert stack.shares()[0] > 0.9 and stack.shares().sum() == pytest.approx(1)


def test_points_are_combined_in_any_unit() -> None:
    points, (values, target) = find_math(POINTS), make_members(POINTS, 5, 3, positions=(2,))
    stack, _ = points.fit_stack(values, target)
    scaled, _ = points.fit_stack([1e-6 * own.astype(np.float64) for own in values], 1e-6 * target)
    assert np.allclose(scaled.coefficients, stack.coefficients, atol=1e-4)
    assert scaled.intercept == pytest.approx(1e-6 * stack.intercept, rel=1e-2)
    values, target = make_members(POINTS, 2, 5)
    tiny = points.greedy_weights([1e-9 * own.astype(np.float64) for own in values], 1e-9 * target)
    assert np.allclose(tiny, points.greedy_weights(values, target), atol=0.05)


def test_a_stack_of_labels_corrects_a_label_that_is_turned_round_and_averages_one_never_seen() -> None:
    values, target = make_members(SEVERAL, 0, 2, n=400)
    target[:, 2] = 0
    turned = [np.concatenate([1 - own[:, :1], own[:, 1:]], axis=1) for own in values]
    stack, _ = find_math(SEVERAL).fit_stack(turned, target)
    out = stack.predict(turned)
    assert np.mean((out[:, 0] >= 0.5) == target[:, 0]) > 0.8 > np.mean((turned[0][:, 0] >= 0.5) == target[:, 0])
    assert np.allclose(out[:, 2], (turned[0][:, 2].astype(float) + turned[1][:, 2]) / 2)


def test_a_stack_of_classes_knows_positions() -> None:
    values, target = make_members(ONE, 0, 2, n=100, positions=(3,), ignored=0.2)
    stack, held_out = find_math(ONE).fit_stack(values, target)
    assert held_out.shape == stack.predict(values).shape == (100, 3, CLASSES)
    assert np.allclose(held_out.sum(axis=-1), 1)
    flat, of = [own.reshape(-1, CLASSES) for own in values], target.ravel() != IGNORED
    assert np.allclose(stack.predict(values).reshape(-1, CLASSES)[of], stack.predict([own[of] for own in flat]))


def test_top5_accuracy_is_scikit_learns_and_what_samples_leave_undefined_is_absent() -> None:
    from sklearn.metrics import top_k_accuracy_score

    rng = np.random.default_rng(0)
    p = rng.integers(1, 4, (300, 8)).astype(float)
    p /= p.sum(axis=1, keepdims=True)  # with many ties
    target = rng.integers(0, 8, 300)
    expected = top_k_accuracy_score(target, p, k=5, labels=range(8))
    assert find_math(ONE).measure(p, target)["top5_accuracy"] == pytest.approx(expected)
    (few,), of_few = make_members(ONE, 0, 1)
    assert "top5_accuracy" not in find_math(ONE).measure(few, of_few), "of fewer than six classes"
    found = find_math(POINTS).measure(np.arange(3.0), np.ones(3))
    assert "r2" not in found and "pearson" not in found and found["rmse"] == pytest.approx(math.sqrt(2 / 3))
    found = find_math(SEVERAL).measure(np.full((2, 1), 0.7), np.ones((2, 1), np.int64))
    assert "roc_auc_macro" not in found and found["f1_macro"] == 1.0
    levels = np.array([[0.0, 1, 2], [2, 1, 3], [0, 3, 1], [1, 1, 1]])
    assert find_math(LEVELLED).measure(levels, np.zeros(4))["crossing"] == 0.5


ONES, TWOS = np.ones(2), np.ones((2, 2))
NO_PREDICTIONS = [(ONE, np.ones((4, 1)), "two classes or more"), (LEVELLED, np.ones((4, 2)), "not 3 quantiles")]
NO_PREDICTIONS += [(SEVERAL, 1.2 * TWOS, "not probabilities of labels"), (FREE, np.empty((0, 2)), "no samples")]
NO_PREDICTIONS += [
    (SEVERAL, 0.2 * ONES, "not probabilities [b, labels]"),
    (POINTS, np.array([1.0, np.nan]), "NaN"),
]
NO_PREDICTIONS += [(NORMAL, np.ones((4, 3)), "not means and variances"), (NORMAL, np.eye(2)[:1], "variance is 0")]
NO_TARGETS: list[Any] = [
    (SEVERAL, TWOS, [[0, 1], [2, 0]], "0 or 1, found 2"),
    (POINTS, ONES, [1, np.inf], "infinity"),
]
NO_TARGETS += [
    (POINTS, TWOS, [1.0, 1.0], r"got \[2, 2\] and \[2\]"),
    (POINTS, ONES, [np.nan] * 2, "ignored"),
]
NO_TARGETS += [(NORMAL, TWOS, TWOS, r"\[n, ..., 2\]"), (ONE, TWOS / 2, [IGNORED] * 2, "all 2 are ignored")]


def test_what_is_no_prediction_or_target_of_a_task_is_refused() -> None:
    for task, values, says in NO_PREDICTIONS:
        assert says in str(find_math(task).explain_invalid(values))
    for task, values, target, says in NO_TARGETS:
        with pytest.raises(CombineError, match=says):
            find_math(task).measure(values, np.array(target))
    for method in COMBINERS:
        with pytest.raises(CombineError, match=r"declare Ensemble.combine as a function"):
            fit(method, [TWOS, 0 * TWOS], np.arange(2), task=FREE).predict([TWOS, 0 * TWOS])


def test_levels_are_of_their_quantiles() -> None:
    target = np.random.default_rng(0).normal(size=2000)
    task_math = find_math(quantiles(0.2, 0.7))
    guess = task_math.guess(np.empty((2000, 2)), target)
    assert guess[0] == pytest.approx(np.quantile(target, [0.2, 0.7]))
    least = task_math.measure(guess, target)["pinball"]
    for shift in (-0.1, 0.1):
        assert task_math.measure(guess + np.array([shift, 0]), target)["pinball"] > least
        assert task_math.measure(guess + np.array([0, shift]), target)["pinball"] > least
