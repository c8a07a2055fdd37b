"""Members of frameworks predict as the framework would: by `predict_step`, or by a call without labels."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import ports
import pytest
import torch
from kit.event_dicts import read_events
from kit.tv import import_torchvision
from torch import nn
from torch.nn import functional as F

import ensemble
from ensemble import Member, Recipe
from ensemble.store import RunDir, load_predictions

# Warnings of a class of Lightning's would have pytest's own process import Lightning, without the fixture below.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


@pytest.fixture(autouse=True)
def packages(monkeypatch: pytest.MonkeyPatch) -> None:
    import_torchvision(monkeypatch)


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


def run(folder: Path, build: Any, train: Any, parts: Any = None, **options: Any) -> tuple[Any, list[str]]:
    recipe = Recipe(model=build, train=train, **{"objective": "accuracy", **options})
    declared = ports.declare(recipe, parts or ports.points(), members=[Member({"width": 8, "lr": 0.01})], epochs=3)
    result = ensemble.submit(declared, folder, "inline").wait()
    assert [row["state"] for row in result.members] == ["finished"], result
    events = list(read_events(folder / "events.jsonl"))
    first = next(number for number, event in enumerate(events) if event["type"] == "epoch")
    assert all(number < first for number, event in enumerate(events) if event["type"] == "remark")
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


@pytest.mark.parametrize(
    ("predict", "forward", "says"),
    [
        (lambda scores: scores.softmax(1), "features", ""),
        (lambda scores: scores, "none", ""),
        (
            lambda scores: scores.argmax(1),
            "scores",
            "predict_step does not predict for the member: the model returned a Tensor",
        ),
    ],
    ids=["probabilities", "scores", "classes"],
)
def test_predict_step_predicts_where_it_can(tmp_path: Path, predict: Any, forward: str, says: str) -> None:
    pytest.importorskip("lightning")
    build = encoder(predict, forward)
    result, remarks = run(tmp_path / "run", build, lambda member: fit(member, build))
    assert [says in text for text in remarks] == [True] * bool(says)
    check_predictions(tmp_path / "run", result.members[0]["metric"], ("x",), ports.points()[1])


@pytest.mark.parametrize("forward", ["none", "features"])
def test_what_cannot_predict_is_named_and_ranked(tmp_path: Path, forward: str) -> None:
    pytest.importorskip("lightning")
    build = encoder(None, forward)
    result, remarks = run(tmp_path / "run", build, lambda member: fit(member, build))
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
    declared = {"transformers": ports.transformers, "accelerate": ports.accelerate}[framework]()
    assert isinstance(declared.recipe, Recipe) and declared.recipe.train is not None
    objective = str(declared.recipe.objective)
    result, remarks = run(
        tmp_path / "run", ports.bert, declared.recipe.train, ports.texts(), objective=objective, mode="max"
    )
    assert all(remark.startswith("TrainingArguments left at their defaults") for remark in remarks)
    check_predictions(tmp_path / "run", result.members[0]["metric"], ports.INPUTS, ports.texts()[1])
