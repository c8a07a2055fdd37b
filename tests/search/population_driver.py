"""Starts, or resumes, a run with a population in this process: `population_driver.py RUN_DIR EXECUTOR`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

import ensemble
from ensemble import EMA, Recipe, Resources, Search, choice, loguniform
from pipelines import Pipeline, sources

EPOCHS = 6


def build(params: dict[str, Any]) -> Any:
    if params.get("lr", 0) > 0.9:
        raise ValueError("a rate above 0.9")
    width = params.get("width", 8)
    return torch.nn.Sequential(torch.nn.Linear(4, width), torch.nn.Dropout(0.2), torch.nn.Linear(width, 2))


def loss(model: Any, batch: dict[str, Any]) -> Any:
    return torch.nn.functional.cross_entropy(model(batch["x"]), batch["label"], reduction="none")


def declare(space: dict[str, Any] | None = None, **options: Any) -> ensemble.Ensemble:
    """A population that has everything that a state can have: momentum, a schedule, averaged weights, dropout."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(64, 4)).astype("float32")
    made = [Pipeline(sources.arrays(x=part, label=(part @ [1, -2, 3, 1] > 0).astype(int))) for part in (x, -x)]
    given = {name: options.pop(name) for name in ("population", "generations", "inherit") if name in options}
    space = {"lr": loguniform(1e-3, 0.5), "weight_decay": choice(0.0, 0.01, 0.1)} if space is None else space
    declared: dict[str, Any] = {"recipe": Recipe(model=build, loss=loss, optimizer=None, schedule=None)}
    declared |= {"optimizer": {"name": "sgd", "momentum": 0.9}, "schedule": {"name": "cosine", "warmup_epochs": 1}}
    declared |= {"checkpoint_every": 1, "averaging": EMA(0.9)}
    declared |= {"epochs": EPOCHS, "batch_size": 16, "sharing": "independent", "retries": 0}
    declared |= {"resources": Resources(cpus_per_worker=0.5), "objective": "loss", "mode": "min"}
    declared["search"] = Search(space, sampler={"name": "pbt", "population": 4, "generations": 3, **given})
    return ensemble.Ensemble(name="population", train=made[0], valid=made[1], **{**declared, **options})


if __name__ == "__main__":
    path, executor = Path(sys.argv[1]), sys.argv[2]
    run = ensemble.resume(path) if path.exists() else ensemble.submit(declare(), path, executor)
    run.wait()
