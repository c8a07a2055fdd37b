"""Runs that are distilled; in a module of its own, so that worker processes can import it."""

from __future__ import annotations

from typing import Any

import numpy as np

from ensemble import Ensemble, Recipe, Resources
from pipelines import Pipeline, sources, stages


def mlp(params: dict[str, Any]) -> Any:
    from torch import nn

    return nn.Sequential(nn.Flatten(), nn.Linear(64, params["width"]), nn.ReLU(), nn.Linear(params["width"], 10))


def tiny(params: dict[str, Any]) -> Any:
    from torch import nn

    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))


def smooth_loss(model: Any, batch: Any) -> Any:
    from torch.nn import functional

    return functional.cross_entropy(model(batch["image"]), batch["label"], reduction="none")


def digits(epochs: int = 4, **options: Any) -> Ensemble:
    from sklearn.datasets import load_digits

    known = load_digits()
    images, labels = (known.images * 15.9).astype(np.uint8)[:, None], known.target.astype(np.int64)
    normalize = stages.scale("image", mean=(0.3,), std=(0.37,))

    def split(start: int, stop: int, seed: int | None = None) -> Pipeline:
        chosen = sources.arrays(image=images[start:stop], label=labels[start:stop])
        made = Pipeline(chosen, seed=seed) if seed is not None else Pipeline(chosen)
        if seed is not None:
            made = made.map(stages.random_crop("image", size=8, padding=1))
        return made.map(normalize)

    given: dict[str, Any] = {
        "recipe": Recipe(model=mlp, loss=smooth_loss),
        "members": [{"width": 16 + 4 * n, "lr": 0.1} for n in range(3)],
        "train": split(0, 600, seed=0),
        "valid": split(600, 900),
        "test": split(900, 1300),
        "epochs": epochs,
        "batch_size": 50,
        "optimizer": {"name": "sgd", "momentum": 0.9},
        "combine": "average",
        "sharing": "independent",
        "resources": Resources(cpus_per_worker=0.2),
    }
    return Ensemble(name="digits", **{**given, **options})


class Heads:
    """`x` to the outputs of a task."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def __call__(self, params: dict[str, Any]) -> Any:
        import torch

        kind = self.kind

        class Net(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                outputs = {"regression": 1, "gaussian": 2, "multilabel": 3, "quantiles": 2}[kind]
                self.layers = torch.nn.Sequential(
                    torch.nn.Linear(4, params["width"]), torch.nn.Tanh(), torch.nn.Linear(params["width"], outputs)
                )

            def forward(self, x: torch.Tensor) -> Any:
                found = self.layers(x)
                if kind == "gaussian":
                    return found[:, 0], torch.nn.functional.softplus(found[:, 1]) + 1e-3
                return found.squeeze(1) if kind == "regression" else found

        return Net()


LOSSES = {
    "regression": "mse",
    "gaussian": "gaussian_nll",
    "multilabel": "binary_cross_entropy",
    "quantiles": "pinball",
}


def of_task(kind: str, **options: Any) -> Ensemble:
    from ensemble import quantiles

    rng = np.random.default_rng(0)
    x = rng.normal(size=(400, 4)).astype(np.float32)
    y = (x[:, 0] * x[:, 1] + 0.3 * rng.normal(size=400)).astype(np.float32)
    if kind == "multilabel":
        y = (x[:, :3] + 0.5 * rng.normal(size=(400, 3)) > 0).astype(np.int64)
    task: Any = quantiles(0.1, 0.9) if kind == "quantiles" else kind
    given: dict[str, Any] = {
        "recipe": Recipe(model=Heads(kind), loss=LOSSES[kind], inputs=("x",), target="y", task=task),
        "members": [{"width": 8, "lr": 0.05}, {"width": 16, "lr": 0.05}, {"width": 12, "lr": 0.05}],
        "train": Pipeline(sources.arrays(x=x[:240], y=y[:240]), seed=0),
        "valid": Pipeline(sources.arrays(x=x[240:320], y=y[240:320])),
        "test": Pipeline(sources.arrays(x=x[320:], y=y[320:])),
        "epochs": 4,
        "batch_size": 40,
        "combine": "average",
        "sharing": "independent",
        "resources": Resources(cpus_per_worker=0.2),
    }
    return Ensemble(name=kind, **{**given, **options})
