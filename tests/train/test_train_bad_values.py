"""Values that no training can use: what is said names the field and the sample, and nothing is tried again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kit import loop_cases
from kit.loop_cases import of, train
from torch import nn

from ensemble import Recipe, Task
from ensemble.store import RunDir
from pipelines import Pipeline, sources

X = np.random.default_rng(0).normal(size=(23, 4)).astype(np.float32)
LABELS = (X[:, :3] > 0).astype(np.int64)
NUMBERS = X.sum(axis=1)


def linear(params: Any) -> nn.Module:
    return nn.Linear(4, 3)


def one_number(params: Any) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 1), nn.Flatten(0))


MULTILABEL = Recipe(model=linear, loss="binary_cross_entropy", target="y", inputs=("x",), task=Task("multilabel"))


def test_labels_of_another_kind_in_other_splits_fail_no_member(tmp_path: Path) -> None:
    classes = np.arange(23) % 5  # by their number
    late = LABELS.copy()
    late[20] = 7
    for name, labels in {"classes": classes, "late": late}.items():
        outcome, events = train(
            tmp_path / name,
            MULTILABEL,
            train=Pipeline(sources.arrays(x=X, y=LABELS)),
            valid=None,
            test=Pipeline(sources.arrays(x=X, y=labels)),
            optimizer="sgd",
        )
        assert outcome == "finished", of(events, "failed")
        run = RunDir(tmp_path / name)
        assert "no predictions on 'test' are saved: multilabel: " in run.log("member-0").read_text()
    assert "has the label 7: labels are 0, 1, or shares between" in run.log("member-0").read_text()


@pytest.mark.parametrize("batch_size", [16, 64])
def test_a_soft_label_drops_the_figures_of_labels_whatever_its_batch(tmp_path: Path, batch_size: int) -> None:
    x = np.random.default_rng(0).normal(size=(64, 4)).astype(np.float32)
    labels = (x[:, :3] > 0).astype(np.float32)
    soft = labels.copy()
    soft[40, 1] = 0.5

    def metrics(outputs: Any, batch: Any) -> dict[str, Any]:
        return {"mine": outputs.sum(dim=1)}

    recipe = replace(MULTILABEL, metrics=metrics, objective="loss")
    outcome, events = train(
        tmp_path,
        recipe,
        train=Pipeline(sources.arrays(x=x, y=labels)),
        valid=Pipeline(sources.arrays(x=x, y=soft)),
        optimizer="sgd",
        batch_size=batch_size,
    )
    assert outcome == "finished", of(events, "failed")
    assert all(set(event["metrics"]) == {"loss", "mine"} for event in of(events, "epoch"))
    log = RunDir(tmp_path).log("member-0").read_text()
    assert log.count("no figures of the predictions on 'valid': multilabel: the target has fractions") == 1


def test_targets_without_the_metric_that_ranks_are_refused_at_the_first_step(tmp_path: Path) -> None:
    def metrics(outputs: Any, batch: Any) -> dict[str, Any]:
        return {"f1": outputs.sum(dim=1)}

    soft = np.where(LABELS == 1, 0.7, 0.3).astype(np.float32)
    recipe = replace(MULTILABEL, metrics=metrics, objective="f1")
    data = Pipeline(sources.arrays(x=X, y=soft))
    outcome, events = train(tmp_path, recipe, train=data, valid=data, optimizer="sgd")
    failed = loop_cases.failed(outcome, events)
    assert "f1: multilabel: the target has fractions" in failed["error"] and not of(events, "epoch")
    assert "needs another name than 'f1': rank by that name, with mode=" in failed["error"]
    assert (
        RunDir(tmp_path).log("member-0").read_text().count("no figures of the predictions") == 0
    )  # no evaluation
    renamed = replace(
        recipe, metrics=lambda outputs, batch: {"mine": outputs.sum(dim=1)}, objective="mine", mode="max"
    )
    outcome, events = train(tmp_path / "renamed", renamed, train=data, valid=data, optimizer="sgd")
    assert outcome == "finished" and "mine" in of(events, "epoch")[0]["metrics"]


def test_a_figure_that_gives_way_to_a_metric_of_the_whole_split_is_remarked(tmp_path: Path) -> None:
    def metrics(outputs: Any, batch: Any) -> dict[str, Any]:
        return {"mse": 100 * (outputs - batch["y"]) ** 2, "other": outputs}

    recipe = Recipe(model=one_number, loss="mse", target="y", inputs=("x",), metrics=metrics, objective="mse")
    data = Pipeline(sources.arrays(x=X, y=NUMBERS))
    outcome, events = train(tmp_path, recipe, train=data, valid=data, optimizer="sgd")
    assert outcome == "finished"
    figures = of(events, "epoch")[-1]["metrics"]
    assert figures["mse"] == pytest.approx(figures["rmse"] ** 2)
    (remark,) = [event["text"] for event in of(events, "remark") if "Recipe.metrics" in event["text"]]
    assert remark.startswith("the figure 'mse' of Recipe.metrics is not used: a metric of the whole split")
