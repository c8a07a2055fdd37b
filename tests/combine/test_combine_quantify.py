"""How sure a combined model is, from predictions that are saved: what the event and the table of samples have."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from ensemble.combine.combination import Combination, fit
from ensemble.combine.conformal import describe, load_conformal, measure
from ensemble.combine.metrics import CombineError
from ensemble.combine.prediction_matrix import PredictionMatrix
from ensemble.combine.uncertainty import Quantified, average, decompose, quantify
from ensemble.spec.task import CLASSIFICATION, IGNORED, Task, quantiles

MULTILABEL, REGRESSION, GAUSSIAN, FREE = (Task(kind) for kind in ("multilabel", "regression", "gaussian", "free"))
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


def test_coverage_is_not_measured_on_what_conformal_prediction_was_calibrated_on() -> None:
    valid = quantify("valid", draw(CLASSIFICATION, 0), combine_equally(CLASSIFICATION))
    alone = describe_both(valid, valid)
    assert set(alone) == {"thr", "aps"}
    assert all("coverage" not in record and record["size"] > 0 for record in alone.values())


def test_too_few_samples_promise_nothing_and_infinite_widths_are_left_out() -> None:
    valid, test = (quantify(name, draw(REGRESSION, 0, n), combine_equally(REGRESSION)) for name, n in
                   (("valid", 8), ("test", 50)))  # fmt: skip
    record = describe_both(valid, test)["absolute"]
    assert record["threshold"] is None and record["coverage"] == 1 and "size" not in record


def test_calibration_comes_before_conformal_prediction() -> None:
    valid, test = draw(CLASSIFICATION, 0), draw(CLASSIFICATION, 1)
    combination = fit("average", valid.values, valid.target)
    assert combination.calibration != 1
    sure, unsure = (
        describe_both(quantify("valid", valid, one), quantify("test", test, one))["thr"]["thresholds"]
        for one in (combination, combine_equally(CLASSIFICATION))
    )
    assert sure != unsure


def test_targets_that_members_do_not_know_hinder_nothing() -> None:
    aligned = draw(CLASSIFICATION, 0, 30)
    strange = PredictionMatrix(
        aligned.members, aligned.values, aligned.index, np.full((30, 2), 57), {}, CLASSIFICATION
    )
    combination = combine_equally(CLASSIFICATION)
    assert quantify("test", strange, combination).parts["total"] == pytest.approx(
        quantify("test", aligned, combination).parts["total"]
    )


def test_positions_that_take_no_part_change_no_mean() -> None:
    aligned = draw(CLASSIFICATION, 0, 40)
    padded = [np.stack([own, np.full_like(own, 1 / 3)], axis=1) for own in aligned.values]
    target = np.stack([aligned.target, np.full(40, IGNORED)], axis=1)  # type: ignore[list-item]
    longer = PredictionMatrix(aligned.members, padded, aligned.index, target, {}, CLASSIFICATION)
    combination = combine_equally(CLASSIFICATION)
    once, twice = quantify("test", aligned, combination), quantify("test", longer, combination)
    for name, values in once.parts.items():
        assert twice.parts[name] == pytest.approx(values, abs=1e-12)
    with pytest.raises(CombineError):
        quantify("test", aligned, Combination("average", np.ones(2) / 2))
