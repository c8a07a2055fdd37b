"""plain.py as a search whose trials read one pipeline.

ensemble run examples/ports/towers/port.py [--set members=8] [--set epochs=4]
"""

import torch
from plain import BATCH, RATES, WIDTHS, Towers, make_interactions
from torch.nn import functional as F

from ensemble import Ensemble, Recipe, Search, choice
from pipelines import Pipeline, sources


def model(params):
    return Towers(params["width"])


def loss(model, batch):
    scores = model(batch["user"], batch["item"])
    return F.cross_entropy(scores, torch.arange(len(scores)), reduction="none")


def predict(model, batch):
    return model(batch["user"], batch["item"]).diagonal()[:, None]


def optimizer(model, params):
    return torch.optim.Adam(model.parameters(), lr=params["lr"])


def average(values):
    return values.mean(0)


def spec(members: int = 8, epochs: int = 4):
    train, valid = (sources.arrays(user=user, item=item) for user, item in make_interactions())
    functions = {"model": model, "loss": loss, "optimizer": optimizer, "predict": predict}
    space = {"width": choice(*WIDTHS), "lr": choice(*RATES)}
    return Ensemble(
        name="towers",
        recipe=Recipe(**functions, task="free", target="item", objective="loss"),
        search=Search(space, trials=members, sampler="grid", pruner="none"),
        train=Pipeline(train, seed=0),
        valid=Pipeline(valid),
        combine=average,
        epochs=epochs,
        batch_size=BATCH,
    )
