"""Heads and adapters on one frozen network: what the tests of `Recipe.base` train."""

from __future__ import annotations

import os
import time
from pathlib import Path
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
        self.out = nn.Linear(base.first.out_features, CLASSES)

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


class PrivateHead(Head):
    """A head on a copy of its own, as people write it by hand."""

    def train(self, mode: bool = True) -> nn.Module:
        super().train(mode)
        self.base.eval()
        return self


def private_head(params: dict[str, Any]) -> nn.Module:
    return PrivateHead(load_base().requires_grad_(False))


def loss(model: Any, batch: Any) -> Any:
    return nn.functional.cross_entropy(model(batch["x"]), batch["label"], reduction="none")


def table(count: int, seed: int) -> Pipeline:
    """Points around the centres of three classes, float32 [8]."""
    rng = np.random.default_rng(seed)
    label = rng.integers(CLASSES, size=count)
    centres = np.random.default_rng(0).normal(size=(CLASSES, INPUTS))
    x = centres[label] + 0.7 * rng.normal(size=(count, INPUTS))
    return Pipeline(sources.arrays(x=x.astype(np.float32), label=label), seed=0)


def make(model: Any = head, base: Any = load_base, loss: Any = loss, **options: Any) -> Ensemble:
    recipe = Recipe(model=model, loss=loss, base=base, task="classification")
    declared = {"members": [{"lr": 0.1}, {"lr": 0.3}], "epochs": 2, "batch_size": 32, "devices": "cpu"}
    return Ensemble(name="base", recipe=recipe, train=table(256, 1), valid=table(64, 2), **(declared | options))


class Stateful(Encoder):
    """Keeps more than tensors."""

    def get_extra_state(self) -> Any:
        return {"calls": self.calls}

    def set_extra_state(self, state: Any) -> None:
        self.calls = state["calls"]


def load_stateful() -> nn.Module:
    return Stateful()


def load_scaled() -> nn.Module:
    """As `load_base`, but for the buffer that is in no state_dict."""
    base = load_base()
    base.scale.fill_(3.0)
    return base


def stateful_head(params: dict[str, Any], base: nn.Module) -> nn.Module:
    built = Head(base)
    built.more = Stateful()
    return built


# --- members that write to the base -------------------------------------------------------------------------


def add_in_place(model: Any, batch: Any) -> Any:
    with torch.no_grad():
        model.base.first.weight.add_(1.0)
    return loss(model, batch)


def add_to_data(model: Any, batch: Any) -> Any:
    model.base.first.weight.data += 1.0
    return loss(model, batch)


def normalise_by_batch(model: Any, batch: Any) -> Any:
    model.base.norm.training = True
    return loss(model, batch)


def unfrozen(params: dict[str, Any], base: nn.Module) -> nn.Module:
    base.second.requires_grad_(True)
    return Head(base)


def cast(params: dict[str, Any], base: nn.Module) -> nn.Module:
    return Head(base).double()


# --- memory -------------------------------------------------------------------------------------------------

BASE_BYTES, MEMBERS = 200 * 2**20, 8


class Large(nn.Module):
    """A network of 200 MiB, all of which its forward pass reads."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(BASE_BYTES // 4 // INPUTS, INPUTS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight.mean(dim=0)


def load_large() -> nn.Module:
    return Large()


class Probe(nn.Module):
    def __init__(self, base: nn.Module, folder: str) -> None:
        super().__init__()
        self.base, self.out, self.folder, self.is_measured = base, nn.Linear(INPUTS, CLASSES), Path(folder), False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        outputs = self.out(self.base(x))
        if self.training and not self.is_measured:
            self.is_measured = True
            self.meet("reads")
            (self.folder / f"memory-{os.getpid()}").write_text(Path("/proc/self/smaps").read_text())
            self.meet("measured")
        return outputs

    def meet(self, what: str) -> None:
        """Wait for the other members."""
        (self.folder / f"{what}-{os.getpid()}").touch()
        while len(list(self.folder.glob(f"{what}-*"))) < MEMBERS:
            time.sleep(0.01)


def probe(params: dict[str, Any], base: nn.Module) -> nn.Module:
    return Probe(base, params["folder"])


def plain_probe(params: dict[str, Any], base: nn.Module) -> nn.Module:
    return nn.Sequential(base, nn.Linear(INPUTS, CLASSES))


# --- wide adapters, and a function that notes its calls -----------------------------------------------------


def load_wide() -> nn.Module:
    torch.manual_seed(7)
    return Encoder(512)


def wide_adapter(params: dict[str, Any], base: nn.Module) -> nn.Module:
    base.second = Adapter(base.second, params["rank"])
    return Head(base)


def load_counted() -> nn.Module:
    with open(os.environ["BASE_CALLS"], "a") as file:
        file.write("called\n")
    return load_base()
