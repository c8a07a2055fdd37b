"""Runs of several tasks from end to end: shared batches or not, several processes, a search by a split metric."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ensemble
from ensemble import Ensemble, Recipe, Search, loguniform
from ensemble.spec.task import IGNORED
from ensemble.store import RunDir, load_predictions
from pipelines import Pipeline, sources

STEPS, CLASSES = 5, 3


def samples(seed: int, n: int, target: str) -> Pipeline:
    """Signals [n, 4] with a number each, or a class at each of a number of steps that differs."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, 4)).astype(np.float32)
    steps = ((x[:, :1] > np.linspace(-1, 1, STEPS)).astype(np.int64) + (x[:, 1:2] > 0)).astype(np.int64)
    steps[np.arange(STEPS) > (np.arange(n) % STEPS)[:, None]] = IGNORED
    label = {"steps": steps, "number": x.sum(axis=1) + 0.1 * rng.normal(size=n), "side": (x[:, 0] > 0).astype(int)}
    return Pipeline(sources.arrays(x=x, label=label[target]), seed=seed)


def network(params: Any, *shape: int) -> Any:
    import torch

    return torch.nn.Sequential(
        torch.nn.Linear(4, 16),
        torch.nn.Tanh(),
        torch.nn.Linear(16, int(np.prod(shape))),
        torch.nn.Unflatten(1, shape),
    )


def steps_model(params: Any) -> Any:
    return network(params, CLASSES, STEPS)


def steps_loss(model: Any, batch: Any) -> Any:
    import torch

    losses = torch.nn.functional.cross_entropy(model(batch["x"]), batch["label"], reduction="none")
    return losses.sum(dim=1) / (batch["label"] != IGNORED).sum(dim=1)


def number_model(params: Any) -> Any:
    import torch

    class MeanAndVariance(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.both = network(params, 2)

        def forward(self, x: Any) -> dict[str, Any]:
            mean, spread = self.both(x).unbind(dim=1)
            return {"mean": mean, "variance": torch.nn.functional.softplus(spread) + 1e-3}

    return MeanAndVariance()


def number_loss(model: Any, batch: Any) -> Any:
    import torch

    found = model(batch["x"])
    return torch.nn.functional.gaussian_nll_loss(
        found["mean"], batch["label"].float(), found["variance"], reduction="none"
    )


RECIPES = {
    "steps": Recipe(model=steps_model, loss=steps_loss, objective="f1_macro"),
    "number": Recipe(
        model=number_model, loss=number_loss, task="gaussian", objective="rmse", split_metrics=["r2"]
    ),
}


def declare(target: str, **options: Any) -> Ensemble:
    given: dict[str, Any] = {
        "members": [{"lr": 0.1}, {"lr": 0.3}],
        "epochs": 3,
        "batch_size": 16,
        **{
            split: samples(seed, n, target)
            for seed, (split, n) in enumerate((("train", 96), ("valid", 41), ("test", 37)))
        },
    }
    return Ensemble(name="tasks", recipe=options.pop("recipe", RECIPES.get(target)), **{**given, **options})


@pytest.mark.parametrize("target", RECIPES)
def test_a_run_of_any_task_is_the_same_shared_and_alone(tmp_path: Path, target: str) -> None:
    alone = ensemble.submit(declare(target, sharing="independent"), tmp_path / "alone", "inline").wait()
    shared = ensemble.submit(declare(target), tmp_path / "shared", "local").wait()
    assert [row["metric"] for row in shared.members] == [row["metric"] for row in alone.members]
    for split in ("valid", "test"):
        for member in ("member-0", "member-1"):
            one, other = (
                load_predictions(RunDir(tmp_path / where).predictions(member, split))
                for where in ("alone", "shared")
            )
            assert np.array_equal(one.values, other.values) and np.array_equal(one.target, other.target)
            assert one.task == other.task
    assert shared.best is not None and shared.combined is not None and shared.combined["reason"] is None


def test_a_search_is_ranked_by_a_metric_of_the_whole_split(tmp_path: Path) -> None:
    def loss(model: Any, batch: Any) -> Any:
        import torch

        return torch.nn.functional.cross_entropy(model(batch["x"]), batch["label"], reduction="none")

    recipe = Recipe(model=lambda params: network(params, 2), loss=loss, objective="roc_auc")
    search = Search({"lr": loguniform(1e-3, 1.0)}, trials=4, pruner="median")
    spec = declare("side", recipe=recipe, members=None, search=search)
    result = ensemble.submit(spec, tmp_path / "run", "inline").wait()
    ranked = [row["metric"] for row in result.members if row["metric"] is not None]
    assert result.best is not None and result.best["metric"] == max(ranked)
    saved = load_predictions(RunDir(tmp_path / "run").predictions(result.best["member"], "valid"))
    from sklearn.metrics import roc_auc_score

    assert result.best["metric"] == pytest.approx(roc_auc_score(saved.target, saved.values[:, 1]))
