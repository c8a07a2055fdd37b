"""Where the uncertainty of an ensemble comes from: against hand-computed cases, SciPy's entropy and properties."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import entropy

from ensemble.combine import CombineError
from ensemble.combine.combination import Combination, fit
from ensemble.combine.conformal import describe, load_conformal, measure
from ensemble.combine.metrics import find_known
from ensemble.combine.prediction_matrix import PredictionMatrix
from ensemble.combine.uncertainty import PARTS, Quantified, average, decompose, decompose_positions, quantify
from ensemble.spec.task import CLASSIFICATION, Task, quantiles

MULTILABEL, REGRESSION, GAUSSIAN, FREE = (Task(kind) for kind in ("multilabel", "regression", "gaussian", "free"))
HALVES = np.array([0.5, 0.5])


def draw_members(seed: int, members: int, *shape: int) -> tuple[list[np.ndarray], np.ndarray]:
    rng = np.random.default_rng(seed)
    sharpness = rng.choice([0.01, 0.3, 3.0], size=members)
    values = [rng.dirichlet(np.full(shape[-1], s), size=shape[:-1]).astype(np.float32) for s in sharpness]
    return values, rng.dirichlet(np.full(members, 0.5))


def test_sure_members_that_differ_are_epistemic_and_unsure_ones_that_agree_aleatoric_uncertainty() -> None:
    sure = [np.array([[1.0, 0.0]], np.float32), np.array([[0.0, 1.0]], np.float32)]
    parts = decompose(CLASSIFICATION, sure, HALVES)
    assert [parts[name][0] for name in PARTS] == pytest.approx([math.log(2), 0.0, math.log(2), 1.0])
    parts = decompose(CLASSIFICATION, [np.array([[0.5, 0.3, 0.2]])] * 3, np.full(3, 1 / 3))
    assert parts["total"] == pytest.approx(entropy([0.5, 0.3, 0.2])) == parts["aleatoric"]
    assert parts["epistemic"] == pytest.approx(0, abs=1e-15) and parts["disagreement"] == 0.0


def test_a_member_without_weight_changes_nothing_and_one_that_has_all_of_it_agrees_with_itself() -> None:
    values, _ = draw_members(1, 3, 8, 4)
    two = decompose(CLASSIFICATION, values[:2], np.array([0.25, 0.75]))
    three = decompose(CLASSIFICATION, values, np.array([0.25, 0.75, 0.0]))
    assert all(np.array_equal(two[name], three[name]) for name in PARTS)
    parts = decompose(CLASSIFICATION, values[:2], np.array([1.0, 0.0]))
    assert not parts["disagreement"].any() and not parts["epistemic"].any()


@given(seed=st.integers(0, 2**32), members=st.integers(1, 6), classes=st.integers(2, 7))
def test_entropies_are_scipys_and_the_parts_sum(seed: int, members: int, classes: int) -> None:
    values, weights = draw_members(seed, members, 5, classes)
    parts = decompose(CLASSIFICATION, values, weights)
    mixture = sum(w * v.astype(np.float64) for w, v in zip(weights, values, strict=True))
    # SciPy scales what it is given to sum 1, which float32 rows do within 1e-6.
    assert parts["total"] == pytest.approx(entropy(mixture, axis=1), abs=1e-5)
    alone = sum(w * entropy(v, axis=1) for w, v in zip(weights, values, strict=True))
    assert parts["aleatoric"] == pytest.approx(alone, abs=1e-5)
    assert parts["total"] == pytest.approx(parts["aleatoric"] + parts["epistemic"], abs=1e-12)
    divergence = sum(w * entropy(v, mixture, axis=1) for w, v in zip(weights, values, strict=True))
    assert parts["epistemic"] == pytest.approx(divergence, abs=1e-5)
    for name in PARTS:
        assert (parts[name] >= 0).all()
    assert (parts["total"] <= math.log(classes) + 1e-6).all() and (parts["disagreement"] <= 1).all()


@given(seed=st.integers(0, 2**32), members=st.integers(1, 9))
def test_disagreement_is_that_of_two_different_members_drawn_by_weight(seed: int, members: int) -> None:
    values, weights = draw_members(seed, members, 6, 3)
    same = decompose(CLASSIFICATION, [np.sort(v, axis=1) for v in values], weights)
    assert (same["disagreement"] == 0).all(), "exactly, where they name one class"
    if members > 1:
        chosen = [v.argmax(axis=1) for v in values]
        pairs = list(itertools.permutations(range(members), 2))
        mass = sum(weights[i] * weights[j] for i, j in pairs)
        expected = sum(weights[i] * weights[j] * (chosen[i] != chosen[j]) for i, j in pairs) / mass
        assert decompose(CLASSIFICATION, values, weights)["disagreement"] == pytest.approx(expected, abs=1e-9)


def test_a_label_is_a_distribution_over_two_classes() -> None:
    yes = [np.array([[0.9, 0.5], [0.2, 1.0]], np.float32), np.array([[0.4, 0.5], [0.1, 1.0]], np.float32)]
    labels = decompose_positions(MULTILABEL, yes, HALVES)
    pairs = [np.stack([1 - v.astype(np.float64), v], axis=-1) for v in yes]
    classes = decompose_positions(CLASSIFICATION, pairs, HALVES)
    for name in PARTS:
        assert labels[name] == pytest.approx(classes[name], abs=1e-12)
        assert decompose(MULTILABEL, yes, HALVES)[name] == pytest.approx(labels[name].mean(axis=1))
    assert labels["disagreement"][0, 0] == 1 and labels["disagreement"].sum() == 1


def test_positions_that_take_no_part_are_left_out_of_a_samples_mean() -> None:
    values, weights = draw_members(2, 3, 4, 5, 3)
    target = np.zeros((4, 5), np.int64)
    target[0, 2:] = target[3] = -100
    each = decompose_positions(CLASSIFICATION, values, weights)["total"]
    assert each.shape == (4, 5)
    means = decompose(CLASSIFICATION, values, weights, find_known(target))["total"]
    assert means[:3] == pytest.approx([each[0, :2].mean(), each[1].mean(), each[2].mean()])
    assert np.isnan(means[3])
    assert average({"total": means}) == {"total": pytest.approx(means[:3].mean())}
    assert average({"total": np.array([np.nan])}) == {}


def test_chunks_are_invisible(monkeypatch: pytest.MonkeyPatch) -> None:
    values, weights = draw_members(3, 3, 50, 4)
    whole = decompose(CLASSIFICATION, values, weights)
    monkeypatch.setattr("ensemble.combine.formulas.CHUNK", 12)
    for name, one in decompose(CLASSIFICATION, values, weights).items():
        assert np.array_equal(one, whole[name])


@given(seed=st.integers(0, 2**32), members=st.integers(1, 5))
def test_variances_follow_the_law_of_total_variance(seed: int, members: int) -> None:
    rng = np.random.default_rng(seed)
    values = [np.stack([rng.normal(3, 2, (4, 2)), rng.uniform(0.1, 2, (4, 2))], axis=-1) for _ in range(members)]
    weights = rng.dirichlet(np.ones(members))
    parts = decompose_positions(GAUSSIAN, values, weights)
    # E[y^2] - E[y]^2 of the mixture
    second = sum(w * (v[..., 1] + v[..., 0] ** 2) for w, v in zip(weights, values, strict=True))
    first = sum(w * v[..., 0] for w, v in zip(weights, values, strict=True))
    assert parts["total"] == pytest.approx(second - first**2, abs=1e-9)
    assert parts["total"] == pytest.approx(parts["aleatoric"] + parts["epistemic"])
    assert set(parts) == {"total", "aleatoric", "epistemic"}


def test_points_have_a_variance_and_quantiles_a_width_and_a_spread() -> None:
    points = [np.array([1.0, 2.0], np.float32), np.array([3.0, 2.0], np.float32)]
    assert {k: v.tolist() for k, v in decompose(REGRESSION, points, HALVES).items()} == {"epistemic": [1.0, 0.0]}
    task = quantiles(0.1, 0.5, 0.9)
    levels = [np.array([[0.0, 1.0, 4.0]]), np.array([[2.0, 3.0, 4.0]])]
    parts = decompose(task, levels, HALVES)
    assert parts["aleatoric"] == pytest.approx([3.0])
    assert parts["epistemic"] == pytest.approx([math.sqrt(2 / 3)])
    assert set(parts) == {"aleatoric", "epistemic"}
    assert decompose(FREE, points, HALVES) == {}


def test_weights_that_are_none_are_refused() -> None:
    values, _ = draw_members(4, 2, 3, 2)
    for weights in ([1.0], [0.5, -0.5], [0.0, 0.0], [math.nan, 1.0]):
        with pytest.raises(CombineError, match="weights"):
            decompose(CLASSIFICATION, values, np.array(weights))


QUANTILES = quantiles(0.05, 0.4, 0.95)
TASKS = [CLASSIFICATION, MULTILABEL, REGRESSION, GAUSSIAN, QUANTILES, FREE]


def draw(task: Task, seed: int, n: int = 300) -> PredictionMatrix:
    rng = np.random.default_rng(seed)
    x = rng.normal(size=n)
    values, target = [], np.empty(0)
    for _ in range(3):
        own = x + 0.3 * rng.normal(size=n)
        if task == CLASSIFICATION:
            scores = np.exp(np.stack([own, -own, np.zeros(n)], axis=1))
            values.append(scores / scores.sum(axis=1, keepdims=True))
            target = np.where(np.abs(x) < 0.3, 2, x < 0)
        elif task == MULTILABEL:
            values.append(1 / (1 + np.exp(-np.stack([own, 2 * own], axis=1))))
            target = (rng.random((n, 2)) < 1 / (1 + np.exp(-np.stack([x, 2 * x], axis=1)))).astype(np.int64)
        else:
            spread = {GAUSSIAN: [0, 1], QUANTILES: [-1, 0, 1.5]}.get(task)
            values.append(own if spread is None else np.stack([own, np.full(n, 0.7)], 1) if task == GAUSSIAN
                          else own[:, None] + spread)  # fmt: skip
            target = x + rng.normal(size=n)
    rows = [np.asarray(own, np.float32) for own in values]
    return PredictionMatrix(["a", "b", "c"], rows, np.arange(10, 10 + n), target, {}, task)


def describe_both(valid: Quantified, report: Quantified) -> Any:
    assert valid.target is not None and report.target is not None
    both = (valid.values, valid.target), (report.values, report.target)
    return describe(valid.task, *both, level=0.9, is_same=valid is report)


def combine_equally(task: Task) -> Combination:
    return Combination("average", np.full(3, 1 / 3), task=task, function=mean if task == FREE else None)


def mean(values: Any) -> Any:
    return values.mean(dim=0)


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.kind)
def test_the_event_says_how_sure_a_model_of_any_task_is(task: Task) -> None:
    aligned = {split: draw(task, seed) for seed, split in enumerate(("valid", "test"))}
    combination = combine_equally(task)
    valid, test = (quantify(split, own, combination) for split, own in aligned.items())
    found = {"uncertainty": average(test.parts) or None, "conformal": describe_both(valid, test)}
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    if task == FREE:
        assert found == dict.fromkeys(("uncertainty", "conformal"))
        return
    parts = decompose(task, aligned["test"].values, combination.weights)
    assert found["uncertainty"] == {name: pytest.approx(one.mean()) for name, one in parts.items()}
    assert test.target is not None
    for method, record in found["conformal"].items():
        assert record["method"] == method
        assert record["coverage"] == pytest.approx(0.9, abs=0.08)  # 300 samples: a deviation of 0.025
        again = measure(load_conformal(record), test.values, test.target)
        assert again.items() <= record.items()


def test_conformal_prediction_follows_calibration_and_measures_no_coverage_on_its_own_samples() -> None:
    valid, test = draw(CLASSIFICATION, 0), draw(CLASSIFICATION, 1)
    equally, fitted = combine_equally(CLASSIFICATION), fit("average", valid.values, valid.target)
    assert fitted.calibration != 1
    sure, unsure = (
        describe_both(quantify("valid", valid, one), quantify("test", test, one))["thr"]["thresholds"]
        for one in (fitted, equally)
    )
    assert sure != unsure
    of_valid = quantify("valid", valid, equally)
    alone = describe_both(of_valid, of_valid)
    assert set(alone) == {"thr", "aps"}
    assert all("coverage" not in record and record["size"] > 0 for record in alone.values())
    strange = replace(test, target=np.full((300, 2), 57))  # targets that members do not know hinder nothing
    found, expected = (quantify("test", own, equally).parts["total"] for own in (strange, test))
    assert found == pytest.approx(expected)
