"""A recommender: its loss has a meaning within a training batch alone, its metric needs the users of a split."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kit.finished_runs import of_kind
from torch import Tensor, nn

import ensemble
from ensemble import Ensemble, Recipe, Resources, SpecError
from ensemble.store import RunDir, load_predictions
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
    about = {"name": "m", "recipe": recipe, "members": [{"lr": 0.1}] * 2, "train": pipe, "valid": pipe}
    about |= {"batch_size": 16, "epochs": 1, "resources": Resources(workers=workers)}
    return Ensemble(**about)


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.more)])
def test_a_metric_gets_the_fields_it_names_and_no_loss_is_evaluated(workers: int, tmp_path: Path) -> None:
    run = ensemble.submit(declare(workers), tmp_path, "inline" if workers == 1 else "local")
    result = run.wait()
    saved = [ensemble.load_predictions(tmp_path, "valid", row["member"]) for row in result.members]
    user = np.meshgrid(np.arange(USERS), np.arange(ITEMS))[0].ravel()
    for row, own in zip(result.members, saved, strict=True):
        assert row["state"] == "finished" and set(row["metrics"]) == {"hit_rate", "mae", "rmse"}
        assert row["metrics"]["hit_rate"] == hit_rate(own.values, own.targets, user[own.index])
    both = ensemble.load_predictions(tmp_path, "valid")
    figures, members = result.combined.metrics, [row["metrics"]["hit_rate"] for row in result.members]
    assert figures["ensemble"]["hit_rate"] == hit_rate(both.values, both.targets, user[both.index])
    assert figures["best"]["hit_rate"] in members and figures["mean"]["hit_rate"] == pytest.approx(
        np.mean(members)
    )
    low, high = result.combined.intervals["ensemble"]["hit_rate"]
    assert low < high
    kept = [load_predictions(RunDir(tmp_path).predictions(f"member-{at}"), "valid").fields for at in (0, 1)]
    assert [fields["user"].tolist() for fields in kept] == [user.tolist()] * 2


def name_users(batch: Any) -> dict[str, Any]:
    """Texts and numbers in lists, which are no tensors."""
    name = [f"Zoë {each}" for each in batch["user"].tolist()]
    return {**batch, "name": name, "of": batch["item"].tolist(), "record": [{"name": each} for each in name]}


def test_fields_may_be_texts_and_lists(tmp_path: Path) -> None:
    def named(values: np.ndarray, target: np.ndarray, name: np.ndarray, of: np.ndarray) -> float:
        assert len(name) == len(of) == len(values)
        return hit_rate(values, target, np.array([int(each.removeprefix("Zoë ")) for each in name]))

    declared = declare(split_metrics=[named, hit_rate], objective="named", collate=name_users)
    result = ensemble.submit(declared, tmp_path, "inline").wait()
    for figures in (*(row["metrics"] for row in result.members), *result.combined.metrics.values()):
        assert figures["named"] == figures["hit_rate"]


def judged_by_records(values: np.ndarray, target: np.ndarray, record: np.ndarray) -> float:
    return 0.5


def judged_by_users(values: np.ndarray, target: np.ndarray, users: np.ndarray) -> float:
    return 0.5


@pytest.mark.parametrize(
    ("metric", "says"),
    [
        (judged_by_records, "the field 'record' is a list, no tensor [b, ...], and no numbers or texts"),
        (judged_by_users, "the batch has no field 'users'; did you mean 'user'?"),
    ],
)
def test_a_field_that_no_metric_can_have_is_named_first(tmp_path: Path, metric: Any, says: str) -> None:
    declared = declare(split_metrics=[metric], objective=metric.__name__, collate=name_users)
    (row, _) = ensemble.submit(declared, tmp_path, "inline").wait().members
    assert says in row["error"] and row["attempts"] == 1 and not of_kind(tmp_path, "epoch")


def test_members_are_not_ranked_by_a_loss_that_is_not_computed() -> None:
    with pytest.raises(SpecError, match=r"ranked by 'loss', which a Recipe without metrics= did not report"):
        declare(objective=None, mode=None)
