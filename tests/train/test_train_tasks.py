"""Members of every task: what they report and predict, with one worker and with two, undisturbed and resumed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import task_cases as cases
import torch
from kit import train_child
from kit.checkpoints import newest_checkpoint
from kit.loop_cases import Events, failed, own_loop
from kit.ranks import run_ranks
from torch import nn

from ensemble.combine.split_metrics import compute
from ensemble.spec import Recipe
from ensemble.spec.task import Task
from ensemble.store import RunDir, load_checkpoint, load_predictions, save_checkpoint
from ensemble.train.call import Call, Observation
from pipelines import Pipeline, sources


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("one")
    said = {name: cases.train(name, folder) for name in cases.CASES}
    (folder / "0.json").write_text(json.dumps(said))
    return folder


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("two")
    run_ranks(2, cases.train_first, folder)
    return folder


@pytest.fixture(scope="module")
def second(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("two")
    run_ranks(2, cases.train_second, folder)
    return folder


TIERED = [pytest.param(name, marks=pytest.mark.more if name in cases.SECOND else ()) for name in cases.CASES]


def end(outcome: str, events: Events) -> dict[str, Any]:
    assert outcome == "finished", events[-1]
    return next(event for event in events if event["type"] == "finished")


def said(folder: Path, name: str, type: str, rank: int = 0) -> Events:
    outcome, events = json.loads((folder / f"{rank}.json").read_text())[name]
    assert outcome == "finished", [event for event in events if event["type"] == "failed"]
    return [event for event in events if event["type"] == type]


def metrics(folder: Path, name: str) -> dict[str, float]:
    return dict(said(folder, name, "finished")[0]["metrics"])


def predictions(folder: Path, name: str, split: str = "valid") -> Any:
    return load_predictions(RunDir(folder / name).predictions("member-0", 0), split)


def observed(folder: Path, name: str) -> Observation:
    path = newest_checkpoint(RunDir(folder / name), "member-0", 0)
    assert path is not None
    found = Observation.from_checkpoint(load_checkpoint(path))
    assert found is not None
    return found


CALLS = {name: Call(("x",)) for name in ("single", "steps", "gaussian")}
CALLS |= {"one logit": Call((), {"x": "x"}), "predict": None, "computed arguments": None}


@pytest.mark.parametrize("name", cases.CASES)
def test_a_task_is_reported_and_predicted(one: Path, name: str) -> None:
    case, saved, known = cases.CASES[name], predictions(one, name), metrics(one, name)
    assert saved.task.kind == case.kind and saved.values.shape == (13, *case.shape)
    assert saved.values.dtype == np.float32
    assert set(known) == {"loss", *case.metrics.split()}
    assert np.array_equal(saved.target, case.target(np.random.default_rng(1).normal(size=(13, 6))))
    if case.kind == "classification":
        assert saved.values.sum(axis=-1) == pytest.approx(1, abs=1e-6)
    names: Any = {"one logit": ["roc_auc"], "free": [cases.spread]}.get(name) or case.recipe.split_metrics
    expected = {getattr(metric, "__name__", metric) for metric in names}
    computed = compute(list(names), saved.values, saved.target, saved.task)
    assert computed == pytest.approx({key: value for key, value in known.items() if key in expected}, rel=1e-6)
    losses = [event["metrics"]["loss"] for event in said(one, name, "epoch")]
    assert losses[-1] < losses[0], "it learns"
    if name in CALLS:
        seen = observed(one, name)
        assert seen.call == CALLS[name] and seen.reason is None
        assert seen.target == ("float64" if name == "gaussian" else "int64", (7,) if name == "steps" else ())


@pytest.mark.parametrize("name", TIERED)
def test_two_workers_are_one(one: Path, name: str, request: pytest.FixtureRequest) -> None:
    two = request.getfixturevalue("second" if name in cases.SECOND else "two")
    assert metrics(two, name) == pytest.approx(metrics(one, name), rel=1e-5)
    for split in ("valid", "test"):
        alone, shared = predictions(one, name, split), predictions(two, name, split)
        np.testing.assert_allclose(shared.values, alone.values, rtol=1e-5, atol=1e-6)
        assert np.array_equal(shared.target, alone.target) and np.array_equal(shared.index, alone.index)
        assert shared.task == alone.task
    assert observed(two, name) == observed(one, name)
    epochs = [said(two, name, "epoch", rank) for rank in (0, 1)]
    assert epochs[1] == [] and len(epochs[0]) == 3


@pytest.mark.parametrize("name", TIERED)
def test_a_resume_gives_the_bits_of_an_undisturbed_training(one: Path, tmp_path: Path, name: str) -> None:
    assert cases.train(name, tmp_path, inbox=train_child.Script(7, "stop"))[0] == "stopped"
    at_stop = observed(tmp_path, name)
    last, before = end(*cases.train(name, tmp_path)), said(one, name, "finished")[0]
    assert (last["weights_sha256"], last["metrics"]) == (before["weights_sha256"], before["metrics"])
    assert observed(tmp_path, name) == observed(one, name)
    assert at_stop.call == observed(one, name).call
    for split in ("valid", "test"):
        assert np.array_equal(predictions(tmp_path, name, split).values, predictions(one, name, split).values)


def test_how_a_loss_calls_the_model_is_seen(tmp_path: Path) -> None:
    def otherwise(model: nn.Module, batch: Any) -> torch.Tensor:
        """In training it is called otherwise, so it is evaluated its own way."""
        x = batch["x"] if model.training else -batch["x"]
        return nn.functional.cross_entropy(model(x), batch["label"], reduction="none")

    def whole(model: nn.Module, batch: Any) -> torch.Tensor:
        return nn.functional.cross_entropy(model(batch), batch["label"], reduction="none")

    class Whole(cases.Head):
        def forward(self, batch: Any) -> Any:
            return super().forward(batch["x"])

    for loss, model, call in ((otherwise, cases.head(3), None), (whole, lambda params: Whole(3), Call((None,)))):
        recipe, folder = Recipe(model=model, loss=loss, task="classification"), tmp_path / loss.__name__
        assert cases.train_on(recipe, folder, np.arange(12) % 3, accumulate=2)[0] == "finished"
        assert observed(folder, "single").call == call


def rows_of(member: Any, split: str) -> list[torch.Tensor]:
    with member.evaluating() as model:
        rows = [(model(x=batch["x"]).squeeze(1), batch["index"].clone()) for batch in member.batches(split)]
    return [torch.cat(column) for column in zip(*rows, strict=True)]


def test_a_train_function_says_the_task_of_its_predictions(tmp_path: Path) -> None:
    def predict(member: Any) -> None:
        for split in member.splits:
            member.predictions(split, *rows_of(member, split), task="regression")

    own = own_loop(at_the_end=predict, make=cases.head(1), losses=lambda member, m, batch: cases.squares(m, batch))
    end(*cases.train("regression", tmp_path, recipe=own))
    for split, rows in (("valid", 13), ("test", 4)):
        saved = predictions(tmp_path, "regression", split)
        assert (saved.task, saved.values.shape, saved.target.dtype) == (Task("regression"), (rows,), np.float64)


@pytest.mark.parametrize("name", ["steps", "predict"])
def test_a_rank_without_samples_knows_what_the_others_saw(two: Path, tmp_path: Path, name: str) -> None:
    """Batches of one sample: the first of two ranks, which writes the checkpoint, has none of any."""
    alone = end(*cases.train(name, tmp_path, **cases.TINY))["metrics"]
    tiny = two / "tiny"
    assert observed(tiny, name) == observed(tmp_path, name) and observed(tiny, name).task is not None
    values = [predictions(folder, name).values for folder in (tiny, tmp_path)]
    np.testing.assert_allclose(*values, rtol=1e-5, atol=1e-6)
    assert metrics(tiny, name) == pytest.approx(alone, rel=1e-5)


def test_a_failing_metric_fails_all_ranks(two: Path) -> None:
    ended = [json.loads((two / "failing" / f"{rank}.json").read_text())["single"] for rank in (0, 1)]
    assert [outcome for outcome, _ in ended] == ["failed", "failed"]
    assert "no such thing" in failed(*ended[0])["error"]


@pytest.mark.parametrize(
    "options", [{"averaging": "swa"}, {"keep": "best"}, {"mixup": 0.4}, {"validate_every": 2}]
)
def test_metrics_of_the_split_go_with_every_kind_of_loop(tmp_path: Path, options: dict[str, Any]) -> None:
    def model(params: dict[str, Any]) -> nn.Module:
        made = cases.Head(3)
        made.layers.insert(1, nn.BatchNorm1d(16, dtype=torch.float64))  # averaged weights want new statistics
        return made

    recipe = replace(cases.CASES["single"].recipe, model=model)
    finished = end(*cases.train("single", tmp_path, recipe=recipe, **options))
    saved = predictions(tmp_path, "single")
    expected = compute(["f1_macro"], saved.values, saved.target, saved.task)
    assert finished["metrics"]["f1_macro"] == pytest.approx(expected["f1_macro"])
    assert observed(tmp_path, "single").call == Call(("x",))


def test_a_metric_of_the_split_selects_within_epochs(tmp_path: Path) -> None:
    outcome, events = cases.train("one logit", tmp_path, validate_every=2, keep="best")
    epochs = [event for event in events if event["type"] == "epoch"]
    assert outcome == "finished", events[-1]
    assert [sorted(found) for _, found in epochs[0]["validations"]] == [["accuracy", "loss", "roc_auc"]] * 2


@pytest.mark.parametrize("name", ["steps", "multilabel"])
def test_a_finished_member_of_an_earlier_version_predicts(one: Path, tmp_path: Path, name: str) -> None:
    cases.train(name, tmp_path)
    path = newest_checkpoint(RunDir(tmp_path / name), "member-0", 0)
    state = {key: part for key, part in load_checkpoint(path).items() if key not in ("call", "outputs")}
    save_checkpoint(path, state)
    RunDir(tmp_path / name).predictions("member-0", 0).unlink()
    outcome, events = cases.train(name, tmp_path)
    assert outcome == "finished" and not [event for event in events if event["type"] == "epoch"]
    for split in ("valid", "test"):
        again, before = predictions(tmp_path, name, split), predictions(one, name, split)
        assert np.array_equal(again.values, before.values) and again.task == before.task


def test_a_free_task_needs_no_target(tmp_path: Path) -> None:
    pipe = Pipeline(sources.arrays(x=np.random.default_rng(0).normal(size=(12, cases.WIDE))))

    def reach(values: np.ndarray, target: None) -> float:
        assert target is None
        return float(np.abs(values).max())

    recipe = replace(cases.CASES["free"].recipe, split_metrics=[reach])
    finished = end(*cases.train("free", tmp_path, recipe=recipe, train=pipe, valid=pipe, test=None))
    saved = predictions(tmp_path, "free")
    assert saved.target is None and finished["metrics"]["reach"] == pytest.approx(np.abs(saved.values).max())
