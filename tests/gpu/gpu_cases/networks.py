"""What cases train: the studies' networks on made-up samples, and the ResNet-50 of an example."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import models
from benchmarks.models import Net
from ensemble.spec import Recipe
from pipelines import Batch, Pipeline, sources, stages

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "examples"))

from resnet50 import make_resnet

#: Stands for a directory of data sets where only the network's shape depends on it: nothing is read from it.
MADE_UP = "made-up"
_BLURS = 24


def image_pipeline(samples: int, pixels: int, *, blurred: bool = False) -> Pipeline:
    """Images of noise, uint8 [3, pixels, pixels], of another brightness for each class, as float32.

    Args:
        blurred: about a millisecond of work on a CPU for 64 pixels, then cropped and flipped at random.
    """
    rng = np.random.default_rng(0)
    label = rng.integers(0, 10, samples)
    image = rng.integers(0, 128, (samples, 3, pixels, pixels), dtype=np.uint8)
    image += (label * 12).astype(np.uint8)[:, None, None, None]
    made = Pipeline(sources.arrays(image=image, label=label.astype(np.int64)), seed=0)
    if blurred:
        made = made.map(blur, field="image")
        made = made.map(stages.random_crop("image", size=pixels, padding=pixels // 8))
        made = made.map(stages.random_flip("image"))
    return made.map(stages.scale("image", mean=(0.4, 0.4, 0.4), std=(0.2, 0.2, 0.2)))


def blur(image: Any) -> Any:
    """Means over neighbouring rows, again and again: uint8 [c, h, w] to the same."""
    values = image.astype(np.float32)
    for _ in range(_BLURS):
        values = (values + np.roll(values, 1, axis=1) + np.roll(values, -1, axis=1)) / 3
    return values.astype(np.uint8)


def text_pipeline(net: Net, samples: int) -> Pipeline:
    """Texts as ids, int64 [length]; those of class 1 have other words than those of class 0."""
    rng = np.random.default_rng(0)
    label, half = rng.integers(0, 2, samples), net.words // 2
    text = rng.integers(1, half, (samples, net.length)) + half * label[:, None]
    return Pipeline(sources.arrays(text=text.astype(np.int64), label=label.astype(np.int64)), seed=0)


def text_batch(net: Net, size: int, device: str) -> Batch:
    """One batch of texts on the device."""
    loader = text_pipeline(net, size).loader(size, epochs=1)
    return next(iter(loader)).clone().to(device)


def image_batch(size: int, pixels: int, classes: int, device: str) -> Batch:
    """One batch of normally distributed images, float32 with channels last, on the device."""
    generator = torch.Generator().manual_seed(0)
    image = torch.randn(size, 3, pixels, pixels, generator=generator).to(memory_format=torch.channels_last)
    fields = {"image": image, "label": torch.arange(size) % classes, "index": torch.arange(size)}
    return Batch(fields, epoch=0, step=0, global_size=size).to(device)


def resnet(params: dict[str, Any]) -> torch.nn.Module:
    """A ResNet; `params["blocks"]` of [3, 4, 6, 3] and `width` 64 make it ResNet-50."""
    made = make_resnet(params["classes"], params["width"], params["blocks"])
    return made.to(memory_format=torch.channels_last)


RESNET = Recipe(model=resnet, loss=models.loss, task="classification")
