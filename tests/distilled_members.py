"""Runs that are distilled; in a module of its own, so that worker processes can import it."""

from __future__ import annotations

from typing import Any

import numpy as np

from ensemble import Ensemble, Recipe, Resources
from pipelines import Pipeline, sources, stages

USUAL: dict[str, Any] = {"epochs": 4, "combine": "average", "sharing": "independent"}
USUAL["resources"] = Resources(cpus_per_worker=0.2)


def mlp(params: dict[str, Any]) -> Any:
    from torch import nn

    return nn.Sequential(nn.Flatten(), nn.Linear(64, params["width"]), nn.ReLU(), nn.Linear(params["width"], 10))


def tiny(params: dict[str, Any]) -> Any:
    from torch import nn

    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))


def smooth_loss(model: Any, batch: Any) -> Any:
    from torch.nn import functional

    return functional.cross_entropy(model(batch["image"]), batch["label"], reduction="none")


def digits(**options: Any) -> Ensemble:
    from sklearn.datasets import load_digits

    known, normalize = load_digits(), stages.scale("image", mean=(0.3,), std=(0.37,))
    images, labels = (known.images * 15.9).astype(np.uint8)[:, None], known.target.astype(np.int64)

    def split(start: int, stop: int) -> Any:
        return sources.arrays(image=images[start:stop], label=labels[start:stop])

    train = Pipeline(split(0, 600), seed=0).map(stages.random_crop("image", size=8, padding=1)).map(normalize)
    valid, test = (Pipeline(split(*bounds)).map(normalize) for bounds in ((600, 900), (900, 1300)))
    given = {"train": train, "valid": valid, "test": test, "optimizer": {"name": "sgd", "momentum": 0.9}}
    given |= {"members": [{"width": 16 + 4 * n, "lr": 0.1} for n in range(3)], "batch_size": 50}
    return Ensemble(name="digits", recipe=Recipe(model=mlp, loss=smooth_loss), **{**USUAL, **given, **options})


class Heads:
    def __init__(self, kind: str) -> None:
        self.kind = kind

    def __call__(self, params: dict[str, Any]) -> Any:
        import torch
        from torch import nn

        kind, outputs = self.kind, {"regression": 1, "gaussian": 2, "multilabel": 3, "quantiles": 2}[self.kind]

        class Net(nn.Sequential):
            def forward(self, x: torch.Tensor) -> Any:
                found = super().forward(x)
                if kind == "gaussian":
                    return found[:, 0], nn.functional.softplus(found[:, 1]) + 1e-3
                return found.squeeze(1) if kind == "regression" else found

        return Net(nn.Linear(4, params["width"]), nn.Tanh(), nn.Linear(params["width"], outputs))


LOSSES = {"regression": "mse", "gaussian": "gaussian_nll", "multilabel": "binary_cross_entropy"}
LOSSES["quantiles"] = "pinball"


def of_task(kind: str, **options: Any) -> Ensemble:
    from ensemble import quantiles

    rng = np.random.default_rng(0)
    x = rng.normal(size=(400, 4)).astype(np.float32)
    y = (x[:, 0] * x[:, 1] + 0.3 * rng.normal(size=400)).astype(np.float32)
    if kind == "multilabel":
        y = (x[:, :3] + 0.5 * rng.normal(size=(400, 3)) > 0).astype(np.int64)
    task: Any = quantiles(0.1, 0.9) if kind == "quantiles" else kind
    bounds = {"train": slice(240), "valid": slice(240, 320), "test": slice(320, None)}
    pipes = {split: Pipeline(sources.arrays(x=x[at], y=y[at]), seed=0) for split, at in bounds.items()}
    given = {**pipes, "members": [{"width": width, "lr": 0.05} for width in (8, 16, 12)], "batch_size": 40}
    recipe = Recipe(model=Heads(kind), loss=LOSSES[kind], inputs=("x",), target="y", task=task)
    return Ensemble(name=kind, recipe=recipe, **{**USUAL, **given, **options})
