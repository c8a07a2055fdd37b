"""The simplest run: two listed linear models on arrays, two epochs."""

from __future__ import annotations

from typing import Any

import numpy as np

from ensemble import Ensemble, Recipe
from pipelines import Pipeline, sources

CLASSES = 3


def table(count: int, seed: int) -> Pipeline:
    """Points around the centres of three classes, float32 [4]."""
    rng = np.random.default_rng(seed)
    label = rng.integers(CLASSES, size=count)
    centres = np.random.default_rng(0).normal(size=(CLASSES, 4))
    x = centres[label] + 0.5 * rng.normal(size=(count, 4))
    return Pipeline(sources.arrays(x=x.astype(np.float32), label=label), seed=0)


def model(params: dict[str, Any]) -> Any:
    import torch

    return torch.nn.Linear(4, CLASSES)


def loss(model: Any, batch: Any) -> Any:
    import torch

    return torch.nn.functional.cross_entropy(model(batch["x"]), batch["label"], reduction="none")


def spec() -> Ensemble:
    return Ensemble(
        name="core",
        recipe=Recipe(model=model, loss=loss, task="classification"),
        members=[{"lr": 0.1}, {"lr": 0.5}],
        train=table(256, 1),
        valid=table(128, 2),
        test=table(128, 3),
        epochs=2,
        batch_size=32,
    )
