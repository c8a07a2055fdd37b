"""What `ensemble demo` trains: eight small networks on the handwritten digits that scikit-learn ships.

The digits are made hard to read, as by a poor scanner. Half of the members are convolutional, half are not;
widths, depths and learning rates differ, two are data-parallel over two workers, all are trained in bf16 and
read one pipeline of shifted and grainy digits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ensemble.spec import Ensemble, Member, Recipe, Resources
from pipelines import Pipeline, sources, stages

if TYPE_CHECKING:
    import torch
    from torch import nn

GRAIN, FRESH_GRAIN = 60.0, 20.0  # standard deviations, of 255: in the records, and anew in each epoch
WIDE = (
    {"kind": "conv", "width": 48, "depth": 2, "lr": 0.05},
    {"kind": "dense", "width": 256, "depth": 2, "lr": 0.05},
)
NARROW = (
    {"kind": "conv", "width": 16, "depth": 1, "lr": 0.1},
    {"kind": "conv", "width": 24, "depth": 2, "lr": 0.1},
    {"kind": "conv", "width": 32, "depth": 2, "lr": 0.02},
    {"kind": "dense", "width": 64, "depth": 1, "lr": 0.1},
    {"kind": "dense", "width": 128, "depth": 2, "lr": 0.1},
    {"kind": "dense", "width": 128, "depth": 3, "lr": 0.05},
)


def noise(sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    """A little fresh grain for each epoch."""
    image = sample["image"] + rng.normal(0.0, FRESH_GRAIN, sample["image"].shape)
    return {**sample, "image": np.clip(image, 0, 255).astype(np.uint8)}


def model(params: dict[str, Any]) -> nn.Module:
    """A small convolutional or fully connected network for 8 x 8 pixels."""
    from torch import nn

    width, features = params["width"], 64
    layers: list[nn.Module] = []
    if params["kind"] == "dense":
        layers.append(nn.Flatten())
        for _ in range(params["depth"]):
            layers += [nn.Linear(features, width), nn.ReLU(), nn.Dropout(0.1)]
            features = width
    else:
        channels = 1
        for _ in range(params["depth"]):
            layers += [nn.Conv2d(channels, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU()]
            channels = width
        layers += [nn.MaxPool2d(2), nn.Flatten()]
        features = 16 * width
    return nn.Sequential(*layers, nn.Linear(features, 10))


def loss(net: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Cross-entropy of each sample."""
    from torch.nn import functional

    return functional.cross_entropy(net(batch["image"]), batch["label"], reduction="none")


def optimizer(net: nn.Module, params: dict[str, Any]) -> torch.optim.Optimizer:
    """SGD with momentum."""
    import torch

    return torch.optim.SGD(net.parameters(), lr=params["lr"], momentum=0.9, weight_decay=1e-4)


def spec(epochs: int = 10, batch_size: int = 64, precision: str = "bf16", sharing: str = "auto") -> Ensemble:
    """The demo as an `Ensemble`."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    grain = np.random.default_rng(0).normal(0.0, GRAIN, digits.images.shape)
    pixels = np.clip(digits.images / 16 * 255 + grain, 0, 255).astype(np.uint8)[:, None]
    records = sources.arrays(image=pixels, label=digits.target.astype(np.int64))
    train, rest = records.split(0.6, seed=0)
    valid, test = rest.split(0.5, seed=1)
    normalize = stages.scale("image", mean=(0.3,), std=(0.37,))
    still = [Pipeline(source).map(normalize) for source in (valid, test)]
    return Ensemble(
        name="demo",
        recipe=Recipe(model=model, loss=loss, optimizer=optimizer),
        members=[Member(params, workers=2) for params in WIDE] + [Member(params) for params in NARROW],
        train=Pipeline(train, seed=0)
        .map(stages.random_crop("image", size=8, padding=1))
        .map(noise)
        .map(normalize),
        valid=still[0],
        test=still[1],
        epochs=epochs,
        batch_size=batch_size,
        precision=precision,  # type: ignore[arg-type]
        sharing=sharing,
        resources=Resources(cpus_per_worker=0.125, gpus_per_worker=0.1),
    )
