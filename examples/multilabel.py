"""Several labels a sample: what holds of a handwritten digit (even, prime, with a loop, above four).

ensemble run examples/multilabel.py
"""

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from ensemble import Ensemble, Recipe
from pipelines import Pipeline, sources, stages

LABELS = {"even": (0, 2, 4, 6, 8), "prime": (2, 3, 5, 7), "loop": (0, 6, 8, 9), "above four": (5, 6, 7, 8, 9)}


def model(params):
    width = params["width"]
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, width), nn.ReLU(), nn.Dropout(0.2), nn.Linear(width, len(LABELS))
    )


def loss(net, batch):
    labels = batch["labels"].float()
    return F.binary_cross_entropy_with_logits(net(batch["image"]), labels, reduction="none").mean(dim=1)


def optimizer(net, params):
    return torch.optim.Adam(net.parameters(), lr=params["lr"])


def spec(epochs: int = 12):
    from sklearn.datasets import load_digits

    digits = load_digits()
    labels = np.stack([np.isin(digits.target, of) for of in LABELS.values()], axis=1).astype(np.int64)
    records = sources.arrays(image=(digits.images * 15.9).astype(np.uint8)[:, None], labels=labels)
    train, rest = records.split(0.7, seed=0)
    valid, test = rest.split(0.5, seed=1)
    normalize = stages.scale("image", mean=(0.3,), std=(0.37,))
    return Ensemble(
        name="multilabel",
        recipe=Recipe(
            model=model,
            loss=loss,
            optimizer=optimizer,
            target="labels",
            task="multilabel",
            split_metrics=("f1_macro", "average_precision"),
            objective="f1_macro",
        ),
        members=[{"width": width, "lr": lr} for width in (32, 64) for lr in (0.003, 0.01)],
        train=Pipeline(train, seed=0).map(stages.random_crop("image", size=8, padding=1)).map(normalize),
        valid=Pipeline(valid).map(normalize),
        test=Pipeline(test).map(normalize),
        epochs=epochs,
        batch_size=64,
    )
