"""Folds in loops that are not ours: a fold is a choice of rows, so any loop learns from all others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kit.finished_runs import finished_hashes, of_kind, read_state
from torch import nn

import ensemble
from ensemble import Ensemble, Folds, Recipe, Resources, SpecError
from pipelines import Pipeline, sources

N, K, EPOCHS = 60, 3, 2


def volumes() -> Any:
    rng = np.random.default_rng(0)
    image = rng.normal(size=(N, 1, 6, 6)).astype(np.float32)
    return sources.arrays(image=image, label=(image[:, 0] > 0).astype(np.int64))


def net(params: dict[str, Any]) -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 1))


def segment(member: Any) -> None:
    """As nnU-Net writes it: iterations, a backward of its own, one loss a batch, predictions of its own fold."""
    model = net(member.params)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    member.prepare(model, optimizer)
    read: set[int] = set()
    for _ in range(member.identity.epochs):
        model.train()
        for batch in member.dataloader("train"):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(batch["image"]), batch["label"])
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 12)
            optimizer.step()
            read.update(batch["index"].tolist())
        member.report(loss=float(loss.detach()))
    own = [
        (batch, [i for i, sample in enumerate(batch["index"].tolist()) if sample not in read])
        for batch in member.dataloader("valid")
    ]
    with member.evaluating() as kept:
        values = torch.cat([kept(batch["image"][i]).softmax(1).movedim(1, -1) for batch, i in own if i])
    index = torch.cat([batch["index"][i] for batch, i in own if i])
    member.predictions("valid", values, index)


def declare(train: Any = segment, declared: bool = True, **options: Any) -> Ensemble:
    pipe = Pipeline(volumes(), seed=0)
    usual: dict[str, Any] = {"members": [{}] * K, "weights": Folds(K), "out_of_fold": declared, "train": pipe}
    usual |= {"valid": pipe, "epochs": EPOCHS, "batch_size": 2}  # some batches have no row
    usual |= {
        "recipe": Recipe(model=net, train=train, objective="loss"),
        "resources": Resources(cpus_per_worker=0.1),
    }
    return Ensemble(name="folds", **{**usual, **options})


@pytest.mark.parametrize("declared", [True, pytest.param(False, marks=pytest.mark.more)])
def test_a_loop_with_a_backward_of_its_own_cross_validates(tmp_path: Path, declared: bool) -> None:
    """Its members are combined out of fold, also where they know their fold by themselves."""
    ensemble.submit(declare(declared=declared), tmp_path / "shared", executor="local").wait()
    state = read_state(tmp_path / "shared")
    assert state.combined is not None and state.combined.out_of_fold, state.combined
    found = ensemble.load_predictions(tmp_path / "shared", "valid")
    assert np.array_equal(found.index, np.arange(N)) and found.values.shape == (N, 6, 6, 2)
    assert (found.values.argmax(-1) == found.targets).mean() > 0.8
    epochs = of_kind(tmp_path / "shared", "epoch")
    assert sum(event["samples"] for event in epochs) == EPOCHS * N * (K - 1)
    ensemble.submit(declare(declared=declared, sharing="independent"), tmp_path / "alone", "inline").wait()
    assert finished_hashes(tmp_path / "shared") == finished_hashes(tmp_path / "alone")


def test_an_error_that_no_member_escapes_ends_the_run_before_they_start(tmp_path: Path) -> None:
    declared = declare(weights="bootstrap", out_of_fold=False, resources=Resources())
    with pytest.raises(SpecError, match="weights=: has no effect on a loop over member"):
        ensemble.submit(declared, tmp_path / "run", executor="local").wait()
    assert not of_kind(tmp_path / "run", "launched")
