"""One member for each kind of task, trained by one rank or by two."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from kit import train_child
from torch import nn

from ensemble.spec import Ensemble, Recipe
from ensemble.spec.task import IGNORED, quantiles
from ensemble.store import RunDir
from ensemble.train import Inbox, work
from pipelines import Pipeline, sources

Batch = Any


N, WIDE, STEPS, CLASSES, LABELS = 23, 6, 7, 3, 4
Batch = Any


class Case(NamedTuple):
    recipe: Recipe
    target: Callable[[np.ndarray], np.ndarray]
    kind: str = "classification"
    shape: tuple[int, ...] = (CLASSES,)  # of a sample's values
    metrics: str = "accuracy f1_macro"  # beside the loss


class Head(nn.Module):
    """float64 [b, WIDE] -> [b, *shape]; `several` of them in a tuple, the second one positive."""

    def __init__(self, *shape: int, several: bool = False) -> None:
        super().__init__()
        self.shape, self.several = shape, several
        size = int(np.prod(shape)) * (2 if several else 1)
        self.layers = nn.Sequential(nn.Linear(WIDE, 16), nn.Tanh(), nn.Linear(16, size)).double()

    def forward(self, x: torch.Tensor) -> Any:
        parts = [part.reshape(len(x), *self.shape) for part in self.layers(x).chunk(1 + self.several, dim=1)]
        return (parts[0], nn.functional.softplus(parts[1]) + 1e-3) if self.several else parts[0]


def head(*shape: int, several: bool = False) -> Callable[[dict[str, Any]], nn.Module]:
    return lambda params: Head(*shape, several=several)


def cross_entropy(model: nn.Module, batch: Batch) -> torch.Tensor:
    """The mean over the steps or pixels of a sample that take part."""
    losses = nn.functional.cross_entropy(model(batch["x"]), batch["label"], reduction="none")
    if losses.dim() == 1:
        return losses
    known = batch["label"] != IGNORED
    return losses.flatten(1).sum(dim=1) / known.flatten(1).sum(dim=1).clamp_min(1)


def binary(outputs: torch.Tensor, batch: Batch) -> torch.Tensor:
    return nn.functional.binary_cross_entropy_with_logits(outputs, batch["label"].double(), reduction="none")


def one_logit(model: nn.Module, batch: Batch) -> torch.Tensor:
    return binary(model(x=batch["x"]).squeeze(1), batch)


def labels(model: nn.Module, batch: Batch) -> torch.Tensor:
    return binary(model(batch["x"]), batch).mean(dim=1)


def squares(model: nn.Module, batch: Batch) -> torch.Tensor:
    return (model(batch["x"]).squeeze(1) - batch["label"]).square()


def gaussian_nll(model: nn.Module, batch: Batch) -> torch.Tensor:
    mean, variance = model(batch["x"])
    return nn.functional.gaussian_nll_loss(mean.squeeze(1), batch["label"], variance.squeeze(1), reduction="none")


LEVELS = (0.1, 0.5, 0.9)


def pinball(model: nn.Module, batch: Batch) -> torch.Tensor:
    error, levels = batch["label"][:, None] - model(batch["x"]), torch.tensor(LEVELS, dtype=torch.float64)
    return torch.maximum(levels * error, (levels - 1) * error).mean(dim=1)


def scaled(model: nn.Module, batch: Batch) -> torch.Tensor:
    """The arguments are computed: nothing but the loss knows how the model is called."""
    return nn.functional.cross_entropy(model(batch["x"] * 2.0), batch["label"], reduction="none")


def predict(model: nn.Module, batch: Batch) -> torch.Tensor:
    return torch.softmax(model(batch["x"]), dim=1)


def of_three(x: np.ndarray) -> np.ndarray:
    return x[:, :CLASSES].argmax(axis=1)


def total(x: np.ndarray) -> np.ndarray:
    return x.sum(axis=1)


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


def of(model: Any, loss: Any, *split_metrics: Any, **options: Any) -> Recipe:
    return Recipe(model=model, loss=loss, split_metrics=list(split_metrics), **options)


def square_of_outputs(model: nn.Module, batch: Batch) -> torch.Tensor:
    return (model(batch["x"]) ** 2).mean(dim=(1, 2))


ONE_LOGIT = Recipe(model=head(1), loss=one_logit, task="classification", objective="roc_auc")
NUMBER = of(head(1), squares, "r2", task="regression")
NORMAL = of(head(1, several=True), gaussian_nll, "pearson", task="gaussian")
MULTILABEL = of(head(LABELS), labels, "roc_auc_macro", task="multilabel")
ERRORS, OF_LABELS = "mae rmse", "hamming_accuracy subset_accuracy roc_auc_macro"
CASES = {
    "single": Case(of(head(CLASSES), cross_entropy, "f1_macro"), of_three),
    "one logit": Case(ONE_LOGIT, lambda x: (x[:, 0] > 0).astype(np.int64), shape=(2,), metrics="accuracy roc_auc"),
    "multilabel": Case(MULTILABEL, lambda x: (x[:, :LABELS] > 0).astype(np.int64), "multilabel", (4,), OF_LABELS),
    "steps": Case(of(head(CLASSES, STEPS), cross_entropy, "f1_macro"), padded_steps, shape=(7, 3)),
    "pixels": Case(
        of(head(2, 4, 4), cross_entropy, "roc_auc"), pixels, shape=(4, 4, 2), metrics="accuracy roc_auc"
    ),
    "regression": Case(NUMBER, total, "regression", (), f"{ERRORS} r2"),
    "rain": Case(NUMBER, rain, "regression", (), f"{ERRORS} r2"),
    "gaussian": Case(NORMAL, total, "gaussian", (2,), f"{ERRORS} pearson"),
    "quantiles": Case(
        of(head(3), pinball, "medae", task=quantiles(*LEVELS)), total, "quantiles", (3,), f"{ERRORS} medae"
    ),
    "free": Case(of(head(2, 2), square_of_outputs, spread, task="free"), of_three, "free", (2, 2), "spread"),
    "predict": Case(of(head(CLASSES), scaled, "f1_macro", predict=predict), of_three),
    "computed arguments": Case(of(head(CLASSES), scaled, "f1_macro"), of_three),
}


def data(case: Case, n: int = N, seed: int = 0) -> Pipeline:
    x = np.random.default_rng(seed).normal(size=(n, WIDE))
    return Pipeline(sources.arrays(x=x, label=case.target(x)), seed=seed)


def declare(name: str, workers: int = 1, **options: Any) -> Ensemble:
    case = CASES[name]
    usual = {"train": data(case), "valid": data(case, 13, seed=1), "test": data(case, 4, seed=2)}
    return train_child.declare(options.pop("recipe", case.recipe), workers, **{**usual, **options})


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


def train_all(rank: int, folder: Path, names: Any, **options: Any) -> None:
    folder.mkdir(exist_ok=True)
    said: dict[str, Any] = {name: train(name, folder, rank, 2, **options) for name in names}
    (folder / f"{rank}.json").write_text(json.dumps(said))


def train_second(rank: int, folder: Path) -> None:
    train_all(rank, folder, SECOND)


def train_first(rank: int, folder: Path) -> None:
    train_all(rank, folder, [name for name in CASES if name not in SECOND])
    train_all(rank, folder / "tiny", ("steps", "predict"), **TINY)
    recipe = replace(CASES["single"].recipe, split_metrics=[nothing])
    train_all(rank, folder / "failing", ("single",), recipe=recipe)
