"""Heads and adapters on one frozen network: what the tests of `Recipe.base` train."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn

from ensemble import Ensemble, Recipe
from pipelines import Pipeline, sources

CLASSES, INPUTS, WIDTH = 3, 8, 64


class Encoder(nn.Module):
    """A frozen network with batch normalization and dropout, and a buffer that is in no state_dict."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(INPUTS, width), nn.Linear(width, width)
        self.norm, self.drop = nn.BatchNorm1d(width), nn.Dropout(0.5)
        self.register_buffer("scale", torch.tensor(2.0), persistent=False)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.drop(torch.relu(self.second(self.norm(torch.relu(self.first(x)))))) * self.scale


def load_base() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(7)
        return Encoder()


class Head(nn.Module):
    def __init__(self, base: nn.Module, rate: float = 0.2) -> None:
        super().__init__()
        self.base, self.drop = base, nn.Dropout(rate)
        self.out = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.drop(self.base(x)))


class Adapter(nn.Module):
    """LoRA: a linear layer of the base, and what a member adds to it."""

    def __init__(self, inner: nn.Linear, rank: int) -> None:
        super().__init__()
        self.inner, self.drop = inner, nn.Dropout(0.1)
        self.down = nn.Linear(inner.in_features, rank, bias=False)
        self.up = nn.Linear(rank, inner.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) + self.up(self.down(self.drop(x)))


def head(params: dict[str, Any], base: nn.Module) -> nn.Module:
    return Head(base)


def adapter(params: dict[str, Any], base: nn.Module) -> nn.Module:
    base.second = Adapter(base.second, 2)
    return Head(base)


def private_head(params: dict[str, Any]) -> nn.Module:
    return head(params, load_base().requires_grad_(False))


def loss(model: Any, batch: Any) -> Any:
    return nn.functional.cross_entropy(model(batch["x"]), batch["label"], reduction="none")


def table(count: int, seed: int) -> Pipeline:
    """Points around the centres of three classes, float32 [8]."""
    rng = np.random.default_rng(seed)
    label = rng.integers(CLASSES, size=count)
    centres = np.random.default_rng(0).normal(size=(CLASSES, INPUTS))
    x = centres[label] + 0.7 * rng.normal(size=(count, INPUTS))
    return Pipeline(sources.arrays(x=x.astype(np.float32), label=label), seed=0)


def make(model: Any = head, base: Any = load_base, **options: Any) -> Ensemble:
    recipe = Recipe(model=model, loss=loss, base=base, task="classification")
    declared = {"members": [{"lr": 0.1}, {"lr": 0.3}], "epochs": 2, "batch_size": 32, "devices": "cpu"}
    return Ensemble(name="base", recipe=recipe, train=table(256, 1), valid=table(64, 2), **(declared | options))
