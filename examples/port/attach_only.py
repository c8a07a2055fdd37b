"""The search of plain.py with its own loop and its own Optuna: a Feeder takes the place of the DataLoaders.

python examples/port/attach_only.py DATA [--trials 8] [--epochs 3] [--samples 6000] [--together 4]
"""

import argparse
import json
import multiprocessing
import tempfile

import optuna
import torch
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from torch import nn
from torch.nn import functional as F

from pipelines import Feeder, Pipeline, attach, resident, sources, stages

MEAN, STD = (0.491, 0.482, 0.447), (0.247, 0.244, 0.262)
BATCH, DEVICE = 128, "cuda" if torch.cuda.is_available() else "cpu"


def make_pipelines(options):
    records = sources.parquet(f"{options.data}/train.parquet", columns=("image", "label")).take(options.samples)
    train, valid = records.split(0.9, seed=0)
    decode, normalize = stages.decode_jpeg("image"), stages.scale("image", mean=MEAN, std=STD)
    crop, flip = stages.random_crop("image", size=32, padding=4), stages.random_flip("image")
    augmented = Pipeline(train).map(decode).map(crop).map(flip).map(normalize)
    return augmented, Pipeline(valid).map(decode).map(normalize)


def build_model(params):
    width, layers = params["width"], []
    for before, after in ((3, width), (width, 2 * width), (2 * width, 4 * width)):
        layers += [nn.Conv2d(before, after, 3, 2, 1, bias=False), nn.BatchNorm2d(after), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4 * width, 10))


def build_optimizer(model, params):
    return torch.optim.SGD(model.parameters(), lr=params["lr"], momentum=0.9, weight_decay=5e-4, nesterov=True)


def propose(trial):
    return {
        "width": trial.suggest_categorical("width", (8, 16)),
        "lr": trial.suggest_float("lr", 1e-2, 1.0, log=True),
    }


def train(trial, options, address):
    torch.manual_seed(trial.number)
    params = propose(trial)
    train_pipe, valid_pipe = make_pipelines(options)
    train_loader = attach(address, train_pipe, BATCH, epochs=options.epochs)
    valid_loader = resident(address, "valid", valid_pipe).loader(2 * BATCH)
    model = build_model(params).to(DEVICE)
    optimizer = build_optimizer(model, params)
    steps = len(train_loader)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=params["lr"], total_steps=steps)
    for epoch, batches in enumerate(train_loader.epochs()):
        model.train()
        for batch in batches:
            batch.to(DEVICE)
            with torch.autocast(DEVICE, torch.bfloat16):
                loss = F.cross_entropy(model(batch["image"]), batch["label"])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
        model.eval()
        right = total = 0
        with torch.no_grad(), torch.autocast(DEVICE, torch.bfloat16):
            for batch in valid_loader:
                right += (model(batch["image"].to(DEVICE)).argmax(1).cpu() == batch["label"]).sum().item()
                total += len(batch["label"])
        trial.report(right / total, epoch)
        if trial.should_prune():
            raise optuna.TrialPruned
    return right / total


def open_study(journal, seed):
    storage = JournalStorage(JournalFileBackend(journal))
    sampler = optuna.samplers.TPESampler(seed=seed, constant_liar=True)
    pruner = optuna.pruners.MedianPruner(n_startup_trials=4)
    return optuna.create_study(
        study_name="port",
        storage=storage,
        sampler=sampler,
        pruner=pruner,
        direction="maximize",
        load_if_exists=True,
    )


def work(journal, number, options, address):
    torch.set_num_threads(1)
    done = optuna.study.MaxTrialsCallback(options.trials, states=None)
    study = open_study(journal, number)
    counts = range(number, options.trials, options.together)
    study.optimize(lambda trial: train(trial, options, address), n_trials=len(counts), callbacks=[done])


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("data")
    parser.add_argument("--out")
    for name, default in (("trials", 8), ("epochs", 3), ("samples", 6000), ("together", 4)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    train_pipe, valid_pipe = make_pipelines(options)
    feeder = Feeder(train_pipe, resident={"valid": valid_pipe}, expect=options.together)
    with tempfile.TemporaryDirectory() as folder, feeder:
        journal = f"{folder}/journal"
        open_study(journal, 0)
        args = [(journal, n, options, feeder.address) for n in range(options.together)]
        workers = [context.Process(target=work, args=each) for each in args]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        study = open_study(journal, 0)
        result = {"best": study.best_value, "params": study.best_params, "trials": len(study.trials)}
    print(json.dumps(result))
    if options.out:
        with open(options.out, "w") as file:
            json.dump(result, file)


if __name__ == "__main__":
    main()
