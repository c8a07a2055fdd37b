"""The Pareto front of accuracy, size and latency: front_plain.py as a search whose trials share one pipeline.

ensemble run examples/optuna/front_member.py [--set trials=40]
"""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

from ensemble import Ensemble, Recipe, Search, integer, loguniform
from pipelines import Pipeline, sources


def model(params):
    width = params["width"]
    layers = [nn.Flatten(), nn.Linear(64, width), nn.ReLU()]
    for _ in range(params["depth"]):
        layers += [nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(width, 10))


def loss(net, batch):
    return F.cross_entropy(net(batch["image"]), batch["label"], reduction="none")


def optimizer(net, params):
    return torch.optim.AdamW(net.parameters(), lr=params["lr"])


def spec(trials: int = 40, epochs: int = 8):
    found = load_digits()
    digits = sources.arrays(image=(found.images / 16).astype("float32"), label=found.target)
    train, valid = digits.split(0.8, seed=0)
    return Ensemble(
        name="front",
        recipe=Recipe(model=model, loss=loss, optimizer=optimizer),
        search=Search(
            {"width": integer(4, 256, log=True), "depth": integer(0, 3), "lr": loguniform(1e-4, 1e-1)},
            trials=trials,
            sampler="nsga2",
            further_objectives=["model_mb", "latency_ms"],
        ),
        train=Pipeline(train, seed=0),
        valid=Pipeline(valid),
        epochs=epochs,
        batch_size=64,
    )
