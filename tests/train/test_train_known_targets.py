"""Targets that take no part are the same in losses, figures, predictions and the combination; first batches."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import task_cases as cases
import torch
from kit.loop_cases import Events, failed
from torch import nn

import ensemble
from ensemble import Ensemble, Recipe, SpecError, quantiles
from ensemble.combine.tasks import find_math
from ensemble.spec.losses import NamedLoss
from ensemble.spec.task import IGNORED, Task
from ensemble.store import RunDir, load_predictions
from ensemble.train.data import as_stored_target
from ensemble.train.evaluation import _SplitRows, measure_batch
from ensemble.train.gather import Means
from ensemble.train.output_shapes import explain_shape_mismatch
from pipelines import Pipeline, sources

NAN = float("nan")
RNG = np.random.default_rng(0)
PROBABILITIES = RNG.dirichlet(np.ones(3), 6).astype(np.float32)
NUMBERS = RNG.normal(size=6).astype(np.float32)

SOFT_LABELS = [[0, 1, NAN], [1, 1, 0], [NAN] * 3, [0, 0, 1], [1, IGNORED, 0], [0, 1, 1]]
HARD_LABELS = np.array([[IGNORED if value != value else value for value in row] for row in SOFT_LABELS])
GAUSSIAN = np.stack([NUMBERS, np.ones_like(NUMBERS)], axis=1)
MANY, MANY_CLASSES = (
    np.eye(200, dtype=np.float32)[[156, 3, 156, 4, 5, 6]],
    np.array([156, 3, 156, 5, 5, 6], np.uint8),
)
LEVELLED = np.stack([NUMBERS, NUMBERS + 1], axis=1)
#: kind, values, target, which take part
TARGETS: dict[str, tuple[Task, np.ndarray, np.ndarray, list[Any]]] = {
    "classes": (Task("classification"), PROBABILITIES, np.array([0, 1, IGNORED, 2, IGNORED, 1]), [0, 1, 3, 5]),
    "as floats": (Task("classification"), PROBABILITIES, np.array([0, 1, NAN, 2, IGNORED, 1.0]), [0, 1, 3, 5]),
    "many classes": (Task("classification"), MANY, MANY_CLASSES, [0, 1, 2, 3, 4, 5]),
    "labels": (Task("multilabel"), PROBABILITIES, HARD_LABELS, []),
    "labels as floats": (Task("multilabel"), PROBABILITIES, np.array(SOFT_LABELS), []),
    "counts": (Task("regression"), NUMBERS, np.array([1, 2, IGNORED, 3, 0, 2]), [0, 1, 3, 4, 5]),
    "numbers": (Task("regression"), NUMBERS, np.array([1, NAN, IGNORED, 3, 0, 2.0]), [0, 2, 3, 4, 5]),
    "gaussian": (Task("gaussian"), GAUSSIAN, np.array([1, 2, NAN, 3, 0, 2.0]), [0, 1, 3, 4, 5]),
    "quantiles": (quantiles(0.1, 0.5), LEVELLED, np.array([1, 2, IGNORED, 3, 0, 2]), [0, 1, 3, 4, 5]),
}


@pytest.mark.parametrize("name", TARGETS)
def test_figures_in_training_are_those_of_the_combination(name: str) -> None:
    task, values, target, known = TARGETS[name]
    stored = as_stored_target(task, torch.from_numpy(target))
    assert stored is not None and explain_shape_mismatch(task, torch.from_numpy(values), stored) is None
    means = Means()
    means.add(measure_batch(task, torch.from_numpy(values), stored), len(values))

    class Alone:
        world = 1

    found = means.over_all(Alone())  # type: ignore[arg-type]
    combined = find_math(task).measure(values.astype(np.float64), stored.numpy())
    shared = found.keys() & combined.keys()
    assert shared or task.kind == "quantiles"
    assert {key: found[key] for key in shared} == pytest.approx({key: combined[key] for key in shared})
    if task.kind == "classification":
        assert found["accuracy"] == pytest.approx(np.mean(values[known].argmax(axis=1) == target[known]))
    elif known:
        point = task.take_point(values)[known]
        assert found["mae"] == pytest.approx(np.abs(point - target[known]).mean(), rel=1e-6)


@pytest.mark.parametrize(
    ("loss", "name"),
    [
        ("cross_entropy", "classes"),
        ("binary_cross_entropy", "labels"),
        ("binary_cross_entropy", "labels as floats"),
        ("mse", "counts"),
        ("mse", "numbers"),
    ],
)
def test_a_loss_learns_from_the_targets_that_figures_count(loss: str, name: str) -> None:
    task, _, target, _ = TARGETS[name]
    shape = (6, 3) if task.kind != "regression" else (6,)
    outputs = torch.zeros(shape, requires_grad=True)
    NamedLoss(loss, "y").compute(outputs, torch.from_numpy(target)).sum().backward()
    stored = as_stored_target(task, torch.from_numpy(target))
    assert stored is not None and outputs.grad is not None
    known = ~stored.isnan() if stored.is_floating_point() else stored != IGNORED
    has_gradient = outputs.grad != 0 if task.kind != "classification" else (outputs.grad != 0).any(dim=1)
    zero_error = (stored == 0) & (task.kind == "regression")  # the output is 0, too
    assert torch.equal(has_gradient, known & ~zero_error)


def test_fractions_are_no_labels(tmp_path: Path) -> None:
    """Rounded, 0.9 would be 0."""
    soft = torch.tensor([[0.9, 0.1], [0.0, 1.0]])
    stored = as_stored_target(Task("multilabel"), soft)
    assert stored is not None and torch.equal(stored, soft.double())
    why = explain_shape_mismatch(Task("multilabel"), torch.rand(2, 2), stored)
    assert why == "multilabel: the target has fractions, where it should name classes or labels"


def end(outcome: str, events: Events) -> dict[str, Any]:
    assert outcome == "finished", events[-1]
    return next(event for event in events if event["type"] == "finished")


def known_squares(model: nn.Module, batch: Any) -> torch.Tensor:
    known = ~batch["label"].isnan()
    error = model(batch["x"]).squeeze(1) - torch.nan_to_num(batch["label"])
    return torch.where(known, error, 0.0).square()


LATE = {
    "nothing at first": np.array([NAN] * 5 + [0.5, 1.5, NAN, 2.5, 3.5] * 2),
    "zeros at first": np.array([0.0] * 10 + [0.5, 1.5, 0.0, 2.5, 3.5]),
}


@pytest.mark.parametrize("name", LATE)
@pytest.mark.parametrize("stop", [None, 1, 2])
def test_what_the_first_batch_does_not_show_a_later_one_does(tmp_path: Path, name: str, stop: int | None) -> None:
    recipe = Recipe(model=cases.head(1), loss=known_squares, task="regression", objective="rmse")
    options: dict[str, Any] = {"epochs": 2, "keep": "best", "validate_every": 1}
    if stop is not None:
        inbox = cases.train_child.Script(stop, "stop")
        assert cases.train_on(recipe, tmp_path, LATE[name], inbox=inbox, **options)[0] == "stopped"
    outcome, events, _ = cases.train_on(recipe, tmp_path, LATE[name], **options)
    assert set(end(outcome, events)["metrics"]) == {"loss", "mae", "rmse"}
    saved = load_predictions(RunDir(tmp_path / "single").predictions("member-0", 0), "valid")
    assert saved.task == Task("regression") and len(saved.values) == 15
    np.testing.assert_array_equal(saved.target, LATE[name])


def test_a_figure_is_never_of_a_part_of_the_samples(tmp_path: Path) -> None:
    """A model that squeezes its outputs: a last batch of one sample has none that fit."""

    class Squeezed(cases.Head):
        def forward(self, x: torch.Tensor) -> Any:
            return super().forward(x).squeeze()

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        return nn.functional.cross_entropy(model(batch["x"]).reshape(-1, 3), batch["label"], reduction="none")

    recipe = Recipe(model=lambda params: Squeezed(3), loss=loss, task="classification")
    outcome, events, log = cases.train_on(recipe, tmp_path, np.arange(15) % 3, np.arange(11) % 3)
    assert set(end(outcome, events)["metrics"]) == {"loss"}
    assert "no figures of the predictions on 'valid': classification: values of shape" in log


def test_predictions_of_an_evaluation_are_not_kept_through_the_next_epoch(tmp_path: Path) -> None:
    kept = []

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        if model.training:
            rows = [each for each in gc.get_objects() if type(each) is _SplitRows]
            kept.append(sum(len(each._rows) for each in rows))
        return cases.cross_entropy(model, batch)

    recipe = Recipe(model=cases.head(3), loss=loss, split_metrics=["nll"])
    outcome, events, _ = cases.train_on(recipe, tmp_path, np.arange(15) % 3)
    assert "nll" in end(outcome, events)["metrics"] and kept == [0] * len(kept)


def test_the_validation_loss_is_of_the_samples_that_take_part(tmp_path: Path) -> None:
    recipe = Recipe(model=cases.head(3), loss="cross_entropy", inputs="x", objective="loss")
    label = np.arange(15) % 3
    half = np.where(np.arange(15) < 8, label, IGNORED)
    outcome, events, _ = cases.train_on(recipe, tmp_path / "half", label, half)
    loss = end(outcome, events)["metrics"]["loss"]
    saved = load_predictions(RunDir(tmp_path / "half" / "single").predictions("member-0", 0), "valid")
    assert loss == pytest.approx(find_math(saved.task).measure(saved.values, saved.target)["nll"], rel=1e-5)
    outcome, events, _ = cases.train_on(recipe, tmp_path / "none", label, np.full(15, IGNORED), keep="best")
    said = failed(outcome, events)["error"]
    assert "ranked by 'loss', which it did not report" in said, "0 would be the best of all losses"


MEAN, STD = 5000.0, 200.0


class Heads(nn.Module):
    def __init__(self, outputs: int, is_gaussian: bool) -> None:
        super().__init__()
        self.net, self.is_gaussian = nn.Linear(3, outputs), is_gaussian

    def forward(self, x: Any) -> Any:
        found = self.net(x)
        return (found[:, 0], nn.functional.softplus(found[:, 1]) + 1e-3) if self.is_gaussian else found


TASKS: dict[str, tuple[Any, ...]] = {
    "mse": ("regression", 1),
    "huber": ("regression", 1),
    "gaussian_nll": ("gaussian", 2),
    "pinball": (quantiles(0.1, 0.5, 0.9), 3),
}


def declare(loss: str, **options: Any) -> Ensemble:
    task, outputs = TASKS[loss]
    rng = np.random.default_rng(0)
    x = rng.normal(size=(400, 3)).astype(np.float32)
    price = (MEAN + STD * (x @ [0.8, -0.4, 0.2] + 0.3 * rng.normal(size=400))).astype(np.float32)
    train, valid = sources.arrays(x=x, price=price).split(0.75, seed=0)
    about = {"model": lambda params: Heads(outputs, loss == "gaussian_nll"), "loss": loss, "inputs": ("x",)}
    about |= {"target": "price", "task": task}
    recipe = Recipe(**about, **{"target_scale": (MEAN, STD), **options})
    members, splits = [{"lr": 0.05}] * 2, {"train": Pipeline(train), "valid": Pipeline(valid)}
    return Ensemble(
        name="scaled", recipe=recipe, members=members, optimizer="adam", epochs=8, batch_size=32, **splits
    )


@pytest.mark.parametrize(
    "loss", ["gaussian_nll", "pinball", *(pytest.param(each, marks=pytest.mark.more) for each in ("mse", "huber"))]
)
def test_predictions_and_figures_are_in_the_targets_own_unit(tmp_path: Path, loss: str) -> None:
    result = ensemble.submit(declare(loss), tmp_path / "run", "inline").wait()
    best = result.best
    assert 0.2 * STD < best["metrics"]["rmse"] < 0.5 * STD
    saved = load_predictions(RunDir(tmp_path / "run").predictions(best["member"]), "valid")
    assert abs(saved.target.mean() - MEAN) < STD
    points = (
        saved.values if saved.values.ndim == 1 else saved.values[:, {"gaussian_nll": 0, "pinball": 1}.get(loss, 0)]
    )
    error = np.sqrt(np.mean((points - saved.target) ** 2))
    assert error == pytest.approx(best["metrics"]["rmse"], rel=1e-3)
    if loss == "gaussian_nll":
        assert 0.1 < np.sqrt(saved.values[:, 1]).mean() / error < 10
    batch = {"x": torch.randn(4, 3)}
    found = ensemble.load(tmp_path / "run", members=[best["member"]], combine="average")(batch)
    assert abs(found.reshape(4, -1)[:, 0].mean() - MEAN) < 4 * STD
    if loss != "pinball":  # which has no such figure of the ensemble
        assert result.combined["metrics"]["ensemble"]["rmse"] < 0.5 * STD


def test_the_loss_is_that_of_the_standardized_target() -> None:
    recipe = declare("mse").recipe
    x = torch.zeros(3, 1)
    target = torch.tensor([MEAN + STD, MEAN, torch.nan])
    assert recipe.loss.compute(x, target).tolist() == [1.0, 0.0, 0.0]


def test_a_student_learns_from_an_ensemble_with_a_scale(tmp_path: Path) -> None:
    ensemble.submit(declare("mse"), tmp_path / "run", "inline").wait()
    student = ensemble.distill(tmp_path / "run", tmp_path / "student", executor="inline").wait()
    assert student.best["metrics"]["rmse"] < 0.5 * STD


def test_what_is_no_scale_is_refused() -> None:
    for options, says in (
        ({"target_scale": (0.0, 0.0)}, "standard deviation must be above 0"),
        ({"target_scale": 3.0}, r"must be \(mean, standard deviation\)"),
        *(({"task": task, "loss": "cross_entropy"}, "is for numbers") for task in ("classification", None)),
    ):
        with pytest.raises(SpecError, match=says):
            Recipe(**{"model": len, "loss": "mse", "target_scale": (0.0, 1.0), **options})
