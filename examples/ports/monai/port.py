"""plain.py as an ensemble whose members read one pipeline. Needs monai 1.6.1 (PyPI).

ensemble run examples/ports/monai/port.py [--set members=4] [--set epochs=5]
"""

import numpy as np
import torch
from monai.losses import DiceLoss
from monai.metrics import compute_dice
from monai.transforms import Compose, ToNumpyd
from plain import AUGMENT, BATCH, BOTH, SCALE, build, make_volumes

from ensemble import Ensemble, Recipe, seeds
from pipelines import Pipeline, sources

LOSS = DiceLoss(sigmoid=True, reduction="none")


def model(params):
    return build()


def loss(model, batch):
    return LOSS(model(batch["image"]), batch["label"]).flatten()


def predict(model, batch):
    share = model(batch["image"]).sigmoid()
    return torch.stack([1 - share, share], -1)


def metrics(outputs, batch):
    return {"dice": compute_dice(outputs > 0, batch["label"]).flatten()}


def optimizer(model, params):
    return torch.optim.Adam(model.parameters(), lr=3e-2)


def spec(members: int = 4, epochs: int = 5):
    train, valid = (
        Pipeline(sources.arrays(**{name: np.stack([volume[name] for volume in part]) for name in BOTH}), seed=0)
        for part in make_volumes()
    )
    functions = {"model": model, "loss": loss, "optimizer": optimizer, "predict": predict, "metrics": metrics}
    scale = Compose([*SCALE, ToNumpyd(BOTH)])  # arrays, which the cache can keep
    return Ensemble(
        name="monai",
        recipe=Recipe(**functions, task="classification", objective="dice", mode="max"),
        members=seeds(members),
        train=train.map(scale).map(Compose(AUGMENT)),
        valid=valid.map(scale),
        epochs=epochs,
        batch_size=BATCH,
        cache="memory",
    )
