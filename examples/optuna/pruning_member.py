"""Layers, widths and the optimizer of a network: pruning_plain.py as a search whose trials share one pipeline.

ensemble run examples/optuna/pruning_member.py
"""

import optuna
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

from ensemble import Ensemble, Recipe, Search
from pipelines import Pipeline, sources

FIELDS = ("image", "label")


def space(trial):
    for i in range(trial.suggest_int("n_layers", 1, 3)):
        trial.suggest_int(f"n_units_l{i}", 8, 128)
        trial.suggest_float(f"dropout_l{i}", 0.0, 0.5)
    trial.suggest_categorical("optimizer", ["Adam", "RMSprop", "SGD"])
    trial.suggest_float("lr", 1e-5, 1e-1, log=True)


def define_model(params):
    layers, width = [nn.Flatten()], 64
    for i in range(params["n_layers"]):
        units = params[f"n_units_l{i}"]
        layers += [nn.Linear(width, units), nn.ReLU(), nn.Dropout(params[f"dropout_l{i}"])]
        width = units
    return nn.Sequential(*layers, nn.Linear(width, 10))


def predict(model, batch):
    return model(batch["image"]).softmax(1)


def train(member):
    params = member.params
    batches, validation = member.dataloader("train", fields=FIELDS), member.dataloader("valid", fields=FIELDS)
    model = define_model(params)
    optimizer = getattr(torch.optim, params["optimizer"])(model.parameters(), lr=params["lr"])
    model, optimizer = member.prepare(model, optimizer)
    for _ in range(member.identity.epochs):
        model.train()
        for image, label in batches:
            loss = F.cross_entropy(model(image), label)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            right = torch.cat([model(image).argmax(1) == label for image, label in validation])
        member.report(accuracy=right.float().mean().item())
    member.predict_all()


def spec(trials: int = 20, epochs: int = 8):
    found = load_digits()
    digits = sources.arrays(image=(found.images / 16).astype("float32"), label=found.target)
    train_part, valid_part = digits.split(0.8, seed=0)
    return Ensemble(
        name="pruning",
        recipe=Recipe(model=define_model, train=train, predict=predict, objective="accuracy", mode="max"),
        search=Search(
            space,
            trials=trials,
            budget={"hours": 1 / 6},
            sampler=optuna.samplers.TPESampler(seed=0),
            pruner=optuna.pruners.MedianPruner(),
        ),
        train=Pipeline(train_part, seed=0),
        valid=Pipeline(valid_part),
        epochs=epochs,
        batch_size=64,
    )
