"""A plain search: PyTorch and Optuna, a process for each of several trials at a time, a DataLoader in each.

python examples/port/plain.py DATA [--trials 8] [--epochs 3] [--samples 12000] [--together 4]
"""

import argparse
import functools
import itertools
import json
import multiprocessing
from concurrent.futures import ProcessPoolExecutor

import numpy as np
import optuna
import pyarrow.dataset
import simplejpeg
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

MEAN, STD = (0.491, 0.482, 0.447), (0.247, 0.244, 0.262)
WIDTHS, RATES, BATCH = (8, 16), (0.02, 0.05, 0.1, 0.2), 128
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Photographs(Dataset):
    """Images of a table as uint8 [3, 32, 32], decoded when they are read, in training also cropped and flipped."""

    def __init__(self, table, training):
        self.images = table["image"].combine_chunks().field("bytes")
        self.labels = table["label"].to_numpy()
        self.training = training

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, i):
        image = simplejpeg.decode_jpeg(self.images[i].as_py())
        if self.training:
            padded = np.zeros((40, 40, 3), np.uint8)
            padded[4:36, 4:36] = image
            top, left = torch.randint(9, (2,)).tolist()
            image = padded[top : top + 32, left : left + 32][:, :: 1 if torch.rand(()) < 0.5 else -1]
        return np.ascontiguousarray(image.transpose(2, 0, 1)), self.labels[i]


@functools.cache  # the trials of a process share them, and their worker
def make_loaders(data, samples):
    table = pyarrow.dataset.dataset(f"{data}/train.parquet").head(samples, columns=["image", "label"])
    cut = round(0.9 * len(table))
    keep = {"num_workers": 1, "persistent_workers": True, "prefetch_factor": 4, "pin_memory": DEVICE == "cuda"}
    train = DataLoader(Photographs(table[:cut], training=True), BATCH, shuffle=True, **keep)
    valid = DataLoader(Photographs(table[cut:], training=False), 2 * BATCH)
    return train, list(valid)  # the validation data are decoded once


def normalize(images):
    mean, std = (255 * torch.tensor(x, device=DEVICE).view(3, 1, 1) for x in (MEAN, STD))
    return images.to(DEVICE, torch.float32).sub_(mean).div_(std)


def build_model(params):
    width, layers = params["width"], []
    for before, after in ((3, width), (width, 2 * width), (2 * width, 4 * width)):
        layers += [nn.Conv2d(before, after, 3, 2, 1, bias=False), nn.BatchNorm2d(after), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4 * width, 10))


def build_optimizer(model, params):
    return torch.optim.SGD(model.parameters(), lr=params["lr"], momentum=0.9, weight_decay=5e-4, nesterov=True)


def train(seed, params, options):
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    train_loader, valid_batches = make_loaders(options.data, options.samples)
    model = build_model(params).to(DEVICE)
    optimizer = build_optimizer(model, params)
    steps = options.epochs * len(train_loader)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=params["lr"], total_steps=steps)
    for _ in range(options.epochs):
        model.train()
        for image, label in train_loader:
            loss = F.cross_entropy(model(normalize(image)), label.to(DEVICE))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    model.eval()
    right = total = 0
    with torch.no_grad():
        for image, label in valid_batches:
            right += (model(normalize(image)).argmax(1).cpu() == label).sum().item()
            total += len(label)
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
    context.set_forkserver_preload(["optuna", "pyarrow.dataset", "torch"])
    with ProcessPoolExecutor(options.together, context) as pool:
        study.optimize(
            lambda trial: pool.submit(train, trial.number, propose(trial), options).result(),
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
