"""The search of plain.py with its own loop and its own Optuna: a Feeder takes the place of the DataLoaders.

python examples/port/attach_only.py DATA [--trials 8] [--epochs 3] [--samples 12000] [--together 4]
"""

import argparse
import itertools
import json
import multiprocessing
from concurrent.futures import ProcessPoolExecutor

import numpy as np
import optuna
import torch
from torch import nn
from torch.nn import functional as F

from pipelines import Feeder, Pipeline, attach, resident, sources, stages

MEAN, STD = (0.491, 0.482, 0.447), (0.247, 0.244, 0.262)
WIDTHS, RATES, BATCH = (8, 16), (0.02, 0.05, 0.1, 0.2), 128
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


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


def train(seed, params, options, address):
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    train_pipe, valid_pipe = make_pipelines(options.data, options.samples)
    train_loader = attach(address, train_pipe, BATCH, epochs=options.epochs)
    valid_loader = resident(address, "valid", valid_pipe).loader(2 * BATCH)
    model = build_model(params).to(DEVICE)
    optimizer = build_optimizer(model, params)
    steps = len(train_loader)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=params["lr"], total_steps=steps)
    for batches in train_loader.epochs():
        model.train()
        for batch in batches:
            batch = batch.to(DEVICE)
            loss = F.cross_entropy(model(batch["image"]), batch["label"])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    model.eval()
    right = total = 0
    with torch.no_grad():
        for batch in valid_loader:
            right += (model(batch["image"].to(DEVICE)).argmax(1).cpu() == batch["label"]).sum().item()
            total += len(batch["label"])
    return right / total


def propose(trial):
    return {"width": trial.suggest_categorical("width", WIDTHS), "lr": trial.suggest_categorical("lr", RATES)}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("data")
    parser.add_argument("--out")
    for name, default in (("trials", 8), ("epochs", 3), ("samples", 12000), ("together", 4)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    study = optuna.create_study(direction="maximize")
    for point in itertools.product(WIDTHS, RATES):  # without these the sampler, TPE, proposes
        study.enqueue_trial(dict(zip(("width", "lr"), point, strict=True)))
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["optuna", "pipelines", "torch"])
    train_pipe, valid_pipe = make_pipelines(options.data, options.samples)
    expect = min(options.together, options.trials)
    with (
        Feeder(train_pipe, resident={"valid": valid_pipe}, expect=expect) as feeder,
        ProcessPoolExecutor(options.together, context) as pool,
    ):
        study.optimize(
            lambda trial: pool.submit(train, trial.number, propose(trial), options, feeder.address).result(),
            n_trials=options.trials,
            n_jobs=options.together,
        )
    trials = [{"params": trial.params, "value": trial.value} for trial in study.trials if trial.value is not None]
    result = {"best": study.best_value, "params": study.best_params, "trials": trials}
    print(json.dumps(result))
    if options.out:
        with open(options.out, "w", encoding="utf-8") as file:
            json.dump(result, file)


if __name__ == "__main__":
    main()
