"""A small search on handwritten digits."""

from __future__ import annotations

import os
from typing import Any

from ensemble import Ensemble, Recipe, Resources, Search, integer, loguniform
from pipelines import Pipeline, sources, stages

SPACE = {"lr": loguniform(1e-3, 1.0), "width": integer(4, 32), "depth": integer(1, 2)}


def model(params: dict[str, Any]) -> Any:
    from torch import nn

    layers: list[nn.Module] = [nn.Flatten()]
    for number in range(params["depth"]):
        layers += [nn.Linear(params["width"] if number else 64, params["width"]), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(params["width"], 10))


def loss(net: Any, batch: Any) -> Any:
    from torch.nn import functional

    return functional.cross_entropy(net(batch["image"]), batch["label"], reduction="none")


def optimizer(net: Any, params: dict[str, Any]) -> Any:
    import torch

    return torch.optim.SGD(net.parameters(), lr=params["lr"], momentum=0.9)


def declared(
    places: int = 1,
    samples: int = 360,
    epochs: int = 3,
    batch_size: int = 60,
    sharing: str = "auto",
    **search: Any,
) -> Ensemble:
    """A search that trains so many trials at a time."""
    import numpy as np
    from sklearn.datasets import load_digits

    digits = load_digits()
    images, labels = (digits.images * 15.9).astype(np.uint8)[:, None], digits.target.astype(np.int64)
    normalize = stages.scale("image", mean=(0.3,), std=(0.37,))
    train = Pipeline(sources.arrays(image=images[:samples], label=labels[:samples]), seed=0)
    valid = Pipeline(sources.arrays(image=images[-200:], label=labels[-200:]))
    return Ensemble(
        name="searched",
        recipe=Recipe(model=model, loss=loss, optimizer=optimizer),
        search=Search(**{"space": SPACE, "seed": 5, **search}),
        train=train.map(stages.random_crop("image", size=8, padding=1)).map(normalize),
        valid=valid.map(normalize),
        epochs=epochs,
        batch_size=batch_size,
        resources=Resources(cpus_per_worker=len(os.sched_getaffinity(0)) / places),
        sharing=sharing,
        gate_timeout_s=300,
        capacity=3 * batch_size,
    )
