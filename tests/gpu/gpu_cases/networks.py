"""What cases train: the studies' networks on made-up samples, and a ResNet-50 (He et al. 2016)."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn

from benchmarks import models
from benchmarks.models import Net
from ensemble.spec import Recipe
from pipelines import Batch, Pipeline, sources, stages

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


class Bottleneck(nn.Module):
    """1 x 1, 3 x 3 and 1 x 1 convolutions beside a shortcut."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        out = 4 * width
        self.body = nn.Sequential(
            nn.Conv2d(channels, width, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, width, 3, stride, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, out, 1, bias=False),
            nn.BatchNorm2d(out),
        )
        self.shortcut: nn.Module = nn.Identity()
        if channels != out or stride != 1:
            self.shortcut = nn.Sequential(nn.Conv2d(channels, out, 1, stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[b, channels, h, w] to [b, 4 width, h / stride, w / stride]."""
        return nn.functional.relu(self.body(x) + self.shortcut(x), inplace=True)


def resnet(params: dict[str, Any]) -> nn.Module:
    """A ResNet with bottlenecks; `params["blocks"]` of [3, 4, 6, 3] and `width` 64 make it ResNet-50."""
    width, channels = params["width"], params["width"]
    made: list[nn.Module] = [nn.Conv2d(3, channels, 7, 2, 3, bias=False), nn.BatchNorm2d(channels)]
    made += [nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)]
    for number, count in enumerate(params["blocks"]):
        for place in range(count):
            stride = 2 if number and place == 0 else 1
            made.append(Bottleneck(channels, width << number, stride))
            channels = 4 * (width << number)
    made += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, params["classes"])]
    return nn.Sequential(*made).to(memory_format=torch.channels_last)  # type: ignore[call-overload]


RESNET = Recipe(model=resnet, loss=models.loss)
