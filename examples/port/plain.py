"""A plain search: PyTorch and Optuna, a process for each of several trials at a time, a DataLoader in each.

python examples/port/plain.py DATA [--trials 8] [--epochs 3] [--samples 6000] [--together 4]
"""

import argparse
import io
import json
import multiprocessing
import tempfile

import numpy as np
import optuna
import pyarrow.parquet as pq
import torch
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from PIL import Image
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

MEAN, STD = (0.491, 0.482, 0.447), (0.247, 0.244, 0.262)
BATCH, DEVICE = 128, "cuda" if torch.cuda.is_available() else "cpu"


class Photographs(Dataset):
    """Images of a Parquet file, decoded, in training also cropped and flipped."""

    def __init__(self, table, training):
        self.images = table["image"].combine_chunks().field("bytes")
        self.labels = table["label"].to_numpy()
        self.training = training
        self.mean, self.std = (np.float32(x).reshape(3, 1, 1) for x in (MEAN, STD))

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, i):
        image = np.asarray(Image.open(io.BytesIO(self.images[i].as_py()))).transpose(2, 0, 1)
        if self.training:
            padded = np.pad(image, ((0, 0), (4, 4), (4, 4)))
            top, left, turn = torch.randint(9, ()).item(), torch.randint(9, ()).item(), torch.rand(()).item() < 0.5
            image = padded[:, top : top + 32, left : left + 32][:, :, :: -1 if turn else 1]
        return (image / np.float32(255) - self.mean) / self.std, self.labels[i]


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


def make_loaders(options):
    table = pq.read_table(f"{options.data}/train.parquet", columns=["image", "label"])[: options.samples]
    cut = int(0.9 * len(table))
    keep = {"num_workers": 1, "persistent_workers": True, "pin_memory": DEVICE == "cuda"}
    train = DataLoader(Photographs(table[:cut], True), BATCH, shuffle=True, **keep)
    valid = DataLoader(Photographs(table[cut:], False), 2 * BATCH, **keep)
    return train, valid


def train(trial, options):
    torch.manual_seed(trial.number)
    params = propose(trial)
    train_loader, valid_loader = make_loaders(options)
    model = build_model(params).to(DEVICE)
    optimizer = build_optimizer(model, params)
    steps = options.epochs * len(train_loader)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=params["lr"], total_steps=steps)
    for epoch in range(options.epochs):
        model.train()
        for image, label in train_loader:
            with torch.autocast(DEVICE, torch.bfloat16):
                loss = F.cross_entropy(model(image.to(DEVICE)), label.to(DEVICE))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
        model.eval()
        right = total = 0
        with torch.no_grad(), torch.autocast(DEVICE, torch.bfloat16):
            for image, label in valid_loader:
                right += (model(image.to(DEVICE)).argmax(1).cpu() == label).sum().item()
                total += len(label)
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


def work(journal, number, options):
    torch.set_num_threads(1)
    done = optuna.study.MaxTrialsCallback(options.trials, states=None)
    study = open_study(journal, number)
    counts = range(number, options.trials, options.together)
    study.optimize(lambda trial: train(trial, options), n_trials=len(counts), callbacks=[done])


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("data")
    parser.add_argument("--out")
    for name, default in (("trials", 8), ("epochs", 3), ("samples", 6000), ("together", 4)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        journal = f"{folder}/journal"
        open_study(journal, 0)
        workers = [context.Process(target=work, args=(journal, n, options)) for n in range(options.together)]
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
