"""A study in a database, with a first guess: storage_plain.py as a search whose trials share one pipeline.

ensemble run examples/optuna/storage_member.py [--set storage=sqlite:///study.db]
"""

import optuna
import torch
from sklearn.datasets import load_breast_cancer
from sklearn.model_selection import train_test_split
from sklearn.preprocessing import StandardScaler
from torch import nn
from torch.nn import functional as F

from ensemble import Ensemble, Recipe, Search, integer, loguniform
from pipelines import Pipeline, sources


def model(params):
    return nn.Sequential(nn.Linear(30, params["width"]), nn.Tanh(), nn.Linear(params["width"], 2))


def loss(net, batch):
    return F.cross_entropy(net(batch["x"]), batch["label"], reduction="none")


def optimizer(net, params):
    return torch.optim.AdamW(net.parameters(), lr=params["lr"], weight_decay=params["weight_decay"])


def spec(trials: int = 20, epochs: int = 27, storage: str | None = None):
    x, y = load_breast_cancer(return_X_y=True)
    x_train, x_valid, y_train, y_valid = train_test_split(x, y, test_size=0.25, random_state=0, stratify=y)
    scaler = StandardScaler().fit(x_train)
    train, valid = (
        sources.arrays(x=scaler.transform(x).astype("float32"), label=y)
        for x, y in ((x_train, y_train), (x_valid, y_valid))
    )
    return Ensemble(
        name="cancer",
        recipe=Recipe(model=model, loss=loss, optimizer=optimizer, objective="loss", mode="min"),
        search=Search(
            {
                "width": integer(4, 64, log=True),
                "lr": loguniform(1e-4, 1e-1),
                "weight_decay": loguniform(1e-6, 1e-1),
            },
            trials=trials,
            storage=storage,
            sampler=optuna.samplers.TPESampler(multivariate=True, seed=0),
            pruner=optuna.pruners.SuccessiveHalvingPruner(min_resource=3, reduction_factor=3),
            enqueue=[{"width": 16, "lr": 1e-3, "weight_decay": 1e-4}],
        ),
        train=Pipeline(train, seed=0),
        valid=Pipeline(valid),
        epochs=epochs,
        batch_size=32,
    )
