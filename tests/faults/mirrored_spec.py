"""A run of a few seconds, whose members write a checkpoint at each epoch."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ensemble import Ensemble, Recipe, Resources
from pipelines import Pipeline, sources


def model(params: dict[str, Any]) -> torch.nn.Module:
    width = params["width"]
    return torch.nn.Sequential(torch.nn.Linear(16, width), torch.nn.Dropout(0.2), torch.nn.Linear(width, 3))


def optimizer(model: torch.nn.Module, params: dict[str, Any]) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def loss(model: torch.nn.Module, batch: Any) -> torch.Tensor:
    time.sleep(STEP_S if model.training else 0.0)
    while model.training and batch.epoch >= 2 and WAITS and not Path(WAITS).exists():
        time.sleep(0.05)
    return torch.nn.functional.cross_entropy(model(batch["x"]), batch["label"], reduction="none")


STEP_S = 0.0
WAITS = ""  # a file for which members wait after two epochs


def spec(epochs: int = 4, step_s: float = 0.0, waits: str = "") -> Ensemble:
    global STEP_S, WAITS
    STEP_S, WAITS = step_s, waits
    rng = np.random.default_rng(0)
    x = rng.normal(size=(20_000, 16)).astype(np.float32)  # large enough for a file of its own
    label = (x[:, 0] > 0).astype(np.int64) + (x[:, 1] > 0.5)
    recipe, members = Recipe(model=model, loss=loss, optimizer=optimizer), [{"width": 8}, {"width": 16}]
    train, valid = (Pipeline(sources.arrays(x=x[:n], label=label[:n]), seed=0) for n in (None, 100))
    needs = Resources(cpus_per_worker=0.5, gpus_per_worker=0.0, memory_gb=1.0)
    usual = {"epochs": epochs, "checkpoint_every": 1, "batch_size": 1000, "seed": 0, "resources": needs}
    return Ensemble(name="mirrored", recipe=recipe, members=members, train=train, valid=valid, **usual)
