"""Large predictions are measured in pieces, which changes no figure, and fitted to a part of their positions."""

from __future__ import annotations

import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from kit.kept_predictions import save_predictions

from ensemble import Ensemble, Recipe
from ensemble.combine import bootstrap, combine, find_math, formulas, prediction_matrix
from ensemble.combine.combination import fit_held_out
from ensemble.combine.metrics import Array
from ensemble.combine.per_class import compute_per_class, read_per_class
from ensemble.combine.run import combine_samples
from ensemble.combine.uncertainty import quantify
from ensemble.spec import positions
from ensemble.spec.task import IGNORED, Task
from ensemble.store import RunDir, read_predictions
from pipelines import Pipeline, sources

N, SIDE = 5, 40
TASKS = [Task("classification"), Task("regression"), Task("gaussian"), Task("quantiles", (0.1, 0.5, 0.9))]


def make(task: Task, seed: int, shape: tuple[int, ...] = (N, SIDE, SIDE)) -> tuple[Array, Array]:
    truth, rng = np.random.default_rng(0), np.random.default_rng(seed)
    target: Array = truth.normal(100, 3, shape)
    target[0, :3], target[-1] = np.nan, np.nan
    points = np.nan_to_num(target, nan=100.0) + rng.normal(0, 1 + seed / 4, shape)
    if task.kind == "classification":
        known, classes = ~np.isnan(target), truth.integers(0, 3, shape)
        scores = np.exp(rng.normal(0, 1, (*shape, 3)) + 2 * np.eye(3)[classes])
        values = scores / scores.sum(axis=-1, keepdims=True)
        return values.astype(np.float32), np.where(known, classes, IGNORED)
    values = {
        "regression": points,
        "gaussian": np.stack([points, np.full(shape, 1.5)], axis=-1),
        "quantiles": np.stack([points - 1, points, points + 1], axis=-1),
    }[task.kind]
    return values.astype(np.float32), target


def predict(arrays: Sequence[Array]) -> Array:
    return (arrays[0].astype(np.float64) + arrays[1]) / 2


@pytest.mark.parametrize("piece", [700, 20_000], ids=["of a sample", "of some samples"])
@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.kind)
def test_figures_of_pieces_are_those_of_the_whole(task: Task, piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    math = find_math(task)
    first, target = make(task, 1)
    arrays = [first, make(task, 2)[0]]
    expected = math.measure(predict(arrays), target)
    counts = np.random.default_rng(0).integers(1, 3, (2, N)).astype(float)
    [whole] = math.statistics(predict(arrays), target)
    monkeypatch.setattr(positions, "PIECE", piece)
    statistics = math.statistics_of(predict, arrays, target)
    assert math.finish(statistics, lambda: first, target, ()) == pytest.approx(expected, rel=1e-10)
    for name, drawn in whole(counts).items():
        assert statistics[0](counts)[name] == pytest.approx(drawn, rel=1e-9), name


def run(path: Path, task: Task, members: int, shape: tuple[int, ...]) -> tuple[RunDir, Any]:
    run_dir, known = RunDir(path), {}
    for number in range(members):
        values, target = make(task, number, shape)
        name = f"member-{number}"
        digest = save_predictions(run_dir.predictions(name), "valid", values, np.arange(len(values)), target, task)
        about = {"id": name, "state": "finished", "identity": {}, "predictions": {"valid": digest}, "metrics": {}}
        about |= {"is_checkpoint_removed": False, "outdated": None, "remarks": []}
        known[name] = SimpleNamespace(**about)
    state = SimpleNamespace(members=known, ended=None, list_infeasible=dict)
    state.as_finished = lambda: state
    return run_dir, state


def declare(task: Task, metrics: Sequence[Any] = (), **more: Any) -> Ensemble:
    data = Pipeline(sources.arrays(x=np.zeros((40, 1), np.float32)))
    recipe = Recipe(model=len, loss=len, task=task, split_metrics=metrics)
    return Ensemble(name="large", recipe=recipe, members=[{}], train=data, valid=data, allow_overlap=True, **more)


@pytest.mark.parametrize("combiner", ["average", "greedy", "stack"])
@pytest.mark.parametrize("task", TASKS[:2], ids=lambda task: task.kind)
def test_what_is_fitted_to_a_part_is_measured_on_all(
    task: Task, combiner: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, declared = run(tmp_path, task, 3, (N, SIDE, SIDE)), declare(task, combine=combiner)
    whole = combine(*made, declared)
    assert "positions" not in whole["note"]
    size = N * SIDE**2 * (3 if task.kind == "classification" else 1)
    monkeypatch.setattr(prediction_matrix, "MOST_FITTED", 3 * size // 2)
    monkeypatch.setattr(prediction_matrix, "FEWEST_FITTED", 1)
    part = combine(*made, declared)
    assert "800 positions of each sample, drawn from its 1,600" in part["note"]
    assert part["metrics"]["mean"] == pytest.approx(whole["metrics"]["mean"], rel=1e-10)
    if combiner == "average":
        figure = "accuracy" if task.kind == "classification" else "rmse"  # no temperature moves it
        assert part["metrics"]["ensemble"][figure] == pytest.approx(
            whole["metrics"]["ensemble"][figure], rel=1e-10
        )
    else:
        assert list(part["weights"].values()) == pytest.approx(list(whole["weights"].values()), abs=0.1)


def test_combining_takes_less_memory_than_two_members_have_predicted(tmp_path: Path, monkeypatch: Any) -> None:
    task, shape = TASKS[0], (4, 512, 512)
    made, one = run(tmp_path, task, 3, shape), 4 * 512 * 512 * 3 * 4
    monkeypatch.setattr(prediction_matrix, "MOST_FITTED", one // 16)
    monkeypatch.setattr(prediction_matrix, "FEWEST_FITTED", 1)
    monkeypatch.setattr(positions, "PIECE", one // 64)
    monkeypatch.setattr(formulas, "CHUNK", one // 64)
    combine(*made, declare(task))  # imports what fits
    tracemalloc.start()
    try:
        found = combine(*made, declare(task))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert found["metrics"] is not None
    assert peak < 2 * one, f"{peak / one:.1f} times what one member has predicted"


def dice(values: Array, target: Array) -> float:
    predicted, true = (each.reshape(len(target), -1) == 1 for each in (values.argmax(axis=-1), target))
    size = predicted.sum(axis=1) + true.sum(axis=1)
    return float((2 * (predicted & true).sum(axis=1) / np.maximum(size, 1)).mean())


def pooled_dice(values: Array, target: Array) -> float:
    predicted, true = values.argmax(axis=-1) == 1, target == 1
    return float(2 * (predicted & true).sum() / (predicted.sum() + true.sum()))


def test_metrics_of_a_whole_split_are_of_all_its_positions(tmp_path: Path, monkeypatch: Any) -> None:
    task, samples = TASKS[0], 12
    made = run(tmp_path, task, 3, (samples, SIDE, SIDE))
    declared = declare(task, [dice, pooled_dice], combine="average")
    for number, member in enumerate(made[1].members.values()):  # which is best is not to depend on the part
        member.metrics = {str(declared.objective): float(number)}
    whole = combine(*made, declared)
    size = samples * SIDE**2 * 3
    monkeypatch.setattr(bootstrap, "MOST_RESAMPLED", size * bootstrap.FEWEST_RESAMPLED // 2)
    monkeypatch.setattr(prediction_matrix, "MOST_FITTED", size)
    monkeypatch.setattr(prediction_matrix, "FEWEST_FITTED", 1)
    part = combine(*made, declared)
    for name in ("dice", "pooled_dice"):
        for of in ("ensemble", "best", "mean"):
            assert part["metrics"][of][name] == pytest.approx(whole["metrics"][of][name], abs=1e-6)
        assert name in whole["intervals"]["ensemble"] and name not in part["intervals"]["ensemble"]
        assert f"{name} has no interval" in part["note"]


def test_figures_of_classes_are_of_the_part_that_the_run_has_them_of(tmp_path: Path, monkeypatch: Any) -> None:
    task = TASKS[0]
    run_dir, state = run(tmp_path, task, 3, (N, SIDE, SIDE))
    monkeypatch.setattr(prediction_matrix, "MOST_FITTED", 3 * N * SIDE**2 * 3 // 2)
    monkeypatch.setattr(prediction_matrix, "FEWEST_FITTED", 1)
    fields, shown = combine_samples(run_dir, state, declare(task))
    state.combined = SimpleNamespace(**fields, classes=None)
    found = read_per_class(run_dir, state)
    assert (
        shown is not None
        and shown.target is not None
        and shown.target.shape == (N, SIDE**2 // 2)
        and shown.best is not None
    )
    for of, values in (("ensemble", shown.values), ("best", shown.best)):
        own = compute_per_class(task, values, shown.target, None, "valid")
        assert found[of].as_record() == own.as_record()


MEMBERS, N_MEMORY, CLASSES = 24, 4_000, 20


@pytest.fixture
def run_memory(tmp_path: Path) -> tuple[RunDir, Any]:
    run_dir, rng = RunDir(tmp_path), np.random.default_rng(0)
    target = rng.integers(0, CLASSES, N_MEMORY)
    members = {
        f"{number:03d}": SimpleNamespace(id=f"{number:03d}", identity={}, predictions={}, outdated=None)
        for number in range(MEMBERS)
    }
    for name, member in members.items():
        values = rng.random((N_MEMORY, CLASSES), dtype=np.float32)
        values[np.arange(N_MEMORY), target] += rng.random()
        values /= values.sum(axis=1, keepdims=True)
        member.predictions["valid"] = save_predictions(
            run_dir.predictions(name), "valid", values, np.arange(N_MEMORY), target
        )
    state = SimpleNamespace(members=members, list_infeasible=dict)
    state.as_finished = lambda: state
    return run_dir, state


@pytest.mark.parametrize("method", ["average", "greedy"])
def test_the_memory_taken_does_not_grow_with_the_members(run_memory: Any, method: str, monkeypatch: Any) -> None:
    run_dir, state = run_memory
    in_memory = {name: read_predictions(run_dir, member, "valid") for name, member in state.members.items()}
    before = prediction_matrix.align("valid", in_memory)
    combination, expected = fit_held_out(method, before.values, before.target, task=before.task)
    surely = quantify("valid", before, combination).parts
    del in_memory, before
    one = N_MEMORY * CLASSES * 4
    monkeypatch.setattr(formulas, "CHUNK_OF_ALL", N_MEMORY * CLASSES)  # blocks of rows change no bit
    tracemalloc.start()
    try:
        found = prediction_matrix.read_prediction_matrix(run_dir, state, list(state.members), "valid")
        combination, held_out = fit_held_out(method, found.values, found.target, task=found.task)
        sure = quantify("valid", found, combination)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert np.array_equal(expected, held_out)
    assert sure.parts.keys() == surely.keys() and all(np.array_equal(surely[k], sure.parts[k]) for k in surely)
    assert peak < 12 * one, f"{peak / one:.1f} times what one of {MEMBERS} members has predicted"
