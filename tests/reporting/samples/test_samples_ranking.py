"""Scores of samples sum up to the figures of the split, and filters find what the confusion matrix counts."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import run_events
from event_dicts import fold, read_events

from ensemble.combine import find_math
from ensemble.combine.sample_scores import measure_disagreement, measure_doubt, measure_loss
from ensemble.combine.uncertainty import decompose
from ensemble.reporting.dashboard.analysis import read_quality
from ensemble.reporting.samples.document import EMPTY, Query, list_samples
from ensemble.reporting.samples.ranking import Filter, rank_samples
from ensemble.spec.task import IGNORED, Task, quantiles
from ensemble.store import RunDir, save_predictions

RNG = np.random.default_rng(0)
ROWS = 60


def probabilities(*shape: int) -> np.ndarray:
    values = RNG.random(shape) + 0.05
    return values / values.sum(axis=-1, keepdims=True)


def with_holes(target: np.ndarray, hole: float) -> np.ndarray:
    """A target of several positions, of which some take no part; each sample keeps as many."""
    target = target.copy()
    target[:, 0] = hole
    return target


#: Task -> members' values, target, and the figure that is the mean of the losses.
TASKS: dict[str, tuple[Task, Any, np.ndarray, str]] = {
    "classes": (Task("classification"), lambda: probabilities(ROWS, 4), RNG.integers(0, 4, ROWS), "nll"),
    "classes at steps": (
        Task("classification"),
        lambda: probabilities(ROWS, 5, 3),
        with_holes(RNG.integers(0, 3, (ROWS, 5)), IGNORED),
        "nll",
    ),
    "labels": (Task("multilabel"), lambda: RNG.random((ROWS, 4)), RNG.integers(0, 2, (ROWS, 4)), "nll"),
    "numbers": (Task("regression"), lambda: RNG.normal(size=ROWS), RNG.normal(size=ROWS), "rmse"),
    "several numbers": (
        Task("regression"),
        lambda: RNG.normal(size=(ROWS, 3)),
        with_holes(RNG.normal(size=(ROWS, 3)), np.nan),
        "rmse",
    ),
    "mean and variance": (
        Task("gaussian"),
        lambda: np.stack([RNG.normal(size=ROWS), RNG.random(ROWS) + 0.1], axis=-1),
        RNG.normal(size=ROWS),
        "nll",
    ),
    "quantiles": (
        quantiles(0.1, 0.5, 0.9),
        lambda: np.sort(RNG.normal(size=(ROWS, 3)), axis=-1),
        RNG.normal(size=ROWS),
        "pinball",
    ),
}


@pytest.mark.parametrize("name", TASKS)
def test_the_mean_of_the_losses_is_the_figure_of_the_split(name: str) -> None:
    task, make, target, figure = TASKS[name]
    values = make()
    losses = measure_loss(task, values, target).values
    assert losses is not None and losses.shape == (ROWS,)
    mean = np.sqrt(np.mean(losses**2)) if figure == "rmse" else np.mean(losses)
    assert mean == pytest.approx(find_math(task).measure(values, target)[figure])


@pytest.mark.parametrize("name", TASKS)
def test_doubt_and_disagreement_are_those_of_the_decomposition(name: str) -> None:
    task, make, target, _ = TASKS[name]
    members, weights = [make(), make()], np.array([0.25, 0.75])
    part = target != IGNORED if target.dtype.kind == "i" else ~np.isnan(target)
    parts = decompose(task, members, weights, part)
    mixed = find_math(task).mix(members, weights)
    doubt, spread = measure_doubt(task, mixed, target), measure_disagreement(task, members, weights, target)
    is_root = task.kind in ("regression", "gaussian")
    assert spread.values == pytest.approx(np.sqrt(parts["epistemic"]) if is_root else parts["epistemic"])
    if task.kind == "regression":
        assert doubt.values is None and "disagreement" in str(doubt.missing)
    else:
        total = parts["aleatoric"] if task.kind == "quantiles" else parts["total"]
        assert doubt.values == pytest.approx(np.sqrt(total) if is_root else total)


def test_what_has_no_meaning_is_said(tmp_path: Path) -> None:
    task, values = Task("free"), RNG.normal(size=(ROWS, 2))
    assert measure_loss(task, values, None).missing and measure_doubt(task, values, None).missing
    assert measure_disagreement(task, [values], np.ones(1), None).missing
    spread = measure_disagreement(task, [values, values + 2], np.ones(2), None).values
    assert spread == pytest.approx(np.ones(ROWS))
    run = RunDir(run_events.write_run(tmp_path / "run", run_events.just_started()))
    state = fold(read_events(run.events))
    assert rank_samples(run, state) is None
    assert list_samples(None, state, Query()) == EMPTY | {"missing": list_samples(None, state, Query())["missing"]}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    return RunDir(run_events.write_run(tmp_path_factory.mktemp("run"), run_events.list_run(), range(8)))


@pytest.mark.parametrize("model", ["combined", "best"])
def test_a_cell_of_the_confusion_matrix_has_as_many_samples_as_it_counts(run: RunDir, model: str) -> None:
    state = fold(read_events(run.events))
    ranking = rank_samples(run, state)
    assert ranking is not None
    quality = read_quality(run, state)
    (matrix,) = (each for each in quality["classes"]["matrices"] if each["of"] == model)
    assert len(matrix["cells"]) > 3
    for true, predicted, count, _ in matrix["cells"]:
        query = Query.parse({"of": model, "true": str(true), "predicted": str(predicted)})
        document = list_samples(ranking, state, query, 10_000)
        json.dumps(document, allow_nan=False)
        assert len(document["rows"]) == count and f" {count:,} are " in document["reading"].replace(",", ",")
        names = quality["classes"]["matrices"][0]["names"]
        assert all(row["target"] == names[true] for row in document["rows"])
        assert all(row["prediction"].startswith(f"{names[predicted]} (") for row in document["rows"])
        assert all(row["right"] == (true == predicted) for row in document["rows"])
    assert list_samples(ranking, state, Query(only=Filter(true=99)))["missing"] == "There is no such sample."


def test_each_row_has_the_predictions_of_its_sample(run: RunDir) -> None:
    state = fold(read_events(run.events))
    ranking = rank_samples(run, state)
    assert ranking is not None and state.combined is not None
    for page in (0, 1):
        document = list_samples(ranking, state, Query(page=page))
        for row in document["rows"]:
            for member, said, right in row["members"]:
                values, index, target = run_events.predictions(int(member[7:]))
                (at,) = np.flatnonzero(index == row["index"])
                assert said.startswith(f"{values[at].argmax()} (") and right == (values[at].argmax() == target[at])
                assert row["target"] == str(target[at])
    first = [row["score"] for row in list_samples(ranking, state, Query())["rows"]]
    scores = [float(each.rpartition(" ")[2]) for each in first]
    assert scores == sorted(scores, reverse=True)


def test_the_losses_are_those_of_the_combined_model_that_the_page_shows(run: RunDir) -> None:
    events = read_events(run.events)
    for kept in (events, [e for e in events if e["type"] not in ("combined", "run_finished")]):
        ranking, quality = rank_samples(run, fold(kept)), read_quality(run, fold(kept))
        assert ranking is not None and ranking.scores["combined", "wrong"].values is not None
        assert ranking.scores["combined", "wrong"].values.mean() == pytest.approx(
            quality["combined"]["nll"], rel=1e-3
        )
        weights = {member: weight for member, weight in ranking.weights.items() if weight}
        assert weights == quality["combination"]["weights"]
    assert "of the members so far" in list_samples(ranking, fold(kept), Query())["reading"]


def test_of_a_run_that_combines_by_a_function_the_best_member_is_listed(run: RunDir) -> None:
    events = [e | ({"method": "function"} if e["type"] == "combined" else {}) for e in read_events(run.events)]
    state = fold(events)
    found = list_samples(rank_samples(run, state), state, Query())
    assert found["of"] == "best" and [name for name, _ in found["models"]] == ["best"] and len(found["rows"]) == 24
    assert "not determined by the saved predictions" in found["reading"]


def test_an_address_that_asks_for_nonsense_is_refused() -> None:
    for given in ({"order": "worst"}, {"of": "member-1"}, {"page": "-1"}, {"true": "1e3"}, {"page": "9" * 12}):
        with pytest.raises(ValueError, match="="):
            Query.parse(given)
    assert Query.parse({"order": "", "true": "", "page": "3"}) == Query(page=3)


@pytest.mark.slow  # it measures time
def test_a_million_samples_are_ordered_in_seconds(tmp_path: Path) -> None:
    run = RunDir(run_events.write_run(tmp_path / "run", run_events.list_run()))
    rows = 1_000_000
    target = np.random.default_rng(0).integers(0, 10, rows)
    for member in range(8):
        values = np.random.default_rng(member).random((rows, 10), dtype=np.float32) + 0.01
        values /= values.sum(axis=1, keepdims=True)
        for split in ("valid", "test"):
            save_predictions(run.predictions(f"member-{member}"), split, values, np.arange(rows), target)
    state = fold(read_events(run.events))
    began = time.perf_counter()
    ranking = rank_samples(run, state)
    assert ranking is not None
    ranked = time.perf_counter()
    document = list_samples(ranking, state, Query(only=Filter(3, 5)))
    print(f"ranked in {ranked - began:.1f} s, a page in {time.perf_counter() - ranked:.2f} s")
    assert len(document["rows"]) == 24
