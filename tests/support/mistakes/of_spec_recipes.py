"""Mistakes in recipes and searches: functions, losses, tasks, objectives, metrics, spaces."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import torch
from kit.mistakes import Mistake
from torch import nn, optim
from torch.nn import functional

from ensemble import Recipe, Search, Task, choice, loguniform, quantiles
from ensemble.combine.split_metrics import compute
from ensemble.spec.losses import NamedLoss
from ensemble.spec.task import CLASSIFICATION
from mistakes.of_spec import RECIPE, calls, declare, declare_loop, refused

LR = loguniform(0.001, 1)
PROBABILITIES, CLASSES = np.full((200, 2), 0.5), np.zeros(200, np.int64)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)


def seeded(*shape: int) -> Any:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def search(space: Any) -> Any:
    return declare_loop(
        members=None, search=Search(space if callable(space) else {"lr": loguniform(0.1, 0.2), **space})
    )


def measure(returned: Any) -> Any:
    def own(values: np.ndarray, target: np.ndarray) -> Any:
        if returned is KeyError:
            raise KeyError("no such thing")
        return returned

    return compute([own], PROBABILITIES, CLASSES, CLASSIFICATION)


ROWS: list[Mistake] = [
    *refused(
        "a recipe",
        lambda **given: Recipe(model=len, **given),
        ({"loss": "crossentropy"}, "did you mean 'cross_entropy'"),
        ({"loss": len, "label_smoothing": 0.1}, "label_smoothing is for a loss that is given by its name"),
        ({"loss": len, "inputs": ("x",)}, "inputs is for a loss that is given by its name"),
        ({"loss": "mse", "label_smoothing": 0.1}, "label_smoothing is for loss='cross_entropy', not for 'mse'"),
        ({"loss": "cross_entropy", "label_smoothing": 1.0}, "label_smoothing must be below 1"),
        ({"loss": "pinball"}, "needs the quantiles: task=quantiles(0.1, 0.5, 0.9)"),
        ({"loss": "mse", "task": "classification"}, "is for the task 'regression', not for 'classification'"),
        ({}, "Recipe needs loss=, or train= with a training loop of its own"),
        ({"train": len, "optimizer": len}, "optimizer is for the built-in training loop"),
        ({"train": 3}, "Recipe.train must be a function, got 3"),
    ),
    *refused(
        "functions of a recipe",
        lambda **given: Recipe(**{"model": lambda params: Net(), "loss": "mse", **given}),
        ({"model": Net()}, "model=lambda params: Net(...), which builds a new one for each member"),
        ({"model": nn.Linear(2, 2)}, "model=lambda params: Linear("),
        ({"model": lambda: Net()}, "Recipe.model is called as model(params), which", "too many positional"),
        ({"model": Net}, "called as model(params)"),
        (
            {"loss": nn.CrossEntropyLoss()},
            "write loss='cross_entropy', or lambda ",
            "CrossEntropyLoss(..., reduction",
        ),
        ({"loss": nn.CrossEntropyLoss}, "write loss='cross_entropy'"),
        (
            {"loss": functional.mse_loss},
            "write loss='mse', or ",
            "mse_loss(model(batch['x']), ",
            "reduction='none'",
        ),
        ({"loss": nn.KLDivLoss()}, "write loss=lambda model, batch: KLDivLoss(..., reduction='none')(model"),
        ({"loss": lambda batch: batch}, "called as loss(model, batch)"),
        ({"optimizer": optim.Adam}, "torch.optim.Adam(model.parameters(), lr=params['lr'])"),
        ({"optimizer": optim.SGD(Net().parameters(), lr=0.1)}, "torch.optim.SGD(model.parameters"),
        ({"schedule": optim.lr_scheduler.OneCycleLR}, "lr_scheduler.OneCycleLR(optimizer, ...)"),
        ({"metrics": lambda outputs: {}}, "called as metrics(outputs, batch)"),
    ),
    *refused(
        "a train function", declare, ({"recipe": lambda: None}, "Ensemble.recipe is called as train(member)")
    ),
    *refused(
        "an objective",
        declare,
        ({"mode": "min"}, "mode='min' ranks the worst member first: 'accuracy' is better where it is higher"),
        ({"objective": "val_loss", "mode": "max"}, "where it is lower; ", "such as 'val_loss_to_maximize'"),
        ({"recipe": replace(RECIPE, mode="min")}, "'accuracy' is better where it is higher"),
        ({"objective": 3}, "objective must be the name of a metric, got 3"),
        ({"mode": "big"}, "mode cannot be 'big'"),
    ),
    *refused(
        "an objective of a recipe",
        lambda **given: replace(RECIPE, **given),
        ({"objective": 3}, "objective must be the name of a metric, got 3"),
        ({"mode": "big"}, "mode cannot be 'big'"),
    ),
    *refused(
        "metrics of a split",
        lambda **given: replace(RECIPE, **given),
        ({"split_metrics": ["roc_au"]}, "did you mean 'roc_auc'"),
        ({"split_metrics": ["roc_auc"], "task": "regression"}, "'roc_auc' has no meaning for regression; known"),
        ({"split_metrics": ["r2"], "task": "free"}, "'r2' has no meaning for free; give functions"),
        ({"split_metrics": [3]}, "3 is neither a name nor a function"),
        ({"split_metrics": ["f1", "f1"]}, "two metrics are called 'f1'"),
    ),
    *refused(
        "a function of a split",
        measure,
        (np.ones(2), "must return a number, got an array of shape [2]"),
        (None, "must return a number, got a NoneType"),
        ("0.5", "must return a number, got a str"),
        (KeyError, "split_metrics: 'own' failed for values [200, 2]: KeyError"),
        arguments=1,
    ),
    *refused(
        "a task",
        lambda task: replace(RECIPE, task=task),
        ("gausian", "did you mean 'gaussian'"),
        ("quantiles", "need their levels"),
        (7, "must be one of"),
        arguments=1,
    ),
    *calls("levels", (lambda: Task("gaussian", (0.5,)), "only for them")),
    *refused(
        "levels",
        lambda levels: quantiles(*levels),
        ({"levels": ()}, "are given for quantiles"),
        *(({"levels": levels}, "must ascend between 0 and 1") for levels in ((0.5, 0.1), (0.0, 0.5), (0.5, 0.5))),
    ),
    *refused(
        "a search",
        search,
        ({"batch_size": choice(8, "many")}, "an integer, got 'many'", "'batch_size' sets that option"),
        ({"optimizer": choice("sgd", "adamm")}, "cannot be 'adamm'; did you mean 'adam'"),
        ({"weights": choice("imagenet", "random")}, "weights ", "give one of yours another name"),
        ({"clip_norm": choice(1.0, -1.0)}, "Recipe.clip_norm must be above 0"),
        ({"label_smoothing": choice(0.0, 0.1)}, "label_smoothing is for a loss that is given by its name"),
        ({"optimizer": choice("sgd", "adam"), "momentum": choice(0.9, 1.5)}, "momentum", " must be below 1"),
        (lambda trial: {"lr": 0.1, "batch_size": trial.suggest_float("b", 1, 9)}, "batch_size must be an integer"),
        arguments=1,
        also="Search.space: ",
    ),
    *refused(
        "a space",
        lambda given: Search({"x": given, "y": choice(1, 2)}),
        ({"values": [1, 2]}, "give choice(...)"),
        ({"grid_search": [1, 2]}, "give choice(...)"),
        ({"min": 1, "max": 8}, "give choice(...), uniform(low, high)"),
        ({"distribution": "log_uniform", "min": -9, "max": -1}, "give choice(...), uniform(low, high)"),
        ({"value": 3}, "give choice(...)"),
        ({"lr": LR}, "spaces are not nested"),
        (choice({"lr": LR}, {"lr": 1}), "spaces are not nested"),
        ([1, 2], "choice(1, 2) tries each of them"),
        (np.arange(2), "choice(0, 1) tries each of them"),
        (range(1, 9, 2), "choice(1, 3, 5, 7) tries each of them"),
        (Fraction(1, 2), "give choice(...)"),
        arguments=1,
        also="Search.space['x']",
    ),
    *refused(
        "a loss by its name",
        lambda name, *given: NamedLoss(name, "y", levels=(0.1, 0.9)).compute(*given, training=False),
        ("cross_entropy", seeded(4, 3, 3), torch.zeros(4, 3, dtype=torch.int64), "either axis 1 or the last"),
        ("cross_entropy", seeded(4, 3), torch.zeros(4, 5, dtype=torch.int64), "they do not fit"),
        ("mse", seeded(4, 3), seeded(4), "mse: outputs of shape [4, 3] for a target of shape [4]"),
        ("gaussian_nll", seeded(4), seeded(4), "the model returns (mean, variance)"),
        ("pinball", seeded(4, 3), seeded(4), "and 2 quantiles: they are the last axis"),
        ("mse", [1.0], seeded(4), "the model returned list"),
        ("cross_entropy", seeded(4, 3), seeded(4), "the target is float32, and classes are integers"),
        arguments=3,
    ),
]
