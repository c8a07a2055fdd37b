"""Runs that tests look at: four small classifiers on synthetic data, trained by the inline executor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

import ensemble
from ensemble import Ensemble, Recipe
from pipelines import Pipeline, sources

CLASSES = 4


def build_model(params: dict[str, Any]) -> Any:
    from torch import nn

    return nn.Sequential(nn.Linear(8, params["width"]), nn.ReLU(), nn.Linear(params["width"], CLASSES))


def make_data(n: int = 600) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(n, 8)).astype(np.float32)
    label = (x @ rng.normal(size=(8, CLASSES)) + rng.normal(size=(n, CLASSES))).argmax(axis=1)
    return x, label


def split(begin: int, end: int) -> Pipeline:
    x, label = make_data()
    return Pipeline(sources.arrays(x=x[begin:end], label=label[begin:end]), seed=0)


def declare(**options: Any) -> Ensemble:
    given = {"name": "inspected", "epochs": 2, "checkpoint_every": 1, "batch_size": 32, "optimizer": "sgd"}
    given |= {"train": split(0, 300), "valid": split(300, 400), "test": split(400, 600)}
    given |= {"members": ensemble.seeds(2, {"width": 8, "lr": 0.2}), "energy": ensemble.Energy(measure_idle_s=0)}
    given |= {"recipe": Recipe(model=build_model, loss="cross_entropy")}
    return Ensemble(**given | options)


def train(path: Path, **options: Any) -> Any:
    return ensemble.submit(declare(**options), path, executor="inline").wait()
