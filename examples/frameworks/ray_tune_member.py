"""Handwritten digits with ASHA: ray_tune_plain.py as a search whose trials share one pipeline.

ensemble run examples/frameworks/ray_tune_member.py
"""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

from ensemble import Ensemble, Recipe, Search, choice, loguniform
from pipelines import Pipeline, sources

SPACE = {"width": choice(16, 32, 64), "lr": loguniform(1e-3, 1.0)}
FIELDS = ("image", "label")


def build(config):
    width = config["width"]
    return nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))


def predict(model, batch):
    return model(batch["image"]).softmax(1)


def train(member):
    config = member.params
    batches, validation = member.dataloader("train", fields=FIELDS), member.dataloader("valid", fields=FIELDS)
    model = build(config)
    optimizer = torch.optim.SGD(model.parameters(), lr=config["lr"], momentum=0.9)
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


def spec(trials: int = 8, epochs: int = 9):
    found = load_digits()
    digits = sources.arrays(image=(found.images / 16).astype("float32"), label=found.target)
    train_part, valid_part = digits.split(0.8, seed=0)
    return Ensemble(
        name="digits",
        recipe=Recipe(model=build, train=train, predict=predict, objective="accuracy", mode="max"),
        search=Search(SPACE, trials=trials, sampler="random", pruner={"name": "asha", "reduction_factor": 3}),
        train=Pipeline(train_part, seed=0),
        valid=Pipeline(valid_part),
        epochs=epochs,
        batch_size=64,
    )
