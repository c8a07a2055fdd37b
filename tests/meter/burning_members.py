"""Members whose steps take a given CPU time."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

import ensemble
from ensemble import Ensemble, Recipe
from pipelines import Pipeline, sources


def model(params: dict[str, Any]) -> Any:
    return torch.nn.Linear(4, 3)


def make_loss(step_s: float) -> Callable[[Any, Any], Any]:
    """A loss that takes `step_s` CPU-seconds more than it needs."""

    def loss(model: Any, batch: Any) -> Any:
        until = time.process_time() + step_s
        while time.process_time() < until:
            pass
        return torch.nn.functional.cross_entropy(model(batch["x"]), batch["label"], reduction="none")

    return loss


def declare(members: int, epochs: int, step_s: float) -> Ensemble:
    data = sources.arrays(x=np.zeros((64, 4), np.float32), label=np.zeros(64, np.int64))
    listed = {"members": [{"lr": 0.1 * (n + 1)} for n in range(members)], "epochs": epochs, "batch_size": 8}
    recipe = Recipe(model=model, loss=make_loss(step_s))
    return Ensemble(name="burning", recipe=recipe, train=Pipeline(data), **listed)  # type: ignore[arg-type]


def train_inline(run_dir: Path) -> None:
    ensemble.submit(declare(members=1, epochs=4, step_s=0.03), run_dir, "inline").wait()
