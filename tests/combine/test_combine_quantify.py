"""How sure a combined model is, from predictions that are saved: what the event and the table of samples have."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from ensemble.combine.combination import Combination, fit
from ensemble.combine.conformal import load_conformal, measure
from ensemble.combine.metrics import CombineError
from ensemble.combine.prediction_matrix import PredictionMatrix
from ensemble.combine.quantify import COLUMNS, Quantified, describe, format_samples, quantify
from ensemble.combine.selective import measure_selective
from ensemble.combine.uncertainty import decompose
from ensemble.spec.task import CLASSIFICATION, IGNORED, Task, quantiles

MULTILABEL, REGRESSION, GAUSSIAN, FREE = (Task(kind) for kind in ("multilabel", "regression", "gaussian", "free"))
QUANTILES = quantiles(0.05, 0.4, 0.95)
TASKS = [CLASSIFICATION, MULTILABEL, REGRESSION, GAUSSIAN, QUANTILES, FREE]


def draw(task: Task, seed: int, n: int = 300) -> PredictionMatrix:
    """Predictions of three members that resemble each other, and targets that resemble them."""
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


def combine_equally(task: Task) -> Combination:
    return Combination("average", np.full(3, 1 / 3), task=task, function=mean if task == FREE else None)


def mean(values: Any) -> Any:
    return values.mean(dim=0)


def read(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text)))


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.kind)
def test_the_event_says_how_sure_a_model_of_any_task_is(task: Task) -> None:
    aligned = {split: draw(task, seed) for seed, split in enumerate(("valid", "test", "shifted"))}
    combination = combine_equally(task)
    valid, test, shifted = (quantify(split, own, combination) for split, own in aligned.items())
    found = describe(valid, test, shifted)
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    if task == FREE:
        assert found == dict.fromkeys(("uncertainty", "conformal", "selective", "shifted"))
        return
    parts = decompose(task, aligned["test"].values, combination.weights)
    assert found["uncertainty"] == {name: pytest.approx(one.mean()) for name, one in parts.items()}
    assert set(found["shifted"]) == set(parts)
    assert test.target is not None
    own = measure_selective(task, test.values, test.target, parts.get("epistemic"))
    assert own is not None and found["selective"] == {"ensemble": own}
    alone = describe(valid, replace(test, best=aligned["test"].values[0]), None)["selective"]
    assert ("best" in alone) == (task != REGRESSION), "a single member's points have no score"
    for method, record in found["conformal"].items():
        assert record["method"] == method
        assert record["coverage"] == pytest.approx(0.9, abs=0.08)  # 300 samples: a deviation of 0.025
        again = measure(load_conformal(record), test.values, test.target, test.index)
        assert again.items() <= record.items()


def test_coverage_is_not_measured_on_what_conformal_prediction_was_calibrated_on() -> None:
    valid = quantify("valid", draw(CLASSIFICATION, 0), combine_equally(CLASSIFICATION))
    alone = describe(valid, valid, None)
    assert set(alone["conformal"]) == {"thr", "aps", "raps"} and alone["shifted"] is None
    assert all("coverage" not in record and record["size"] > 0 for record in alone["conformal"].values())


def test_too_few_samples_promise_nothing_and_infinite_widths_are_left_out() -> None:
    valid, test = (quantify(name, draw(REGRESSION, 0, n), combine_equally(REGRESSION)) for name, n in
                   (("valid", 8), ("test", 50)))  # fmt: skip
    record = describe(valid, test, None)["conformal"]["absolute"]
    assert record["threshold"] is None and record["coverage"] == 1 and "size" not in record


def test_calibration_comes_before_conformal_prediction() -> None:
    valid, test = draw(CLASSIFICATION, 0), draw(CLASSIFICATION, 1)
    combination = fit("average", valid.values, valid.target)
    assert combination.temperature != 1
    sure, unsure = (
        describe(quantify("valid", valid, one), quantify("test", test, one), None)["conformal"]["thr"][
            "thresholds"
        ]
        for one in (combination, combine_equally(CLASSIFICATION))
    )
    assert sure != unsure


def test_the_table_has_each_sample_with_all_digits() -> None:
    aligned = draw(CLASSIFICATION, 0, 20)
    split = quantify("test", aligned, combine_equally(CLASSIFICATION))
    rows = read(
        format_samples([split, Quantified("shifted", CLASSIFICATION, split.index, None, split.values, {})])
    )
    assert list(rows[0]) == list(COLUMNS) and len(rows) == 40
    assert [int(row["index"]) for row in rows[:20]] == aligned.index.tolist()
    assert [int(row["target"]) for row in rows[:20]] == aligned.target.tolist()  # type: ignore[union-attr]
    assert [int(row["prediction"]) for row in rows[:20]] == split.values.argmax(axis=1).tolist()
    for name, values in split.parts.items():
        assert [float(row[name]) for row in rows[:20]] == values.tolist()
    assert {row["split"] for row in rows[20:]} == {"shifted"}
    assert all(row["target"] == row["total"] == "" for row in rows[20:])


@pytest.mark.parametrize(
    ("task", "values", "target", "cells"),
    [
        (
            MULTILABEL,
            [[0.9, 0.2, 0.8], [0.1, 0.1, 0.1]],
            [[1, 0, 1], [0, IGNORED, 1]],
            [("0 2", "0 2"), ("2", "")],
        ),
        (REGRESSION, [1.5, 2.5], [1.0, np.nan], [("1.0", "1.5"), ("", "2.5")]),
        (GAUSSIAN, [[1.5, 9.0]], [1.0], [("1.0", "1.5")]),
        (QUANTILES, [[1.0, 2.0, 3.0]], [1.0], [("1.0", "2.0")]),
        (CLASSIFICATION, [[[0.1, 0.9], [0.8, 0.2]]], [[0, 1]], [("", "")]),
        (FREE, [[1.0, 2.0]], [[3.0, 4.0]], [("", "")]),
    ],
    ids=lambda case: case.kind if isinstance(case, Task) else "",
)
def test_a_sample_has_one_target_and_one_prediction_or_none(
    task: Task, values: Any, target: Any, cells: list[tuple[str, str]]
) -> None:
    aligned = PredictionMatrix(["a"], [np.array(values)], np.arange(len(values)), np.array(target), {}, task)
    rows = read(format_samples([quantify("test", aligned, replace(combine_equally(task), weights=np.ones(1)))]))
    assert [(row["target"], row["prediction"]) for row in rows] == cells


def test_targets_that_members_do_not_know_hinder_nothing() -> None:
    aligned = draw(CLASSIFICATION, 0, 30)
    strange = PredictionMatrix(
        aligned.members, aligned.values, aligned.index, np.full((30, 2), 57), {}, CLASSIFICATION
    )
    combination = combine_equally(CLASSIFICATION)
    assert quantify("shifted", strange, combination).parts["total"] == pytest.approx(
        quantify("shifted", aligned, combination).parts["total"]
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
