"""Cross-validates three configurations by five folds of one stream; their weights are fitted out of fold.

ensemble run examples/cross_validation.py
"""

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from ensemble import Ensemble, Folds, Recipe, cross_validated
from pipelines import Pipeline, sources


def model(params):
    if not params["width"]:
        return nn.Linear(30, 2)
    return nn.Sequential(nn.Linear(30, params["width"]), nn.ReLU(), nn.Linear(params["width"], 2))


def loss(net, batch):
    return F.cross_entropy(net(batch["x"]), batch["label"], reduction="none")


def optimizer(net, params):
    return torch.optim.AdamW(net.parameters(), lr=params["lr"], weight_decay=0.1)


def spec(folds: int = 5, epochs: int = 20):
    from sklearn.datasets import load_breast_cancer

    x, y = load_breast_cancer(return_X_y=True)
    x = ((x - x.mean(axis=0)) / x.std(axis=0)).astype(np.float32)
    train, test = sources.arrays(x=x, label=y.astype(np.int64)).split(0.8, seed=0, stratify="label")
    configurations = [{"width": 0, "lr": 0.02}, {"width": 16, "lr": 0.01}, {"width": 64, "lr": 0.005}]
    return Ensemble(
        name="cross-validation",
        recipe=Recipe(model=model, loss=loss, optimizer=optimizer),
        members=cross_validated(configurations, Folds(folds, stratify="label")),
        out_of_fold=True,
        train=Pipeline(train, seed=0),
        test=Pipeline(test),
        epochs=epochs,
        batch_size=32,
        combine="weighted",
        objective="loss",
    )
