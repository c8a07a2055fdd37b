"""Intervals: they hold the truth about as often as they say, and are those of figures that are measured anew."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kit.task_members import CLASSES, TASKS, Array, make_members

from ensemble.combine import find_math
from ensemble.combine.bootstrap import Resampled, draw, find_interval, find_noise, intervals
from ensemble.combine.metrics import AreasUnderCurve, Positions
from ensemble.spec.task import Task

ONE, SEVERAL, POINTS, *_ = TASKS


@given(st.integers(0, 10_000), st.sampled_from(TASKS), st.booleans())
def test_figures_of_a_resample_are_those_of_its_samples(seed: int, task: Task, positions: bool) -> None:
    """What the sums and ranks say of counts is what the measure says of samples that are there so often."""
    (values,), target = make_members(task, seed, 1, n=30, positions=(2,) if positions else (), ignored=0.1)
    task_math = find_math(task)
    counts = np.bincount(np.random.default_rng(seed).integers(0, 30, 30), minlength=30)
    chosen = np.repeat(np.arange(30), counts)
    expected = task_math.measure(values[chosen], target[chosen])
    found = {
        name: float(drawn[0])
        for statistic in task_math.statistics(values, target)
        for name, drawn in statistic(counts[None].astype(float)).items()
    }
    assert {name: found[name] for name in expected} == pytest.approx(expected, rel=1e-9, abs=1e-9)


@given(st.integers(0, 10_000))
def test_the_area_under_a_curve_is_scikit_learns_with_weights(seed: int) -> None:
    from sklearn.metrics import roc_auc_score

    rng = np.random.default_rng(seed)
    scores, target = rng.integers(0, 6, 40) / 5, rng.integers(0, 2, 40)  # with ties
    weights = rng.integers(0, 4, (3, 40)).astype(float)
    found = AreasUnderCurve("auc", (Positions(scores, target, np.arange(40), 40),))(weights)["auc"]
    expected = [roc_auc_score(target, scores, sample_weight=own) for own in weights]
    assert found == pytest.approx(np.array(expected), rel=1e-12)


def test_the_interval_of_an_accuracy_is_the_binomial_one() -> None:
    """Of 400 samples with 80 % right: 0.8 +- 1.96 * 0.02."""
    target = np.zeros(400, np.int64)
    p = np.full((400, 2), 0.5)
    p[:320, 0], p[320:, 0] = 0.9, 0.1
    p[:, 1] = 1 - p[:, 0]
    low, high = intervals({"ensemble": find_math(ONE).statistics(p, target)}, 400)["ensemble"]["accuracy"]
    assert low == pytest.approx(0.8 - 0.0392, abs=0.006) and high == pytest.approx(0.8 + 0.0392, abs=0.006)


def test_intervals_hold_the_true_figure_about_as_often_as_they_say() -> None:
    truth = {"rmse": 0.5, "mae": 0.5 * np.sqrt(2 / np.pi), "r2": 0.75}
    hits = dict.fromkeys(truth, 0)
    for seed in range(150):
        rng = np.random.default_rng(seed)
        target = rng.normal(size=150)
        of = find_math(POINTS).statistics(target + 0.5 * rng.normal(size=150), target)
        found = intervals({"ensemble": of}, 150, draws=300)["ensemble"]
        for name, true in truth.items():
            hits[name] += found[name][0] <= true <= found[name][1]
    assert min(hits.values()) > 0.87 * 150


def test_the_interval_of_an_error_of_calibration_reaches_below_what_chance_has_added() -> None:
    """Of perfectly calibrated predictions the true error is 0; of each draw it is larger than what is measured."""
    hits = 0
    for seed in range(40):
        rng = np.random.default_rng(seed)
        p = rng.dirichlet(np.ones(2), 359)
        target = (rng.random(359) < p[:, 1]).astype(np.int64)
        of = find_math(ONE).statistics(p, target)
        low, high = intervals({"ensemble": of}, 359, draws=300)["ensemble"]["ece"]
        assert 0 <= low <= find_math(ONE).measure(p, target)["ece"] <= high
        hits += low == 0
    assert hits > 20, "none, were it between quantiles of the draws"


def test_positions_of_a_sample_are_drawn_together() -> None:
    """A hundred equal steps a sample: as sure as one step, not ten times surer."""
    (values,), target = make_members(ONE, 0, 1, n=50)
    wide = np.repeat(values[:, None], 100, axis=1), np.repeat(target[:, None], 100, axis=1)
    one = intervals({"e": find_math(ONE).statistics(values, target)}, 50)["e"]
    many = intervals({"e": find_math(ONE).statistics(*wide)}, 50)["e"]
    assert many["accuracy"] == pytest.approx(one["accuracy"]) and many["nll"] == pytest.approx(one["nll"])


def test_a_difference_is_drawn_in_pairs_and_known_better_than_its_parts() -> None:
    (values,), target = make_members(ONE, 1, 1, n=200)
    p = values.astype(np.float64)
    better = 0.98 * p + 0.02 * np.eye(CLASSES)[target]
    of = {"ensemble": find_math(ONE).statistics(better, target), "best": find_math(ONE).statistics(p, target)}
    found = intervals(of, 200)
    width = {model: found[model]["nll"][1] - found[model]["nll"][0] for model in found}
    assert width["difference"] < 0.3 * width["best"]
    assert found["difference"]["nll"][1] < 0 and "nll" not in find_noise(found)


def test_equal_models_and_errors_of_calibration_that_are_0_within_noise_do_not_differ() -> None:
    (values,), target = make_members(SEVERAL, 1, 1)
    of = find_math(SEVERAL).statistics(values, target)
    found = intervals({"ensemble": of, "best": of}, len(target))
    assert set(find_noise(found)) == set(found["ensemble"]) and found["difference"]["nll"] == [0, 0]
    drawn = [0.04, 0.07], [0.0, 0.09], [0.0, 0.0]
    apart, combined, best = [{"ece": each, "rmse": each} for each in drawn]
    known = {"ensemble": combined, "best": best, "difference": apart}
    assert find_noise(known) == ["ece"]
    assert find_noise({**known, "ensemble": apart}) == [], "one of them is more than noise"


def spread(values: Array, target: Array) -> float:
    return float(np.ptp(values - target))


def test_metrics_of_a_whole_split_have_intervals_too() -> None:
    (values,), target = make_members(POINTS, 1, 1)
    metrics = ("spearman", spread)
    found = intervals({"ensemble": [Resampled(metrics, values, target, POINTS)]}, len(target))["ensemble"]
    measured = find_math(POINTS).measure(values, target, metrics)
    for name in ("spearman", "spread"):
        low, high = found[name]
        assert low <= measured[name] <= high
    assert found["spearman"][0] < found["spearman"][1]


def test_draws_are_repeatable_and_fewer_for_very_many_samples() -> None:
    def count(counts: Array | None) -> dict[str, Array]:
        assert counts is not None
        return {"rows": counts.sum(axis=1), "first": counts[:, 0]}

    first, again = (draw({"a": [count]}, 1000, 50)["a"] for _ in range(2))
    assert np.array_equal(first["first"], again["first"]) and set(first["rows"]) == {1000}
    assert len(draw({"a": [count]}, 160_000)["a"]["rows"]) == 125


@pytest.mark.parametrize(("n", "draws"), [(100, 200), (10_000, 50), (20_000, 0)])
def test_metrics_of_a_whole_split_are_computed_anew_as_often_as_the_predictions_allow(n: int, draws: int) -> None:
    """Of 100 positions a sample; scikit-learn takes half a second for the ROC-AUC of a million probabilities."""
    calls = []

    def count(values: Array, target: Array) -> float:
        calls.append(len(values))
        return float(values[0, 0])

    values = np.broadcast_to(np.arange(n, dtype=np.float32)[:, None], (n, 100))
    found = intervals({"e": [Resampled((count,), values, values, POINTS)]}, n)
    assert len(calls) == (draws + 1 if draws else 0) and set(calls) <= {n}
    assert list(found["e"]) == ["count"] * bool(draws)


def measure_late(values: Array, target: Array) -> float:
    """A figure of an event that few samples have, and that cannot be computed without it."""
    if not (target > 100).any():
        raise ValueError("only one class")
    return float(np.mean(values[target > 100]))


@pytest.mark.parametrize(("events", "has"), [(3, True), (0, False)])
def test_a_metric_that_fails_for_some_draws_has_an_interval_where_most_have_it(events: int, has: bool) -> None:
    target = np.arange(80.0) + 100 * (np.arange(80) >= 80 - events)
    found = intervals({"ensemble": [Resampled((measure_late,), target, target, POINTS)]}, 80)["ensemble"]
    assert list(found) == ["measure_late"] * has
    assert not has or found["measure_late"][0] < found["measure_late"][1]


def test_equal_targets_in_most_draws_do_not_make_a_coefficient_of_determination() -> None:
    """One sample of 20 differs, of which a third of the draws have none: then nothing varies but by rounding."""
    for seed in range(40):
        rng = np.random.default_rng(seed)
        target = np.full(20, rng.normal())
        target[0] += 1
        of = find_math(POINTS).statistics(target + 0.1 * rng.normal(size=20), target)
        assert intervals({"ensemble": of}, 20, draws=300)["ensemble"]["r2"][0] > -1000


def test_a_figure_that_no_draw_moves_has_no_interval_but_a_difference_has() -> None:
    """All of 20 samples are right: the accuracy of others need not be 1, and the draws cannot tell."""
    both = {"ensemble": np.tile([0.9, 0.1], (20, 1)), "best": np.tile([0.6, 0.4], (20, 1))}
    both["ensemble"][:5] = [0.8, 0.2]

    def draw_of(samples: int, *models: str) -> dict[str, dict[str, list[float]]]:
        zeros = np.zeros(samples, np.int64)
        of = {name: find_math(ONE).statistics(both[name][-samples:], zeros) for name in models or both}
        return intervals(of, samples)

    found, single = draw_of(20), draw_of(1)
    assert "accuracy" not in found["ensemble"] and found["ensemble"]["nll"][0] < found["ensemble"]["nll"][1]
    assert found["best"] == {} and found["difference"]["accuracy"] == [0, 0]
    assert not any(single.values()) and list(single) == ["ensemble", "best", "difference"]
    assert "difference" not in draw_of(1, "ensemble")
    assert find_noise(single, ["nll", "brier"]) == ["nll", "brier"], "of one sample no difference is more"
    known = {"difference": {"nll": [-2.0, -1.0], "ece": [-1.0, 1.0]}}
    assert find_noise(known, ["accuracy", "nll"]) == ["ece", "accuracy"]


def test_a_figure_that_most_draws_leave_undefined_has_no_interval() -> None:
    for defined, undefined in ((0, 100), (40, 60), (60, 40)):
        drawn = np.concatenate([np.linspace(0, 1, defined), np.full(undefined, np.nan)])
        assert (find_interval(0.5, drawn) is None) == (defined < undefined)
    assert find_interval(float("nan"), np.arange(100.0)) is None
    assert find_interval(50, np.arange(101.0)) == pytest.approx([2.5, 97.5], abs=0.1)
