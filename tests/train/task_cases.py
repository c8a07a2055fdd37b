"""One member for each kind of task, trained by one rank or by two."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from kit import train_child
from torch import nn

from ensemble.spec import Ensemble, Recipe
from ensemble.spec.task import IGNORED, quantiles
from ensemble.store import RunDir
from ensemble.train import Inbox, work
from pipelines import Pipeline, sources

N, WIDE, STEPS, CLASSES, LABELS = 23, 6, 7, 3, 4
Batch = Any


@dataclass(frozen=True)
class Case:
    recipe: Recipe
    target: Callable[[np.ndarray], np.ndarray]


class Head(nn.Module):
    """float64 [b, WIDE] -> [b, *shape]; `several` of them in a tuple, the second one positive."""

    def __init__(self, *shape: int, several: bool = False) -> None:
        super().__init__()
        self.shape, self.several = shape, several
        size = int(np.prod(shape)) * (2 if several else 1)
        self.layers = nn.Sequential(nn.Linear(WIDE, 16), nn.Tanh(), nn.Linear(16, size)).double()

    def forward(self, x: torch.Tensor) -> Any:
        out = self.layers(x)
        if not self.several:
            return out.reshape(x.shape[0], *self.shape)
        mean, spread = out.chunk(2, dim=1)
        mean, spread = mean.reshape(x.shape[0], *self.shape), spread.reshape(x.shape[0], *self.shape)
        return mean, nn.functional.softplus(spread) + 1e-3


def head(*shape: int, several: bool = False) -> Callable[[dict[str, Any]], nn.Module]:
    return lambda params: Head(*shape, several=several)


def cross_entropy(model: nn.Module, batch: Batch) -> torch.Tensor:
    """The mean over the steps or pixels of a sample that take part."""
    losses = nn.functional.cross_entropy(model(batch["x"]), batch["label"], reduction="none")
    if losses.dim() == 1:
        return losses
    known = batch["label"] != IGNORED
    return losses.flatten(1).sum(dim=1) / known.flatten(1).sum(dim=1).clamp_min(1)


def one_logit(model: nn.Module, batch: Batch) -> torch.Tensor:
    return nn.functional.binary_cross_entropy_with_logits(
        model(x=batch["x"]).squeeze(1), batch["label"].double(), reduction="none"
    )


def labels(model: nn.Module, batch: Batch) -> torch.Tensor:
    return nn.functional.binary_cross_entropy_with_logits(
        model(batch["x"]), batch["label"].double(), reduction="none"
    ).mean(dim=1)


def squares(model: nn.Module, batch: Batch) -> torch.Tensor:
    return (model(batch["x"]).squeeze(1) - batch["label"]).square()


def gaussian_nll(model: nn.Module, batch: Batch) -> torch.Tensor:
    mean, variance = model(batch["x"])
    return nn.functional.gaussian_nll_loss(mean.squeeze(1), batch["label"], variance.squeeze(1), reduction="none")


LEVELS = (0.1, 0.5, 0.9)


def pinball(model: nn.Module, batch: Batch) -> torch.Tensor:
    error = batch["label"][:, None] - model(batch["x"])
    levels = torch.tensor(LEVELS, dtype=torch.float64)
    return torch.maximum(levels * error, (levels - 1) * error).mean(dim=1)


def scaled(model: nn.Module, batch: Batch) -> torch.Tensor:
    """The arguments are computed: nothing but the loss knows how the model is called."""
    return nn.functional.cross_entropy(model(batch["x"] * 2.0), batch["label"], reduction="none")


def predict(model: nn.Module, batch: Batch) -> torch.Tensor:
    return torch.softmax(model(batch["x"]), dim=1)


def of_three(x: np.ndarray) -> np.ndarray:
    return x[:, :CLASSES].argmax(axis=1)


def padded_steps(x: np.ndarray) -> np.ndarray:
    """A class at each step; sample i has 1 + i % STEPS of them, and the others are padding."""
    steps = (x[:, :1] > np.linspace(-1, 1, STEPS)).astype(np.int64) + (x[:, 1:2] > 0)
    steps[np.arange(STEPS) > (np.arange(len(x)) % STEPS)[:, None]] = IGNORED
    return steps


def pixels(x: np.ndarray) -> np.ndarray:
    return (x[:, :4, None] > x[:, None, 2:6]).astype(np.int64)


def rain(x: np.ndarray) -> np.ndarray:
    """Mostly 0: the first ten samples in training are."""
    return np.where(x.sum(axis=1) > 3, x[:, 0] + 2, 0.0)


def spread(values: np.ndarray, target: np.ndarray) -> float:
    """A metric of the user's own, which is no mean over samples."""
    return float(np.ptp(values))


CASES = {
    "single": Case(Recipe(model=head(CLASSES), loss=cross_entropy, split_metrics=["f1_macro"]), of_three),
    "one logit": Case(
        Recipe(model=head(1), loss=one_logit, task="classification", objective="roc_auc"),
        lambda x: (x[:, 0] > 0).astype(np.int64),
    ),
    "multilabel": Case(
        Recipe(model=head(LABELS), loss=labels, task="multilabel", split_metrics=["roc_auc_macro"]),
        lambda x: (x[:, :LABELS] > 0).astype(np.int64),
    ),
    "steps": Case(
        Recipe(model=head(CLASSES, STEPS), loss=cross_entropy, split_metrics=["f1_macro"]), padded_steps
    ),
    "pixels": Case(Recipe(model=head(2, 4, 4), loss=cross_entropy, split_metrics=["roc_auc"]), pixels),
    "regression": Case(
        Recipe(model=head(1), loss=squares, task="regression", split_metrics=["r2"]), lambda x: x.sum(axis=1)
    ),
    "rain": Case(Recipe(model=head(1), loss=squares, task="regression", split_metrics=["r2"]), rain),
    "gaussian": Case(
        Recipe(model=head(1, several=True), loss=gaussian_nll, task="gaussian", split_metrics=["pearson"]),
        lambda x: x.sum(axis=1),
    ),
    "quantiles": Case(
        Recipe(model=head(3), loss=pinball, task=quantiles(*LEVELS), split_metrics=["medae"]),
        lambda x: x.sum(axis=1),
    ),
    "free": Case(
        Recipe(
            model=head(2, 2),
            loss=lambda m, b: (m(b["x"]) ** 2).mean(dim=(1, 2)),
            task="free",
            split_metrics=[spread],
        ),
        of_three,
    ),
    "predict": Case(
        Recipe(model=head(CLASSES), loss=scaled, predict=predict, split_metrics=["f1_macro"]), of_three
    ),
    "computed arguments": Case(Recipe(model=head(CLASSES), loss=scaled, split_metrics=["f1_macro"]), of_three),
}


def data(case: Case, n: int = N, seed: int = 0) -> Pipeline:
    x = np.random.default_rng(seed).normal(size=(n, WIDE))
    return Pipeline(sources.arrays(x=x, label=case.target(x)), seed=seed)


def declare(name: str, workers: int = 1, **options: Any) -> Ensemble:
    case = CASES[name]
    usual = {"train": data(case), "valid": data(case, 13, seed=1), "test": data(case, 4, seed=2)}
    given = {"recipe": case.recipe, **usual, **options}
    return train_child.declare(given.pop("recipe"), workers, **given)


def train(
    name: str, folder: Path, rank: int = 0, world: int = 1, inbox: Inbox | None = None, **options: Any
) -> tuple[str, list[dict[str, Any]]]:
    events: list[dict[str, Any]] = []
    meet = (folder / f"{name}-meet").as_uri() if world > 1 else None
    ensemble = declare(name, world, **options)
    job = train_child.make_job(folder / name, ensemble, rank=rank, rendezvous=meet)
    return work(job, ensemble, events.append, inbox or Inbox()), events


def train_on(
    recipe: Recipe, folder: Path, label: np.ndarray, valid: np.ndarray | None = None, **options: Any
) -> tuple[str, list[dict[str, Any]], str]:
    """Train a recipe on these targets in their order; outcome, events and log."""

    def pipe(target: np.ndarray) -> Pipeline:
        x = np.random.default_rng(0).normal(size=(len(target), WIDE))
        return Pipeline(sources.arrays(x=x, label=target), shuffle=False)

    options = {"train": pipe(label), "valid": pipe(label if valid is None else valid), "test": None, **options}
    outcome, events = train("single", folder, recipe=recipe, **options)
    return outcome, events, RunDir(folder / "single").log("member-0").read_text()


#: Batches of one sample, of which the first of two ranks has none.
TINY: dict[str, Any] = {"batch_size": 1, "epochs": 1}


def nothing(values: np.ndarray, target: np.ndarray) -> float:
    raise ValueError("no such thing")


#: Two workers train these in the second tier: others have a task of the same kind, or of the same shape.
SECOND = ("multilabel", "pixels", "regression", "rain", "predict", "computed arguments")


def train_second(rank: int, folder: Path) -> None:
    said: dict[str, Any] = {name: train(name, folder, rank, 2) for name in SECOND}
    (folder / f"{rank}.json").write_text(json.dumps(said))


def train_first(rank: int, folder: Path) -> None:
    said: dict[str, Any] = {name: train(name, folder, rank, 2) for name in CASES if name not in SECOND}
    (folder / f"{rank}.json").write_text(json.dumps(said))
    (folder / "tiny").mkdir(exist_ok=True)
    said = {name: train(name, folder / "tiny", rank, 2, **TINY) for name in ("steps", "predict")}
    (folder / "tiny" / f"{rank}.json").write_text(json.dumps(said))
    (folder / "failing").mkdir(exist_ok=True)
    recipe = replace(CASES["single"].recipe, split_metrics=[nothing])
    ended = train("single", folder / "failing", rank, 2, recipe=recipe)
    (folder / "failing" / f"{rank}.json").write_text(json.dumps(ended))
