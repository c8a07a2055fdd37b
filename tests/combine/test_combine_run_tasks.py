"""`combine` on run directories of every task: what the event says, and what is refused."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kit.event_dicts import fold, read_events
from kit.kept_predictions import save_predictions
from kit.task_members import TASKS, Array, make_members

from ensemble.combine import CombineError, combine, find_math
from ensemble.combine.combination import fit_held_out
from ensemble.combine.conformal import calibrate_sets
from ensemble.combine.prediction_matrix import align
from ensemble.controller.changes import is_combined_otherwise
from ensemble.events import Combined
from ensemble.spec import Ensemble, Recipe
from ensemble.spec.task import IGNORED, Task
from ensemble.store import EventLog, Predictions, RunDir, load_predictions
from ensemble.user_code.fingerprint import fingerprint_function
from pipelines import Pipeline, sources

PIPE = Pipeline(sources.arrays(x=np.zeros((3, 2), np.float32)))
MEMBERS = 4
ONE, SEVERAL, POINTS, NORMAL, LEVELLED = TASKS


def ident(task: Task) -> str:
    return task.kind


#: Where the code is the same for all tasks.
TWO_OF_THEM = [task if task in (ONE, NORMAL) else pytest.param(task, marks=pytest.mark.more) for task in TASKS]


def declare(task: Task, **options: Any) -> Ensemble:
    recipe = Recipe(model=len, loss=len, task=task, split_metrics=options.pop("split_metrics", ()))
    members = [{} for _ in range(MEMBERS)]
    usual = {"name": "e", "recipe": recipe, "train": PIPE, "valid": PIPE, "test": PIPE, "members": members}
    return Ensemble(**{**usual, "allow_overlap": True, **options})  # nothing is trained on it


def finish(path: Path, declared: Ensemble, task: Task, *, target: bool = True) -> tuple[RunDir, Any]:
    """A run whose members have finished, with their predictions on two splits of 200 samples."""
    run = RunDir.create(path, declared)
    log = EventLog(run.events)
    log.append("run_started", name="e", run_id="r", executor="inline", mode="list", objective=declared.objective,
               direction=declared.mode, epochs=1, members=MEMBERS)  # fmt: skip
    values, truth = make_members(task, 7, MEMBERS, n=400, positions=(2,), ignored=0.1)
    for number in range(MEMBERS):
        identity = declared.identify(number)
        for split, at in {"valid": slice(0, 200), "test": slice(200, 400)}.items():
            to = run.predictions(identity.member)
            save_predictions(to, split, values[number][at], np.arange(200), truth[at] if target else None, task)
        own = {"member": identity.member, "attempt": 0}
        log.append("member", **identity.as_dict())
        log.append("placed", node="local", devices=[None], cohort=0, feeder=None, **own)
        log.append("started", pid=1, epoch=0, step=0, startup_cpu_s=0.0, **own)
        log.append("finished", epoch=1, metrics={}, weights_sha256="", **own)
    log.close()
    return run, fold(read_events(run.events))


def finish_and_combine(path: Path, task: Task, **options: Any) -> tuple[RunDir, Any, dict[str, Any]]:
    declared = declare(task, **options)
    run, state = finish(path / "e", declared, task)
    return run, state, combine(run, state, declared)


METHODS = [
    ("average", "stack"),
    ("weighted", "stack"),
    ("greedy", "stack"),
    ("stack", "weighted"),
    ("stack", "greedy"),
]


@pytest.mark.parametrize(("task", "methods"), zip(TASKS, METHODS, strict=True), ids=[task.kind for task in TASKS])
def test_every_task_is_combined_and_measured_on_test(tmp_path: Path, task: Task, methods: tuple[str, ...]) -> None:
    run, state = finish(tmp_path / "e", declare(task), task)
    for method in methods:
        combined = combine(run, state, declare(task, combine=method))
        assert json.loads(json.dumps(combined, allow_nan=False)) == combined
        assert Task.from_record(combined["task"]) == task
        assert (combined["split"], combined["note"]) == ("test", None)
        refused = method == "stack" and find_math(task).no_stack
        assert combined["method"] == ("average" if refused else method)
        assert combined["reason"] == (f"{refused}; averaged instead" if refused else None)
        assert sum(combined["weights"].values()) == pytest.approx(1)
        assert list(combined["weights"]) == combined["members"]
        if task == ONE:
            known = load(run, "member-0", "test").target != IGNORED
            assert sum(count for _, _, count in combined["reliability"]["ensemble"]) == known.sum()
        own = find_math(task).default_criterion
        assert combined["metrics"]["ensemble"][own] < combined["metrics"]["mean"][own]
        for of in ("ensemble", "best"):
            for name, (low, high) in combined["intervals"][of].items():
                assert low <= high and name in combined["metrics"][of]
        low, high = combined["intervals"]["ensemble"][own]
        assert low < combined["metrics"]["ensemble"][own] < high
        assert set(combined["noise"]) <= set(combined["intervals"]["difference"])


@pytest.mark.parametrize("task", TWO_OF_THEM, ids=ident)
def test_calibration_says_what_it_is_and_asks_for_another_combination(tmp_path: Path, task: Task) -> None:
    """Or why there is none."""
    on, off = declare(task), declare(task, calibrate=False)
    run, state = finish(tmp_path / "e", on, task)
    temperature = dict.fromkeys(("classification", "multilabel"), "temperature")
    method = {**temperature, "gaussian": "variance_scale"}.get(task.kind)
    combined, without = combine(run, state, on), combine(run, state, off)
    calibration = combined["calibration"]
    assert calibration["method"] == method == find_math(task).calibrator
    assert (calibration["value"] is None) == (calibration["reason"] is not None) == (method is None)
    assert without["calibration"]["value"] is None and without["best_calibrated"] is None
    assert method is None or without["calibration"]["reason"] == "Ensemble.calibrate is off"
    for event, same, other in ((combined, on, off), (without, off, on)):
        state.combined = Combined(**event)
        assert not is_combined_otherwise(state, same)
        assert is_combined_otherwise(state, other) == (method is not None)


def test_sets_are_calibrated_on_what_a_stack_says_of_rows_it_was_not_fitted_on(tmp_path: Path) -> None:
    run, state, combined = finish_and_combine(tmp_path, ONE, combine="stack")
    valid = align("valid", {member: load(run, member, "valid") for member in state.members})
    assert valid.target is not None
    stack, held_out = fit_held_out("stack", valid.values, valid.target)
    honest, own = (
        calibrate_sets(ONE, values, valid.target).thresholds for values in (held_out, stack.predict(valid.values))
    )
    assert combined["conformal"]["thr"]["thresholds"] == pytest.approx(honest) and honest > own


@pytest.mark.parametrize("task", TWO_OF_THEM, ids=ident)
def test_a_test_split_that_is_the_validation_split_is_no_test_split(tmp_path: Path, task: Task) -> None:
    declared = declare(task)
    run, state = finish(tmp_path / "e", declared, task)
    for member in state.members:
        saved = load_predictions(run.predictions(member), "valid")
        save_predictions(run.predictions(member), "test", saved.values, saved.index, saved.target, saved.task)
    combined = combine(run, state, declared)
    assert combined["split"] == "valid" and "has the samples of the validation split" in combined["note"]
    assert not any("coverage" in record for record in combined["conformal"].values())


@pytest.mark.parametrize("task", TASKS[1:], ids=ident)  # of classes nothing says then that outputs are some
def test_without_targets_members_are_averaged_and_their_uncertainty_is_known(tmp_path: Path, task: Task) -> None:
    declared = declare(task)
    combined = combine(*finish(tmp_path / "e", declared, task, target=False), declared)
    assert (combined["method"], combined["metrics"]) == ("average", None)
    assert "no target" in combined["reason"] and combined["uncertainty"]


def test_the_best_member_is_the_best_by_an_objective_that_is_a_criterion(tmp_path: Path) -> None:
    for task, objective in ((POINTS, "mae"), (NORMAL, "rmse"), (NORMAL, "mse")):
        declared = declare(task, objective=objective)
        run, state = finish(tmp_path / task.kind / objective, declared, task)
        combined = combine(run, state, declared)
        scores = {}
        for member in state.members:
            saved = align("valid", {member: load(run, member, "valid")})
            assert saved.target is not None
            scores[member] = find_math(task).measure(saved.values[0], saved.target, ["mse"])[objective]
        assert combined["best_member"] == min(scores, key=scores.__getitem__)


def load(run: RunDir, member: str, split: str) -> Predictions:
    return load_predictions(run.predictions(member), split)


def bias(values: Array, target: Array) -> float:
    return float(np.nanmean(values - target))


def test_metrics_of_a_whole_split_are_in_the_event_with_intervals(tmp_path: Path) -> None:
    *_, combined = finish_and_combine(tmp_path, POINTS, split_metrics=("medae", bias), objective="spearman")
    for name in ("spearman", "medae", "bias"):
        low, high = combined["intervals"]["ensemble"][name]
        assert low <= combined["metrics"]["ensemble"][name] <= high
    for of in ("ensemble", "best", "mean"):
        assert 0 < combined["metrics"][of]["spearman"] <= 1
    assert "spearman" in combined["intervals"]["difference"]


def rank_late(values: Array, target: Array) -> float:
    if np.nanmax(target) < 60:
        raise ValueError("no such event")
    return float(np.nanmax(values))


def test_a_metric_that_fails_is_named_and_hinders_nothing(tmp_path: Path) -> None:
    declared = declare(POINTS, split_metrics=(bias, rank_late))
    run, state = finish(tmp_path / "e", declared, POINTS)
    for member in state.members:
        saved = load(run, member, "test")
        assert saved.target is not None
        save_predictions(
            run.predictions(member), "test", saved.values, saved.index, saved.target.clip(max=59), POINTS
        )
    combined = combine(run, state, declared)
    assert combined["note"] == "the metric 'rank_late' cannot be computed: ValueError: no such event"
    assert "rank_late" not in combined["metrics"]["ensemble"] and "bias" in combined["intervals"]["ensemble"]


OWN = {"loss": len, "metrics": lambda outputs, batch: {"spearman": outputs.mean()}}
LOOPS = ({"train": len}, False), ({"train": len, "split_metrics": "spearman"}, True)


@pytest.mark.parametrize(
    ("options", "has"), [(OWN, True), *(pytest.param(*loop, marks=pytest.mark.more) for loop in LOOPS)]
)
def test_an_objective_of_the_split_is_its_metric_unless_reported(tmp_path: Path, options: Any, has: bool) -> None:
    recipe = Recipe(model=len, task=POINTS, **options)
    *_, combined = finish_and_combine(tmp_path, POINTS, recipe=recipe, objective="spearman", mode="max")
    assert {"spearman" in figures for figures in combined["metrics"].values()} == {has}


def test_a_metric_of_too_many_predictions_has_no_interval_but_a_note(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("ensemble.combine.bootstrap.MOST_RESAMPLED", 200 * 2 * 40 - 1)
    *_, combined = finish_and_combine(tmp_path, POINTS, objective="spearman")
    assert "spearman" in combined["metrics"]["ensemble"] and "spearman" in combined["noise"]
    assert "spearman" not in combined["intervals"]["ensemble"] and "mae" in combined["intervals"]["ensemble"]
    assert combined["note"].startswith("spearman has no interval: there are too many predictions")


def test_a_stack_that_memory_cannot_hold_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ensemble.combine.stacks.LARGEST", 200 * 2 * MEMBERS * 4 - 1)
    *_, combined = finish_and_combine(tmp_path, ONE, combine="stack")
    assert combined["method"] == "average" and "stacking 400 positions by the 4 classes" in combined["reason"]


def median(values: torch.Tensor) -> torch.Tensor:
    assert isinstance(values, torch.Tensor) and not torch.is_grad_enabled()
    return values.median(dim=0).values


def mean(values: Array, target: Array) -> float:
    return float(values.mean())


def halve(values: torch.Tensor) -> torch.Tensor:
    return values[:, ::2].mean(dim=0)


def forget(values: torch.Tensor) -> torch.Tensor:
    raise KeyError("lost")


FAILING = (halve, r"gives \[100, 2\] for \[4, 200, 2\]"), (forget, "failed for values .*: KeyError: 'lost'")


@pytest.mark.parametrize(("function", "says"), FAILING)
def test_a_function_that_fails_is_named_and_the_run_ends_well(tmp_path: Path, function: Any, says: str) -> None:
    *_, combined = finish_and_combine(tmp_path, POINTS, combine=function)
    assert combined["metrics"] is None
    assert (combined["declared"], combined["code"]) == ("function", fingerprint_function(function))
    assert re.search(f"Ensemble.combine={function.__name__} .*{says}", combined["reason"])


@pytest.mark.parametrize("task", [POINTS, Task("free")], ids=ident)
def test_a_function_combines_what_it_is_given_as_torch_tensors(tmp_path: Path, task: Task) -> None:
    run, state, combined = finish_and_combine(tmp_path, task, combine=median, split_metrics=(mean,))
    assert (combined["method"], combined["reason"], len(combined["members"])) == ("function", None, MEMBERS)
    assert combined["weights"] == dict.fromkeys(state.members, 1 / MEMBERS)
    each = np.stack([load(run, member, "test").values for member in state.members])
    assert combined["metrics"]["ensemble"]["mean"] == pytest.approx(np.sort(each, axis=0)[1].mean(), rel=1e-5)
    assert "mean" in combined["intervals"]["difference"]


class Counting:
    def __init__(self, most: int) -> None:
        self.calls, self.most = 0, most

    def __call__(self, values: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls > self.most:
            raise ValueError("enough")
        return values.mean(dim=0)


@pytest.mark.parametrize("most", [100, 1])
def test_the_fingerprint_of_a_function_is_that_before_it_was_called(tmp_path: Path, most: int) -> None:
    *_, combined = finish_and_combine(tmp_path, POINTS, combine=Counting(most))
    assert (combined["metrics"] is None) == (most == 1)
    assert combined["code"] == fingerprint_function(Counting(most))


def predictions(task: Task, seed: int, **options: Any) -> Predictions:
    (values,), target = make_members(task, seed, 1, n=10, **options)
    return Predictions(values, np.arange(10), target, task)


def test_members_of_different_tasks_or_shapes_are_refused() -> None:
    first, points = predictions(NORMAL, 0), predictions(POINTS, 0)
    other = replace(first, values=np.ones((10, 3, 2), np.float32))
    with pytest.raises(CombineError, match=r"a and b saved valid .* \(regression and gaussian\)"):
        align("valid", {"a": points, "b": first})
    with pytest.raises(CombineError, match=r"b predicts values of shape \[3, 2\] .* a of \[2\]"):
        align("valid", {"a": first, "b": other})


def test_targets_are_the_same_where_the_same_are_ignored() -> None:
    first, again = (predictions(POINTS, 1, positions=(2,), ignored=0.3) for _ in range(2))
    assert align("valid", {"a": first, "b": again}).members == ["a", "b"]
    assert again.target is not None
    again.target[3, 1] += 1 if not np.isnan(again.target[3, 1]) else 0
    again.target[4, 0] = np.nan if not np.isnan(again.target[4, 0]) else 1
    with pytest.raises(CombineError, match=r"different targets for valid sample [34]"):
        align("valid", {"a": first, "b": again})


def test_rows_of_members_that_saved_them_in_another_order_are_matched_by_index() -> None:
    one = predictions(NORMAL, 0)
    assert one.target is not None
    turned = Predictions(one.values[::-1], one.index[::-1], one.target[::-1], one.task)
    aligned = align("valid", {"a": one, "b": turned})
    np.testing.assert_array_equal(aligned.values[0], aligned.values[1])
    assert aligned.index.tolist() == sorted(one.index.tolist())
