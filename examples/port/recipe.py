"""The search of plain.py as a Recipe and a Search: the loop is the built-in one.

python examples/port/recipe.py DATA [--trials 8] [--epochs 3] [--samples 12000] [--together 4]
"""

import argparse
import json
import os
import tempfile

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

import ensemble
from ensemble import Ensemble, Recipe, Resources, Search, choice
from pipelines import Pipeline, sources, stages

MEAN, STD = (0.491, 0.482, 0.447), (0.247, 0.244, 0.262)
WIDTHS, RATES, BATCH = (8, 16), (0.02, 0.05, 0.1, 0.2), 128


def make_pipelines(data, samples):
    records = sources.parquet(f"{data}/train.parquet", columns=("image", "label")).take(samples)
    train, valid = records.split(0.9, by=np.arange(samples))
    decode, normalize = stages.decode_jpeg("image"), stages.scale("image", mean=MEAN, std=STD)
    crop, flip = stages.random_crop("image", size=32, padding=4), stages.random_flip("image")
    return Pipeline(train).map(decode).map(crop).map(flip).map(normalize), Pipeline(valid).map(decode).map(
        normalize
    )


def build_model(params):
    width, layers = params["width"], []
    for before, after in ((3, width), (width, 2 * width), (2 * width, 4 * width)):
        layers += [nn.Conv2d(before, after, 3, 2, 1, bias=False), nn.BatchNorm2d(after), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4 * width, 10))


def build_optimizer(model, params):
    return torch.optim.SGD(model.parameters(), lr=params["lr"], momentum=0.9, weight_decay=5e-4, nesterov=True)


def loss(model, batch):
    return F.cross_entropy(model(batch["image"]), batch["label"], reduction="none")


def build_schedule(optimizer, params, steps):
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=params["lr"], total_steps=steps)


RECIPE = Recipe(model=build_model, loss=loss, optimizer=build_optimizer, schedule=build_schedule)


def declare(options):
    train_pipe, valid_pipe = make_pipelines(options.data, options.samples)
    cores = len(os.sched_getaffinity(0))
    return Ensemble(
        name="port",
        recipe=RECIPE,
        search=Search(
            {"width": choice(*WIDTHS), "lr": choice(*RATES)}, trials=options.trials, sampler="grid", pruner="none"
        ),
        train=train_pipe,
        valid=valid_pipe,
        epochs=options.epochs,
        batch_size=BATCH,
        resources=Resources(  # declared, so that nothing is measured first
            cpus_per_worker=cores / options.together, gpus_per_worker=1 / options.together, memory_gb=2
        ),
    )


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("data")
    parser.add_argument("--out")
    for name, default in (("trials", 8), ("epochs", 3), ("samples", 12000), ("together", 4)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:  # else the run stays, to be looked at and loaded
        found = ensemble.submit(declare(options), run_dir=f"{folder}/run", executor="local").wait()
    trials = [{"params": row.params, "value": row.accuracy} for row in found.members]
    result = {"best": found.best.accuracy, "params": found.best.params, "trials": trials}
    print(json.dumps(result))
    if options.out:
        with open(options.out, "w", encoding="utf-8") as file:
            json.dump(result, file)


if __name__ == "__main__":
    main()
