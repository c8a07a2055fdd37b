"""A recommender: its loss has a meaning within a training batch alone, its metric needs the users of a split."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import ensemble
from ensemble import Ensemble, Recipe, Resources, SpecError
from pipelines import Pipeline, sources

USERS, ITEMS = 6, 8


class Towers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.user, self.item = nn.Embedding(USERS, 4), nn.Embedding(ITEMS, 4)

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        return (self.user(user) * self.item(item)).sum(dim=1)


def in_batch(model: Towers, batch: Any) -> Tensor:
    """The other samples' items are the negatives."""
    assert model.training, "over pairs of the label 0 it has no meaning"
    model(batch["user"], batch["item"])
    scores = model.user(batch["user"]) @ model.item(batch["item"]).T
    return nn.functional.cross_entropy(scores, torch.arange(len(scores)), reduction="none")


def hit_rate(values: np.ndarray, target: np.ndarray, user: np.ndarray, k: int = 1) -> float:
    """The share of users among whose k best items one has the label 1."""
    assert user.shape == target.shape == values.shape
    best = [target[user == one][values[user == one].argsort()[::-1][:k]].max() for one in np.unique(user)]
    return float(np.mean(best))


def declare(workers: int = 1, **options: Any) -> Ensemble:
    rng = np.random.default_rng(0)
    user, item = (each.ravel() for each in np.meshgrid(np.arange(USERS), np.arange(ITEMS)))
    pairs = sources.arrays(user=user, item=item, label=rng.random(len(user)).round().astype(np.float32))
    given = {"task": "regression", "split_metrics": [hit_rate], "objective": "hit_rate", "valid_loss": False}
    recipe = Recipe(model=lambda params: Towers(), loss=in_batch, **{"mode": "max", **given, **options})
    pipe = Pipeline(pairs)
    return Ensemble(
        name="m",
        recipe=recipe,
        members=[{"lr": 0.1}] * 2,
        train=pipe,
        valid=pipe,
        batch_size=16,
        epochs=1,
        resources=Resources(workers=workers),
    )


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.more)])
def test_a_metric_gets_the_fields_it_names_and_the_loss_is_computed_in_training_alone(
    workers: int, tmp_path: Path
) -> None:
    run = ensemble.submit(declare(workers), tmp_path, "inline" if workers == 1 else "local")
    result = run.wait()
    saved = [ensemble.load_predictions(tmp_path, "valid", row["member"]) for row in result.members]
    user = np.meshgrid(np.arange(USERS), np.arange(ITEMS))[0].ravel()
    for row, own in zip(result.members, saved, strict=True):
        assert row["state"] == "finished" and set(row["metrics"]) == {"hit_rate", "mae", "rmse"}
        assert row["metrics"]["hit_rate"] == hit_rate(own.values, own.targets, user[own.index])


def test_a_field_that_no_batch_has_is_named(tmp_path: Path) -> None:
    def recall(values: np.ndarray, target: np.ndarray, users: np.ndarray) -> float:
        return 0.5

    declared = declare(split_metrics=[recall], objective="recall")
    (row, _) = ensemble.submit(declared, tmp_path, "inline").wait().members
    assert "the batch has no field 'users'; did you mean 'user'?" in row["error"]
    assert row["attempts"] == 1


def test_members_are_not_ranked_by_a_loss_that_is_not_computed() -> None:
    with pytest.raises(SpecError, match=r"ranked by 'loss', which a Recipe without metrics= did not report"):
        declare(objective=None, mode=None)
