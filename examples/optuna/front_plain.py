"""The Pareto front of accuracy, size and latency by Optuna's NSGA-II: the original of front_member.py.

python examples/optuna/front_plain.py [--trials 40] [--epochs 8]
"""

import argparse
import time

import optuna
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset, random_split


def define_model(trial):
    width = trial.suggest_int("width", 4, 256, log=True)
    layers = [nn.Flatten(), nn.Linear(64, width), nn.ReLU()]
    for _ in range(trial.suggest_int("depth", 0, 3)):
        layers += [nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(width, 10))


def measure_latency(model, image):
    times = []
    for _ in range(50):
        start = time.perf_counter()
        model(image)
        times.append(time.perf_counter() - start)
    return 1e3 * min(times)


def objective(trial, epochs):
    found = load_digits()
    digits = TensorDataset(torch.tensor(found.images / 16, dtype=torch.float32), torch.tensor(found.target))
    parts = random_split(digits, [0.8, 0.2], generator=torch.Generator().manual_seed(0))
    batches, validation = DataLoader(parts[0], 64, shuffle=True), DataLoader(parts[1], 64)
    model = define_model(trial)
    optimizer = torch.optim.AdamW(model.parameters(), lr=trial.suggest_float("lr", 1e-4, 1e-1, log=True))
    for _ in range(epochs):
        for image, label in batches:
            loss = F.cross_entropy(model(image), label)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    with torch.no_grad():
        right = torch.cat([model(image).argmax(1) == label for image, label in validation])
        latency_ms = measure_latency(model, parts[1][0][0][None])
    megabytes = sum(each.numel() * each.element_size() for each in model.parameters()) / 1e6
    return right.float().mean().item(), megabytes, latency_ms


def main(trials, epochs):
    study = optuna.create_study(
        directions=["maximize", "minimize", "minimize"],
        sampler=optuna.samplers.NSGAIISampler(population_size=12, seed=0),
    )
    study.optimize(lambda trial: objective(trial, epochs), n_trials=trials)
    for trial in study.best_trials:
        print("value", *(f"{value:.4g}" for value in trial.values), trial.params)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--trials", type=int, default=40)
    parser.add_argument("--epochs", type=int, default=8)
    main(**vars(parser.parse_args()))
