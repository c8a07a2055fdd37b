"""A hyperparameter search (TPE and Hyperband) on handwritten digits: pruned trials give their place to new ones.

ensemble run examples/search.py --set trials=30
"""

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from ensemble import Ensemble, Recipe, Resources, Search, choice, integer, loguniform, uniform
from pipelines import Pipeline, sources, stages


def model(params):
    layers, width = [nn.Flatten()], 64
    for _ in range(params["depth"]):
        layers += [nn.Linear(width, params["width"]), nn.ReLU(), nn.Dropout(params["dropout"])]
        width = params["width"]
    return nn.Sequential(*layers, nn.Linear(width, 10))


def loss(net, batch):
    return F.cross_entropy(net(batch["image"]), batch["label"], reduction="none")


def optimizer(net, params):
    return torch.optim.SGD(net.parameters(), lr=params["lr"], momentum=0.9)


def spec(trials: int = 20, epochs: int = 9, concurrent: int = 4, sampler: str = "tpe", pruner: str = "hyperband"):
    from sklearn.datasets import load_digits

    digits = load_digits()
    records = sources.arrays(
        image=(digits.images * 15.9).astype(np.uint8)[:, None], label=digits.target.astype(np.int64)
    )
    train, rest = records.split(0.7, seed=0)
    valid, test = rest.split(0.5, seed=1)
    normalize = stages.scale("image", mean=(0.3,), std=(0.37,))
    return Ensemble(
        name="search",
        recipe=Recipe(model=model, loss=loss, optimizer=optimizer),
        search=Search(
            {
                "width": choice(16, 32, 64, 128),
                "depth": integer(1, 3),
                "dropout": uniform(0.0, 0.4),
                "lr": loguniform(1e-3, 1.0),
            },
            trials=trials,
            sampler=sampler,
            pruner=pruner,
        ),
        train=Pipeline(train, seed=0).map(stages.random_crop("image", size=8, padding=1)).map(normalize),
        valid=Pipeline(valid).map(normalize),
        test=Pipeline(test).map(normalize),
        epochs=epochs,
        batch_size=64,
        resources=Resources(cpus_per_worker=1 / concurrent),
    )
