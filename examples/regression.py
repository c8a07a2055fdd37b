"""Regression with uncertainty: five networks that predict a mean and a variance, on scikit-learn's diabetes data.

ensemble run examples/regression.py
"""

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from ensemble import Ensemble, Recipe
from pipelines import Pipeline, sources


class MeanAndVariance(nn.Module):
    """Two layers, and a head for each moment."""

    def __init__(self, width: int):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(10, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
        self.mean, self.spread = nn.Linear(width, 1), nn.Linear(width, 1)

    def forward(self, x):
        hidden = self.body(x)
        return self.mean(hidden)[:, 0], F.softplus(self.spread(hidden)[:, 0]) + 1e-3


def model(params):
    return MeanAndVariance(params["width"])


def loss(net, batch):
    mean, variance = net(batch["x"])
    return F.gaussian_nll_loss(mean, batch["progression"], variance, full=True, reduction="none")


def optimizer(net, params):
    return torch.optim.Adam(net.parameters(), lr=params["lr"], weight_decay=1e-3)


def spec(members: int = 5, epochs: int = 30):
    from sklearn.datasets import load_diabetes

    x, y = load_diabetes(return_X_y=True)
    x = (x / x.std(axis=0)).astype(np.float32)
    y = ((y - y.mean()) / y.std()).astype(np.float32)
    train, rest = sources.arrays(x=x, progression=y).split(0.6, seed=0)
    valid, test = rest.split(0.5, seed=1)
    return Ensemble(
        name="regression",
        recipe=Recipe(
            model=model, loss=loss, optimizer=optimizer, target="progression", task="gaussian", objective="loss"
        ),
        members=[{"width": 32, "lr": 0.003}] * members,
        train=Pipeline(train, seed=0),
        valid=Pipeline(valid),
        test=Pipeline(test),
        epochs=epochs,
        batch_size=32,
        weights="bootstrap",
    )
