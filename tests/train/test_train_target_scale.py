"""`Recipe(target_scale=)`: members learn standardized targets; predictions and figures are in the own unit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import ensemble
from ensemble import Ensemble, Recipe, SpecError, quantiles
from ensemble.store import RunDir, load_predictions
from pipelines import Pipeline, sources

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
    recipe = Recipe(
        model=lambda params: Heads(outputs, loss == "gaussian_nll"),
        loss=loss,
        inputs=("x",),
        target="price",
        task=task,
        **{"target_scale": (MEAN, STD), **options},
    )
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


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"target_scale": (0.0, 0.0)}, "standard deviation must be above 0"),
        ({"target_scale": 3.0}, r"must be \(mean, standard deviation\)"),
        ({"task": "classification", "loss": "cross_entropy"}, "is for numbers"),
        ({"task": None, "loss": "cross_entropy"}, "is for numbers"),
    ],
)
def test_what_is_no_scale_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(SpecError, match=said):
        Recipe(**{"model": len, "loss": "mse", "target_scale": (0.0, 1.0), **options})
