"""What the members of `test_profiling` are; in a module of its own, so that worker processes can import it."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import numpy as np

from ensemble import Ensemble, Member, Recipe, Resources
from pipelines import Pipeline, sources


def model(params: dict[str, Any]) -> Any:
    from torch import nn

    if params.get("fault") == "build":
        raise ValueError("this model cannot be built")
    width = params["width"]
    made = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Dropout(params.get("drop", 0.1)), nn.Linear(width, 3))
    made.sleep_s, made.fault = params.get("sleep_s", 0.0), params.get("fault")
    if "table" in params:
        import torch

        made.table = nn.Parameter(torch.ones(params["table"]))
    return made


def loss(model: Any, batch: Any) -> Any:
    import torch

    time.sleep(model.sleep_s)
    if model.fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if model.fault == "hang":
        time.sleep(3600)
    batch["x"].mul_(2.0)  # members may write into their batches
    return torch.nn.functional.cross_entropy(model(batch["x"]), batch["label"], reduction="none")


def train(member: Any) -> None:
    """The same as a loop of its own, which would leave traces."""
    import torch

    net = model(member.params)
    net, _ = member.prepare(net, torch.optim.SGD(net.parameters(), lr=member.params["lr"]))
    for _ in member.epochs():
        for batch in member.batches():
            member.backward(loss(net, batch))
            member.step()
        index = []
        with member.evaluating():
            for batch in member.batches("valid"):
                index.append(batch["index"].clone())
        member.report(loss=0.0)
        member.predictions("valid", torch.ones(len(index[0]), 3) / 3, index[0])


def data(n: int, seed: int) -> Pipeline:
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, 64)).astype(np.float32)
    return Pipeline(sources.arrays(x=x, label=rng.integers(0, 3, n)), seed=seed)


def an_ensemble(members: list[Member | dict[str, Any]], recipe: Any = None, **options: Any) -> Ensemble:
    options |= {"recipe": recipe or Recipe(model=model, loss=loss), "train": data(400, 0), "valid": data(100, 1)}
    return Ensemble(name="measured", members=members, batch_size=128, resources=Resources(), **options)
