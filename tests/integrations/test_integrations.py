"""Members that frameworks train have what those of a Recipe have: real packages, real kills."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import ports
import pytest
import torch
from kit.event_dicts import read_events
from kit.finished_runs import of_kind
from kit.tv import import_torchvision
from torch import nn
from torch.nn import functional as F

import ensemble
from ensemble import Ensemble, Folds, Member, Recipe, Search, loguniform
from ensemble.store import RunDir, load_predictions

FRAMEWORKS: dict[str, Callable[..., Ensemble]] = {
    name: getattr(ports, name) for name in ("lightning", "transformers", "accelerate", "torchrun")
}
# Warnings of a class of Lightning's would have pytest's own process import Lightning, without the fixture below.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
TIERED = [pytest.param(name, marks=() if name == "lightning" else pytest.mark.more) for name in FRAMEWORKS]


@pytest.fixture(autouse=True)
def packages(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    import_torchvision(monkeypatch)
    if "framework" in request.fixturenames:
        pytest.importorskip({"torchrun": "torch"}.get(name := request.getfixturevalue("framework"), name))


def run(declared: Ensemble, folder: Path, executor: str = "inline") -> Any:
    result = ensemble.submit(declared, folder, executor).wait()
    assert {row["state"] for row in result.members} <= {"finished", "pruned"}, result
    return result


def finished(folder: Path) -> dict[str, Any]:
    return {end["member"]: (end["weights_sha256"], end["metrics"]) for end in of_kind(folder, "finished")}


@pytest.mark.parametrize("framework", TIERED)
def test_members_learn_are_ranked_combined_and_loaded(tmp_path: Path, framework: str) -> None:
    declared = FRAMEWORKS[framework]()
    result = run(declared, tmp_path / "run", "local" if framework == "torchrun" else "inline")
    best = max(row["metric"] for row in result.members)
    assert best > 0.7 and result.best is not None and result.best["metric"] == best
    saved = load_predictions(RunDir(tmp_path / "run").predictions(result.best["member"]), "valid")
    right = saved.values.argmax(axis=1) == saved.target
    assert right.mean() == pytest.approx(best, abs=1e-6), "predictions are of the weights that were reported"
    loaded = ensemble.load(tmp_path / "run", members=[result.best["member"]])
    batch = next(iter(declared.valid.loader(len(saved.index), 1)))
    order = np.argsort(np.asarray(batch["index"]))
    expected = saved.values[np.argsort(saved.index)].argmax(1)
    np.testing.assert_array_equal(loaded(batch).argmax(1).numpy()[order], expected)
    if framework in ("accelerate", "torchrun"):
        return
    ensemble.export(tmp_path / "run", tmp_path / "out", uncertainty=False)
    program = torch.export.load(tmp_path / "out" / "model.pt2").module()
    few = {name: batch[name][:5] for name in (ports.INPUTS if framework == "transformers" else ("x",))}
    assert torch.equal(program(few), ensemble.load(tmp_path / "run")(few))


@pytest.mark.parametrize("framework", TIERED)
def test_members_cross_validate(tmp_path: Path, framework: str) -> None:
    """Batches of what is left of four, some of them empty, in loops that expect none."""
    k, size = 2, 32 if framework == "torchrun" else 4
    declared = FRAMEWORKS[framework]()
    options: dict[str, Any] = {} if framework == "torchrun" else {"epochs": 2}
    options |= {"members": list(declared.members)[:1] * k, "valid": None, "batch_size": size}
    declared = replace(declared, weights=Folds(k), out_of_fold=True, **options)
    run(declared, tmp_path / "run", "local" if framework == "torchrun" else "inline")
    events = read_events(tmp_path / "run" / "events.jsonl")
    samples = sum(event["samples"] for event in events if event["type"] == "epoch")
    assert samples == declared.epochs * len(declared.train) * (k - 1)
    (combined,) = (event for event in events if event["type"] == "combined")
    assert combined["out_of_fold"] and not combined["left_out"]
    assert len(ensemble.load_predictions(tmp_path / "run", "valid")) == len(declared.train)


def keep_best_by_lightning() -> list[Any]:
    """It stops after its fifth epoch by what it counted since the first; and a hook adds an object."""
    from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint

    class Adding(Callback):  # type: ignore[misc]
        def __init__(self) -> None:
            self.scaled = Fraction(0)  # as a class of a library, a normalizer say

        def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
            self.scaled += 1

        def on_save_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
            checkpoint["scaled"] = {"by": self.scaled}

        def on_load_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
            self.scaled = checkpoint["scaled"]["by"]

        def on_train_end(self, trainer: Any, module: Any) -> None:
            assert self.scaled == 5 and isinstance(self.scaled, Fraction)

    return [ModelCheckpoint(monitor="val_loss"), EarlyStopping("val_loss", min_delta=9.0, patience=4), Adding()]


def stop_by_transformers() -> list[Any]:
    from transformers import EarlyStoppingCallback

    return [EarlyStoppingCallback(early_stopping_patience=4, early_stopping_threshold=9.0)]


#: Frameworks that keep the best weights themselves, in files that a death must not lose.
BEST = {"save_strategy": "epoch", "load_best_model_at_end": True, "save_total_limit": 1}
KEEPING_BEST: dict[str, dict[str, Any]] = {"transformers": {"args": BEST, "callbacks": stop_by_transformers}}
KEEPING_BEST |= {"lightning": {"callbacks": keep_best_by_lightning}}


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.more
def test_killed_members_end_with_the_bits_of_undisturbed_ones(
    tmp_path: Path, framework: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    declared = functools.partial(FRAMEWORKS[framework], **KEEPING_BEST.get(framework, {}))
    run(declared(), tmp_path / "whole", "local")
    monkeypatch.setenv(ports.DIES, str(tmp_path / "died"))
    result = run(declared(), tmp_path / "killed", "local")
    assert sorted(row["attempts"] for row in result.members) == [1, 2], ports.list_errors(tmp_path / "killed")
    assert finished(tmp_path / "killed") == finished(tmp_path / "whole")
    epochs = 5 if framework in ("lightning", "transformers") else ports.EPOCHS  # stopped by what they counted
    assert {row["epoch"] for row in result.members} == {epochs}
    for member in finished(tmp_path / "whole"):
        files = [RunDir(tmp_path / name).predictions(member) for name in ("whole", "killed")]
        np.testing.assert_array_equal(*(load_predictions(file, "valid").values for file in files))


@pytest.mark.parametrize("framework", ["lightning", "transformers", "accelerate"])
@pytest.mark.more
def test_a_pruner_ends_trials_early(tmp_path: Path, framework: str) -> None:
    search = Search({"lr": loguniform(1e-5, 1.0), "width": 8}, trials=6, pruner="median")
    result = run(FRAMEWORKS[framework](search=search), tmp_path / "run")
    states = [row["state"] for row in result.members]
    assert "pruned" in states and "finished" in states
    assert all(row["epoch"] < ports.EPOCHS for row in result.members if row["state"] == "pruned")


@pytest.mark.parametrize("framework", TIERED[:3])
def test_the_page_shows_the_tables_of_options(framework: str, monkeypatch: pytest.MonkeyPatch) -> None:
    docs = Path(__file__).parents[2] / "docs"  # whose tables.py writes it
    monkeypatch.syspath_prepend(str(docs / "_site"))
    table = importlib.import_module("tables").describe_options(framework)
    assert table in (docs / "how-to" / "frameworks.md").read_text(encoding="utf-8")


@pytest.mark.more
def test_workers_of_which_each_trains_a_model_of_its_own_are_refused(tmp_path: Path) -> None:
    result = ensemble.submit(ports.torchrun(wraps=False), tmp_path / "run", "local").wait()
    assert {row["state"] for row in result.members} == {"failed"}
    (why,) = set(ports.list_errors(tmp_path / "run"))
    assert "different weights after epoch 1" in why and "DistributedDataParallel" in why


def encoder(predict: Callable[[Any], Any] | None, forward: str = "features") -> Callable[[dict[str, Any]], Any]:
    """A module that trains by its parts; its `predict_step` returns `predict(scores)`, its forward features."""

    def build(params: dict[str, Any]) -> Any:
        import lightning as L

        class Encoder(L.LightningModule):  # type: ignore[misc]
            def __init__(self) -> None:
                super().__init__()
                self.net, self.head = nn.Sequential(nn.Linear(8, 16), nn.ReLU()), nn.Linear(16, 2)

            def training_step(self, batch: Any, index: int) -> Any:
                x, label = batch
                scores = self(x) if forward == "scores" else self.head(self.net(x))
                return F.cross_entropy(scores, label)

            def validation_step(self, batch: Any, index: int) -> None:
                x, label = batch
                self.log("accuracy", (self.head(self.net(x)).argmax(1) == label).float().mean())

            def configure_optimizers(self) -> Any:
                return torch.optim.Adam(self.parameters(), lr=0.01)

        if forward != "none":
            Encoder.forward = lambda self, x: self.head(self.net(x)) if forward == "scores" else self.net(x)
        if predict is not None:
            Encoder.predict_step = lambda self, batch, index: predict(self.head(self.net(batch[0])))
        return Encoder()

    return build


def run_calls(folder: Path, build: Any, train: Any, parts: Any = None, **options: Any) -> tuple[Any, list[str]]:
    recipe = Recipe(model=build, train=train, **{"objective": "accuracy", **options})
    declared = ports.declare(recipe, parts or ports.points(), members=[Member({"width": 8, "lr": 0.01})], epochs=3)
    result = ensemble.submit(declared, folder, "inline").wait()
    assert [row["state"] for row in result.members] == ["finished"], result
    events = list(read_events(folder / "events.jsonl"))
    return result, [event["text"] for event in events if event["type"] == "remark"]


def check_predictions(folder: Path, metric: float, fields: tuple[str, ...], batch: Any) -> None:
    """Saved predictions are those of the metric, and what the loaded model predicts without labels."""
    saved = load_predictions(RunDir(folder).predictions("member-0"), "valid")
    np.testing.assert_allclose(saved.values.sum(axis=1), 1, atol=1e-5)
    assert (saved.values.argmax(1) == saved.target).mean() == pytest.approx(metric, abs=1e-6)
    assert metric < 0.7 or saved.values.max() > 0.75  # after a second softmax none is
    loaded = ensemble.load(folder)
    assert set(loaded.fields) == set(fields)
    few = {name: torch.stack([torch.as_tensor(batch[int(i)][name]) for i in saved.index[:5]]) for name in fields}
    np.testing.assert_array_equal(loaded(few).argmax(1).numpy(), saved.values[:5].argmax(1))


def fit(member: Any, build: Any) -> None:
    from ensemble.integrations.lightning import fit

    fit(member, build(member.params), fields=("x", "label"))


PREDICTED = [(lambda scores: scores.softmax(1), "features"), (lambda scores: scores, "none"), (None, "scores")]


@pytest.mark.parametrize(("predict", "forward"), PREDICTED, ids=["probabilities", "scores", "forward"])
def test_predict_step_or_forward_predicts(tmp_path: Path, predict: Any, forward: str) -> None:
    pytest.importorskip("lightning")
    build = encoder(predict, forward)
    result, remarks = run_calls(tmp_path / "run", build, lambda member: fit(member, build))
    assert remarks == []
    check_predictions(tmp_path / "run", result.members[0]["metric"], ("x",), ports.points()[1])


@pytest.mark.parametrize(("predict", "forward"), [(None, "none"), (lambda scores: scores.argmax(1), "scores")])
def test_what_cannot_predict_is_named_and_ranked(tmp_path: Path, predict: Any, forward: str) -> None:
    pytest.importorskip("lightning")
    build = encoder(predict, forward)
    result, remarks = run_calls(tmp_path / "run", build, lambda member: fit(member, build))
    assert len(remarks) == 1 and remarks[0].startswith("there will be no combined model: ")
    assert "Recipe.predict" in remarks[0]
    assert result.best is not None and result.members[0]["metric"] > 0.7
    assert not list((tmp_path / "run").rglob("predictions*"))


def test_a_training_step_that_returns_no_loss_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    build = encoder(None)

    def train(member: Any) -> None:
        module = build({})
        type(module).training_step = lambda self, batch, index: None
        fit(member, lambda params: module)

    declared = ports.declare(Recipe(model=build, train=train, objective="accuracy"), ports.points())
    result = ensemble.submit(declared, tmp_path / "run", "inline").wait()
    assert {row["state"] for row in result.members} == {"failed"}
    assert all("returned no loss" in row["error"] for row in result.members)


@pytest.mark.more
@pytest.mark.parametrize("framework", ["transformers", "accelerate"])
def test_logits_predict_without_a_function_and_without_labels(tmp_path: Path, framework: str) -> None:
    pytest.importorskip(framework)
    declared = FRAMEWORKS[framework]()
    assert isinstance(declared.recipe, Recipe) and declared.recipe.train is not None

    options = {"objective": str(declared.recipe.objective), "mode": "max"}
    result, remarks = run_calls(tmp_path / "run", ports.bert, declared.recipe.train, ports.texts(), **options)
    assert all(remark.startswith("TrainingArguments left at their defaults") for remark in remarks)
    check_predictions(tmp_path / "run", result.members[0]["metric"], ports.INPUTS, ports.texts()[1])
