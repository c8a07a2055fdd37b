"""A spec whose members take their time until a file `fast` is in the current directory."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ensemble import Ensemble, Recipe, Resources
from pipelines import Pipeline, sources


def model(params: dict[str, Any]) -> Any:
    if params.get("faulty"):
        raise ValueError("this model cannot be built")
    return torch.nn.Linear(4, 3)


def loss(model: Any, batch: Any) -> Any:
    if not Path("fast").exists():
        time.sleep(0.2)
    return torch.nn.functional.cross_entropy(model(batch["x"]), batch["label"], reduction="none")


def samples(count: int) -> Pipeline:
    rng = np.random.default_rng(0)
    x, label = rng.normal(size=(count, 4)).astype(np.float32), rng.integers(0, 3, count)
    return Pipeline(sources.arrays(x=x, label=label), seed=0)


def spec(epochs: int = 2, faulty: bool = False) -> Ensemble:
    members = [{"lr": lr} for lr in (0.1, 0.2, 0.3)] + [{"lr": 0.4, "faulty": faulty}]
    needs = Resources(cpus_per_worker=1.0, gpus_per_worker=0.0, memory_gb=1.0)
    usual = {"train": samples(96), "valid": samples(48), "epochs": epochs, "batch_size": 32, "resources": needs}
    return Ensemble(name="slow", recipe=Recipe(model=model, loss=loss), members=members, **usual)
