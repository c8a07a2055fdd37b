"""plain.py as a search whose trials read one pipeline. Needs tabm 0.0.3 (PyPI).

ensemble run examples/ports/tabm/port.py [--set members=12] [--set epochs=1]
"""

import torch
from plain import BATCH, BLOCKS, CLASSES, RATES, SIZES, make_table
from tabm import TabM
from torch.nn import functional as F

from ensemble import Ensemble, Recipe, Search, choice
from pipelines import Pipeline, sources


def model(params):
    sizes = {"d_block": params["size"], "n_blocks": params["blocks"]}
    return TabM.make(n_num_features=10, cat_cardinalities=CLASSES, d_out=1, **sizes)


def loss(model, batch):
    outputs = model(batch["number"], batch["kind"]).squeeze(-1)  # [b, k], one for each of its MLPs
    return F.mse_loss(outputs, batch["target"][:, None].expand_as(outputs), reduction="none").mean(1)


def predict(model, batch):
    return model(batch["number"], batch["kind"]).squeeze(-1).mean(1)


def optimizer(model, params):
    return torch.optim.AdamW(model.parameters(), lr=params["lr"], weight_decay=3e-4)


def spec(members: int = 12, epochs: int = 1):
    train, valid = (sources.arrays(number=x, kind=c, target=y) for x, c, y in make_table())
    functions = {"model": model, "loss": loss, "optimizer": optimizer, "predict": predict}
    space = {"size": choice(*SIZES), "blocks": choice(*BLOCKS), "lr": choice(*RATES)}
    return Ensemble(
        name="tabm",
        recipe=Recipe(**functions, task="regression", target="target", objective="rmse"),
        search=Search(space, trials=members, sampler="grid", pruner="none"),
        train=Pipeline(train, seed=0),
        valid=Pipeline(valid),
        epochs=epochs,
        batch_size=BATCH,
    )
