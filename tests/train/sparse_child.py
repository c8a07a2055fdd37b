"""Members whose model has a sparse embedding, and one rank of them: `python sparse_child.py RANK WORLD FOLDER`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import train_child
from torch import nn

from ensemble.spec import Recipe

WORDS, WIDTH = 40, 4


class Bag(nn.Module):
    """The mean of six words' vectors, and one layer; `tied` compares words with the words' own vectors."""

    def __init__(self, sparse: bool, head: bool = True, tied: bool = False) -> None:
        super().__init__()
        width = WIDTH if head else train_child.CLASSES
        self.words = nn.Embedding(WORDS, width, sparse=sparse, dtype=torch.float64)
        self.head = nn.Linear(width, train_child.CLASSES, dtype=torch.float64) if head else nn.Identity()
        self.tied = tied

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        words = (x.abs() * 5).long().clamp(max=WORDS - 1)
        mean = self.words(words).mean(dim=1)
        return mean @ self.words.weight[: train_child.CLASSES].T if self.tied else self.head(mean)


def bag(params: dict[str, Any]) -> nn.Module:
    return Bag(params["sparse"])


def words_only(params: dict[str, Any]) -> nn.Module:
    return Bag(params["sparse"], head=False)


def tied(params: dict[str, Any]) -> nn.Module:
    return Bag(params["sparse"], tied=True)


def momentum(model: nn.Module, params: dict[str, Any]) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=params["lr"], momentum=0.9)


def sparse_adam(model: nn.Module, params: dict[str, Any]) -> torch.optim.Optimizer:
    return torch.optim.SparseAdam(model.parameters(), lr=params["lr"])


def overflowing(model: nn.Module, batch: Any) -> torch.Tensor:
    """Sample 7 has a finite loss whose fp16-scaled gradient is infinite, at any scale above 1e38."""
    losses = train_child.loss(model, batch)
    huge = (batch["index"] == 7) * model.words.weight[0].sum() * 1e304
    return losses + (huge - huge.detach())


PLAIN = Recipe(model=bag, loss=train_child.loss, clip_norm=0.05)
MOMENTUM = Recipe(model=bag, loss=train_child.loss, optimizer=momentum)
ADAM = Recipe(model=words_only, loss=train_child.loss, optimizer=sparse_adam)
TIED = Recipe(model=tied, loss=train_child.loss)


def case(recipe: Recipe, sparse: bool = True, steps: tuple[int | None, ...] = (None,), **options: Any) -> Any:
    given = {"params": {"sparse": sparse}, "valid": None, "train": train_child.data(23), **options}
    return {"recipe": recipe, **given}, list(steps)


CASES = {
    "dense": case(PLAIN, sparse=False),
    "sparse": case(PLAIN),
    "in 2 parts": case(PLAIN, accumulate=2),
    "scaled": case(PLAIN, precision="bf16", loss_scale=1000.0),
    "dense momentum": case(MOMENTUM, sparse=False),
    "momentum": case(MOMENTUM),
    "mid-momentum": case(MOMENTUM, steps=(7, None)),
    "adam": case(ADAM),
    "mid-adam": case(ADAM, steps=(7, None)),
    "dense tied": case(TIED, sparse=False),
    "tied": case(TIED),
    # of one sample each: a second worker has none of any batch
    "lonely": case(PLAIN, batch_size=1, epochs=1),
    "dense lonely": case(PLAIN, sparse=False, batch_size=1, epochs=1),
    "compressed": case(PLAIN, compression={"name": "qsgd8", "bucket": 32, "min_size": 1000}),
    "overflow": case(
        Recipe(model=bag, loss=overflowing), precision="fp16", loss_scale=65536.0, batch_size=5, epochs=1
    ),
}
train_child.CASES.update(CASES)


def main() -> None:
    rank, world, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    said = {name: train_child.train_case(name, folder, rank, world) for name in CASES}
    (folder / f"{rank}.json").write_text(json.dumps(said))


if __name__ == "__main__":
    main()
