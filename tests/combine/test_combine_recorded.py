"""A loaded ensemble is the one that the run combined and measured: its members, its function, its reason."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import test_combine_run_tasks as of_tasks
import torch
from class_figures import accuracy, nll
from kit.saved_splits import drop_split
from small_nets import batch_of, ensemble_of
from test_combine_run import TEST, VALID, declare, finish, overwrite, record, state_of

import ensemble
from ensemble import Ensemble, Recipe
from ensemble.combine import Combination, CombineError, combine, load
from ensemble.combine.combination import call_function, fit_held_out
from ensemble.combine.prediction_matrix import read_prediction_matrix
from ensemble.events import Combined
from ensemble.reporting.dashboard.analysis import read_quality
from ensemble.spec.task import CLASSIFICATION, Task
from ensemble.store import RunDir, RunState, load_predictions
from ensemble.user_code.fingerprint import fingerprint_function
from pipelines import Pipeline, sources


def test_a_stack_is_fitted_again_to_the_members_that_it_was_measured_with(tmp_path: Path) -> None:
    declared = declare(combine="stack", test=declare().valid)
    run = finish(tmp_path / "e", declared)
    drop_split(run.predictions("member-0"), "test")
    combined = combine(run, state_of(run), declared)
    record(run, combined)
    assert combined["candidates"] == ["member-1", "member-2", "member-3", "member-4"]
    for method in (None, "stack"):
        model = load(run.path, combine=method)
        assert model.member_ids == combined["candidates"]
        measured = combined["metrics"]["ensemble"]
        assert nll(model({"x": TEST["x"]}), TEST["label"]) == pytest.approx(measured["nll"], rel=1e-4)
    assert "member-0" in load(run.path, combine="average").member_ids  # another method takes all that finished


def test_what_took_the_place_of_the_method_is_loaded_as_it_was_measured(tmp_path: Path) -> None:
    """A stack of one class is refused: the average of those members that were measured, and the reason."""
    declared = declare(combine="stack", test=declare().valid, calibrate=False)
    run = finish(tmp_path / "e", declared)
    drop_split(run.predictions("member-0"), "test")
    for number in range(5):
        saved = load_predictions(run.predictions(f"member-{number}"), "valid")
        overwrite(run, f"member-{number}", saved.values, saved.index, 0 * saved.index)
    combined = combine(run, state_of(run), declared)
    assert (combined["method"], combined["declared"]) == ("average", "stack")
    record(run, combined)
    with pytest.warns(UserWarning, match="two classes among them, .* averaged instead"):
        model = load(run.path)
    assert model.member_ids == combined["members"] == ["member-1", "member-2", "member-3", "member-4"]


def median(values: torch.Tensor) -> torch.Tensor:
    middle = values.median(dim=0).values
    return middle / middle.sum(dim=-1, keepdim=True)


def sharpest(values: torch.Tensor) -> torch.Tensor:
    squares = (values**2).mean(dim=0)
    return squares / squares.sum(dim=-1, keepdim=True)


def test_a_function_that_has_changed_is_not_given_the_calibration_of_the_earlier_one(tmp_path: Path) -> None:
    declared = declare(combine=median)
    run = finish(tmp_path / "e", declared)
    combined = combine(run, state_of(run), declared)
    assert combined["code"] == fingerprint_function(median) != fingerprint_function(sharpest)
    record(run, combined)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert load(run.path).calibration == combined["calibration"]["value"]
    RunDir.create(run.path, declare(combine=sharpest))  # submitted again, and not yet combined
    with pytest.warns(UserWarning, match="Ensemble.combine has changed since the run was combined"):
        model = load(run.path)
    again = combine(run, state_of(run), declare(combine=sharpest))
    assert model.calibration == pytest.approx(again["calibration"]["value"]) != combined["calibration"]["value"]


def across_samples(values: torch.Tensor) -> torch.Tensor:
    scores = values.mean(dim=0)
    return (scores - scores.mean(dim=0)).softmax(dim=1)


def nearly(values: torch.Tensor) -> torch.Tensor:
    return 1.01 * values.mean(dim=0)


def halve(values: torch.Tensor) -> torch.Tensor:
    return values.mean(dim=0)[::2]


def double(values: torch.Tensor) -> torch.Tensor:
    return 2 * values.mean(dim=0)


def by_function(function: Any) -> Any:
    return ensemble_of("mlp", combination=Combination("function", np.full(3, 1 / 3), function=function))


def test_what_a_function_gives_sums_to_one_and_is_checked_for_each_batch() -> None:
    values = [np.random.default_rng(seed).dirichlet(np.ones(3), 20) for seed in range(2)]
    says = "across_samples gives one sample different values in different batches"
    with pytest.raises(CombineError, match=says):
        call_function(across_samples, values, CLASSIFICATION)
    assert call_function(nearly, values, CLASSIFICATION).sum(axis=1) == pytest.approx(1, abs=1e-6)
    assert by_function(nearly)(batch_of(5)).sum(dim=1).numpy() == pytest.approx(1, abs=1e-6)
    wrong_shape = r"values of shape \[3, 3\] for the members' \[5, 3\]"
    for function, says in ((halve, wrong_shape), (double, ".*not probabilities of classes")):
        with pytest.raises(CombineError, match=f"Ensemble.combine gives {says}"):
            by_function(function)(batch_of(5))


def test_a_stack_without_a_test_split_is_measured_on_rows_that_it_was_not_fitted_on(tmp_path: Path) -> None:
    declared = declare(combine="stack")
    run = finish(tmp_path / "e", declared)
    found = combine(run, state_of(run), declared)["metrics"]["ensemble"]
    fitted = load(run.path)({"x": VALID["x"]})
    assert found["nll"] > 1.02 * nll(fitted, VALID["label"])
    assert found["accuracy"] <= accuracy(fitted, VALID["label"])


def test_a_member_that_takes_no_part_does_not_hinder_loading(tmp_path: Path) -> None:
    from ensemble.store import save_checkpoint

    run = finish(tmp_path / "e", declare())
    about = {"method": "greedy", "declared": "greedy", "reason": None, "calibration": {"value": 1.0}}
    record(run, {**about, "weights": {"member-1": 0.25, "member-3": 0.75}})
    save_checkpoint(run.checkpoint("member-0", 0, 1, 0), {"model": {}, "epoch": 1})
    assert load(run.path).member_ids == ["member-1", "member-3"]
    with pytest.raises(CombineError, match=r"do not fit what Recipe\.model builds"):
        load(run.path, combine="average")


def test_a_student_is_told_when_its_teacher_is_combined_by_another_function() -> None:
    from ensemble.combine.distilled_loss import digest_combination

    state, digests = RunState(), set()
    for code in (None, "a", "b"):
        state.combined = Combined(method="function", members=[], split=None, code=code)
        digests.add(digest_combination(state))
    assert len(digests) == 3


@pytest.mark.parametrize("has_test", [True, False])
def test_the_page_shows_the_stack_that_was_measured(tmp_path: Path, has_test: bool) -> None:
    """Fitted to the same members, and without a test split what it says of rows that it was not fitted on."""
    task = Task("regression")
    declared = of_tasks.declare(task, combine="stack", **({} if has_test else {"test": None}))
    run, _ = of_tasks.finish(tmp_path / "e", declared, task)
    if has_test:
        drop_split(run.predictions("member-0"), "test")
    combined = combine(run, state_of(run), declared)
    record(run, combined)
    document = read_quality(run, state_of(run))
    (plot,) = (each for each in document["plots"] if each["id"] == "predicted")
    (dots,) = (each["points"] for each in plot["series"] if each["of"] == "combined")
    valid = read_prediction_matrix(run, state_of(run), combined["candidates"], "valid")
    assert valid.target is not None
    stack, held_out = fit_held_out("stack", valid.values, valid.target, task=task)
    test = read_prediction_matrix(run, state_of(run), combined["candidates"], "test")
    target, values = (test.target, stack.predict(test.values)) if has_test else (valid.target, held_out)
    assert target is not None
    known = np.isfinite(target)
    np.testing.assert_allclose(dots, np.stack([target[known], values[known]], axis=1), rtol=1e-4)


def build(params: Any) -> torch.nn.Module:
    return torch.nn.Linear(4, 3)


def loop(member: Any) -> None:
    model = build(member.params)
    model, _ = member.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in member.epochs():
        for batch in member.batches():
            scores = model(batch["x"] * 2)
            member.backward(torch.nn.functional.cross_entropy(scores, batch["label"], reduction="none"))
            member.step()
        member.report(accuracy=0.5)
    member.predict_all(predict)


def predict(model: Any, batch: Any) -> Any:
    return model(batch["x"] * 2).softmax(dim=1)


ALONE = "its recipe is a train function alone: declare Recipe(model=..., train=..., predict=...)"
WITHOUT = "model of member-0 predicts: declare Recipe.predict"
RECIPES = [(loop, ALONE), (Recipe(model=build, train=loop), WITHOUT)]
RECIPES += [(Recipe(model=build, train=loop, predict=predict), "")]


@pytest.mark.parametrize(("recipe", "says"), RECIPES, ids=["a function", "no predict", "predict"])
def test_the_summary_promises_a_loaded_model_where_loading_works(recipe: Any, says: str, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    data = Pipeline(sources.arrays(x=rng.random((16, 4), np.float32), label=rng.integers(0, 3, 16)))
    about = {"recipe": recipe, "train": data, "valid": data, "batch_size": 8, "epochs": 1}
    result = ensemble.submit(Ensemble(name="m", members=[{"lr": 0.1}], **about), tmp_path, "inline").wait()
    shown, batch = " ".join(result.summary(everything=True, width=500).split()), {"x": torch.zeros(2, 4)}
    assert ("`ensemble.load(" in shown) is not bool(says) and says in shown
    if not says:
        assert ensemble.load(tmp_path)(batch).shape == (2, 3)
        return
    assert "it cannot be loaded as one model" in shown
    with pytest.raises(CombineError, match=r"declare Recipe"):
        ensemble.load(tmp_path)(batch)
