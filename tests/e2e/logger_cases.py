"""A small list of members that is logged everywhere; run as a program it is a driver that may be killed.

python logger_cases.py RUN_DIR start|resume
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any

import ensemble
from ensemble import Ensemble, Recipe, Resources
from pipelines import Pipeline, sources, stages

EPOCHS = 8


def model(params: dict[str, Any]) -> Any:
    from torch import nn

    return nn.Sequential(nn.Flatten(), nn.Linear(64, params["width"]), nn.ReLU(), nn.Linear(params["width"], 10))


def loss(net: Any, batch: Any) -> Any:
    from torch.nn import functional

    if os.path.exists(os.path.join(os.environ["LOGGED_BY"], "hold")):
        time.sleep(0.05)  # so that it can be killed in its midst
    return functional.cross_entropy(net(batch["image"]), batch["label"], reduction="none")


def declared() -> Ensemble:
    """Four members, half of which run at a time."""
    import numpy as np
    from sklearn.datasets import load_digits

    digits = load_digits()
    images, labels = (digits.images * 15.9).astype(np.uint8)[:, None], digits.target.astype(np.int64)
    normalize = stages.scale("image", mean=(0.3,), std=(0.37,))
    train = Pipeline(sources.arrays(image=images[:1200], label=labels[:1200]), seed=0)
    return Ensemble(
        name="logged",
        recipe=Recipe(model=model, loss=loss),
        members=[{"width": width, "lr": 0.1} for width in (8, 16, 24, 32)],
        train=train.map(stages.random_crop("image", size=8, padding=1)).map(normalize),
        valid=Pipeline(sources.arrays(image=images[-200:], label=labels[-200:])).map(normalize),
        epochs=EPOCHS,
        batch_size=16,
        resources=Resources(cpus_per_worker=len(os.sched_getaffinity(0)) / 2, memory_gb=0.5),
        gate_timeout_s=5,
        loggers=["tensorboard", "mlflow", "wandb"],
    )


if __name__ == "__main__":
    if sys.argv[2] == "start":
        ensemble.submit(declared(), sys.argv[1], executor="local").wait()
    else:
        ensemble.resume(sys.argv[1]).wait()
