"""Trials that stop early by themselves, and objectives that are undefined or not measured after an epoch."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kit.event_dicts import fold, read_events
from small_run import run, stop_at
from studies import read_study

import ensemble
from ensemble import Ensemble, Recipe, Search, choice
from ensemble.schedule.trials import FIRST_TRIALS
from ensemble.store import RunDir, RunState
from pipelines import Pipeline, sources

#: What members report after each epoch; None: it was not measured.
CURVES: dict[str, list[Any]] = {"rises": [0.5, 0.6, 0.7, 0.8], "stays": [0.4, 0.3, 0.9, 0.9], "other": [None] * 4}
CURVES |= {"undefined": [math.nan, 0.6, 0.7, 0.8], "unmeasured": [0.5, None, 0.7, 0.8]}
CURVES |= {"ends undefined": [0.5, 0.6, 0.7, math.nan], "high": [0.9] * 5, "low": [0.1] * 5}


def train(member: Any) -> None:
    """Reports the curve that its hyperparameters name."""
    model = torch.nn.Linear(2, 2)
    model, _ = member.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for epoch in member.epochs():
        for batch in member.batches():
            member.backward(model(batch["x"]).sum(dim=1))
            member.step()
        value = CURVES[member.params["curve"]][epoch]
        member.report(loss=1.0, **({} if value is None else {"score": value}))


def declare(curves: list[str], pruner: Any = "none", **options: Any) -> Ensemble:
    """A search that takes these curves in their order, or a list."""
    data = Pipeline(sources.arrays(x=np.random.default_rng(0).random((8, 2), dtype=np.float32)))
    given: dict[str, Any] = {"objective": "score", "mode": "max", "epochs": 4, "recipe": train, "train": data}
    if pruner is None:
        given["members"] = [{"curve": curve} for curve in curves]
    else:
        space = {"curve": choice(*dict.fromkeys(curves)), "at": choice(*range(len(curves)))}
        first = [{"curve": curve, "at": at} for at, curve in enumerate(curves)]
        given["search"] = Search(space, trials=len(curves), sampler="random", pruner=pruner, enqueue=first)
    return Ensemble(name="decisions", **(given | options))


def train_in_order(path: Path, curves: list[str], **options: Any) -> RunState:
    """Run a search that proposes just these curves."""
    on_event = options.pop("on_event", None)
    return run(path, declare(curves, **options), on_event)


def trials_of(path: Path) -> list[Any]:
    return read_study(RunDir(path).journal, "decisions").trials


WARM = {"name": "median", "startup_trials": 1, "warmup_epochs": 1}


def test_a_trial_that_stops_early_has_finished_whatever_the_pruner_says(tmp_path: Path) -> None:
    early = {"early_stopping": {"patience": 1}, "keep": "best"}
    state = train_in_order(tmp_path, ["rises", "stays", "rises"], pruner=WARM, **early)
    members = list(state.members.values())
    assert [(m.state, len(m.history)) for m in members] == [("finished", 4), ("finished", 2), ("finished", 4)]
    stopped = members[1]
    assert stopped.early_stopping is not None and stopped.metrics["score"] == 0.4, "that of the weights it keeps"
    trials = [(t.state.name, t.value) for t in trials_of(tmp_path)]
    assert trials == [("COMPLETE", 0.8), ("COMPLETE", 0.4), ("COMPLETE", 0.8)]


def test_a_trial_is_pruned_in_an_epoch_before_it_would_stop_early(tmp_path: Path) -> None:
    early = {"early_stopping": {"patience": 2}, "keep": "best"}
    state = train_in_order(tmp_path, ["rises", "stays"], pruner=WARM, **early)
    assert [(m.state, len(m.history)) for m in state.members.values()] == [("finished", 4), ("pruned", 2)]


@pytest.mark.usefixtures("_requests_are_seen_at_once")
def test_a_search_that_is_given_more_epochs_twice_judges_by_those_of_its_first_declaration(tmp_path: Path) -> None:
    stop = stop_at(tmp_path, "finished", "member-1", "stop")
    halving = {"name": "asha", "min_resource": 2, "reduction_factor": 2}
    curves = ["high", "low", "high"]
    state = train_in_order(tmp_path, curves, pruner=halving, epochs=2, on_event=stop)
    assert [m.state for m in state.members.values()] == ["finished"] * 2
    for epochs in (3, 5):
        ensemble.resume(tmp_path, epochs=epochs).wait()
        members = fold(read_events(RunDir(tmp_path).events)).members.values()
        assert [(m.state, len(m.history)) for m in members] == [("finished", epochs)] * 3
    assert [m.identity["epochs_before"] for m in members] == [2, 2, 3]


@pytest.mark.parametrize(("curve", "pruner"), [("unmeasured", "hyperband"), ("undefined", WARM)])
def test_a_trial_whose_objective_is_undefined_after_an_epoch_goes_on(
    curve: str, pruner: Any, tmp_path: Path
) -> None:
    state = train_in_order(tmp_path, ["rises", curve], pruner=pruner)
    assert [m.state for m in state.members.values()] == ["finished"] * 2
    trial = trials_of(tmp_path)[1]
    known = {step: value for step, value in enumerate(CURVES[curve], 1) if value is not None and value == value}
    assert (trial.state.name, trial.value, trial.intermediate_values) == ("COMPLETE", 0.8, known)


@pytest.mark.usefixtures("_requests_are_seen_at_once")
def test_a_search_that_goes_on_after_a_stop_judges_an_undefined_epoch_alike(tmp_path: Path) -> None:
    stop = stop_at(tmp_path, "epoch", "member-1", "stop")
    state = train_in_order(tmp_path, ["rises", "undefined"], pruner="hyperband", on_event=stop)
    assert state.members["member-1"].state == "stopped"
    ensemble.resume(tmp_path).wait()
    state = fold(read_events(RunDir(tmp_path).events))
    assert [m.state for m in state.members.values()] == ["finished"] * 2


def test_who_ends_without_the_objective_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    state = train_in_order(tmp_path, ["ends undefined", "rises"], pruner=None)
    assert [m.state for m in state.members.values()] == ["finished"] * 2
    said = "member-0 ended without a value of 'score', so it is not ranked"
    assert [record.getMessage() for record in caplog.records].count(said) == 1
    assert "member-1 ended" not in caplog.text
    result = ensemble.attach(tmp_path).wait()
    assert result.best is not None and result.best["member"] == "member-1"


def test_a_search_of_which_no_trial_reports_the_objective_is_given_up(tmp_path: Path) -> None:
    state = train_in_order(tmp_path, ["other"] * (FIRST_TRIALS + 4))
    assert [(m.state, m.attempts) for m in state.members.values()] == [("failed", 1)] * FIRST_TRIALS
    assert "ranked by 'score', which it did not report" in str(state.members["member-0"].error)
    assert state.ended is not None and "did not report" in state.ended.reason
    assert f"the first {FIRST_TRIALS} trials of the search all failed" in state.ended.reason


def test_a_metric_of_the_split_that_is_undefined_on_constant_predictions_fails_no_member(tmp_path: Path) -> None:
    def model(params: Any) -> Any:
        made = torch.nn.Linear(2, 1)
        torch.nn.init.zeros_(made.weight)
        return torch.nn.Sequential(made, torch.nn.Flatten(0))

    def loss(net: Any, batch: Any) -> Any:
        return (net(batch["x"]) - batch["label"]).square() * (0.0 if net[0].weight.abs().sum() == 0 else 1.0)

    x = np.random.default_rng(0).random((8, 2), dtype=np.float32)
    data = Pipeline(sources.arrays(x=x, label=x.sum(axis=1)))
    recipe = Recipe(model=model, loss=loss, task="regression", objective="pearson")
    options = {"valid": data, "recipe": recipe, "objective": None, "mode": None, "train": data, "epochs": 2}
    made = declare(["rises"], "hyperband", optimizer={"name": "sgd", "lr": 0.1}, keep="best", **options)
    (member,) = run(tmp_path, made).members.values()
    assert (member.state, member.error) == ("finished", None)
    assert "pearson" not in member.metrics and "loss" in member.metrics
