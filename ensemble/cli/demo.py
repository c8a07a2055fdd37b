"""The spec of `ensemble demo`: eight small networks on the handwritten digits of scikit-learn, with noise.

They differ in width, depth and learning rate; two are data-parallel over two workers, except on a machine with one
GPU. They train in bf16, or in fp32 where that is faster, and read one pipeline.
"""

from __future__ import annotations

import importlib.util
import os
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ensemble.meter.devices import list_gpus
from ensemble.spec import Ensemble, Member, Recipe, Resources
from pipelines import Pipeline, sources, stages
from pipelines.environment.processor import has_fast_bf16

if TYPE_CHECKING:
    import torch
    from torch import nn

GRAIN, FRESH_GRAIN = 80.0, 20.0  # standard deviations, of 255: in the records, and added in each epoch
WIDE = (
    {"width": 48, "depth": 2, "lr": 0.02},
    {"width": 32, "depth": 3, "lr": 0.015},
)
NARROW = (
    {"width": 16, "depth": 1, "lr": 0.04},
    {"width": 32, "depth": 1, "lr": 0.03},
    {"width": 16, "depth": 2, "lr": 0.03},
    {"width": 24, "depth": 2, "lr": 0.02},
    {"width": 16, "depth": 3, "lr": 0.02},
    {"width": 24, "depth": 3, "lr": 0.01},
)


def load_digits() -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Images, float64 [1797, 8, 8] of 0 to 16, and labels, int64 [1797], of scikit-learn's digits.

    Read from its file: importing scikit-learn takes longer than the demo's first epoch.
    """
    package = importlib.util.find_spec("sklearn")
    assert package is not None and package.submodule_search_locations
    file = Path(package.submodule_search_locations[0], "datasets", "data", "digits.csv.gz")
    rows = np.loadtxt(file, delimiter=",")
    return rows[:, :-1].reshape(-1, 8, 8), rows[:, -1].astype(np.int64)


def noise(sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    """Add new noise in each epoch."""
    image = sample["image"] + rng.normal(0.0, FRESH_GRAIN, sample["image"].shape)
    return {**sample, "image": np.clip(image, 0, 255).astype(np.uint8)}


def model(params: dict[str, Any]) -> nn.Module:
    """A small convolutional network for 8 x 8 pixels."""
    from torch import nn

    width, channels = params["width"], 1
    layers: list[nn.Module] = []
    for _ in range(params["depth"]):
        layers += [nn.Conv2d(channels, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU()]
        channels = width
    return nn.Sequential(*layers, nn.MaxPool2d(2), nn.Flatten(), nn.Linear(16 * width, 10))


def loss(net: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Cross-entropy of each sample."""
    from torch.nn import functional

    return functional.cross_entropy(net(batch["image"]), batch["label"], reduction="none")


def optimizer(net: nn.Module, params: dict[str, Any]) -> torch.optim.Optimizer:
    """SGD with momentum."""
    import torch

    return torch.optim.SGD(net.parameters(), lr=params["lr"], momentum=0.9, weight_decay=1e-4)


def schedule(opt: torch.optim.Optimizer, params: dict[str, Any], steps: int) -> Any:
    """Cosine decay to 0."""
    import torch

    return torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=steps)


def spec(epochs: int = 12, batch_size: int = 64, precision: str = "auto", sharing: str = "auto") -> Ensemble:
    has_cuda = "+cpu" not in metadata.version("torch") and os.environ.get("CUDA_VISIBLE_DEVICES") != ""
    gpus = {gpu.parent for gpu in list_gpus()} if has_cuda else set()
    if precision == "auto":
        precision = "bf16" if gpus or has_fast_bf16() else "fp32"
    wide = 1 if len(gpus) == 1 else 2
    images, label = load_digits()
    grain = np.random.default_rng(0).normal(0.0, GRAIN, images.shape)
    pixels = np.clip(images / 16 * 255 + grain, 0, 255).astype(np.uint8)[:, None]
    records = sources.arrays(image=pixels, label=label)
    train, held_out = records.split(0.6, seed=0)
    valid, test = held_out.split(0.5, seed=1)
    normalize = stages.scale("image", mean=(0.3,), std=(0.37,))
    still = [Pipeline(source).map(normalize) for source in (valid, test)]
    return Ensemble(
        name="demo",
        recipe=Recipe(model=model, loss=loss, optimizer=optimizer, schedule=schedule),
        members=[Member(params, workers=wide) for params in WIDE] + [Member(params) for params in NARROW],
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
