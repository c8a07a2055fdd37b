"""A k-fold committee: each of k members leaves out another fold of the same stream, and all of them vote.

ensemble run examples/committee.py --set folds=5
"""

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from ensemble import Ensemble, Folds, Recipe
from pipelines import Pipeline, sources


def model(params):
    return nn.Sequential(nn.Linear(30, params["width"]), nn.ReLU(), nn.Linear(params["width"], 2))


def loss(net, batch):
    return F.cross_entropy(net(batch["x"]), batch["label"], reduction="none")


def optimizer(net, params):
    return torch.optim.Adam(net.parameters(), lr=params["lr"], weight_decay=1e-3)


def spec(folds: int = 10, epochs: int = 20):
    from sklearn.datasets import load_breast_cancer

    x, y = load_breast_cancer(return_X_y=True)
    x = ((x - x.mean(axis=0)) / x.std(axis=0)).astype(np.float32)
    train, rest = sources.arrays(x=x, label=y.astype(np.int64)).split(0.6, seed=0)
    valid, test = rest.split(0.5, seed=1)
    return Ensemble(
        name="committee",
        recipe=Recipe(model=model, loss=loss, optimizer=optimizer, split_metrics=("roc_auc",)),
        members=[{"width": 16, "lr": 0.01}] * folds,
        weights=Folds(folds),
        train=Pipeline(train, seed=0),
        valid=Pipeline(valid),
        test=Pipeline(test),
        epochs=epochs,
        batch_size=32,
        combine="average",
    )
