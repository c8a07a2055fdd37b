"""Layers, widths and the optimizer of a network by Optuna, with a pruner: the original of pruning_member.py.

python examples/optuna/pruning_plain.py [--trials 20] [--epochs 8]
"""

import argparse

import optuna
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset, random_split


def define_model(trial):
    layers, width = [nn.Flatten()], 64
    for i in range(trial.suggest_int("n_layers", 1, 3)):
        units = trial.suggest_int(f"n_units_l{i}", 8, 128)
        layers += [nn.Linear(width, units), nn.ReLU(), nn.Dropout(trial.suggest_float(f"dropout_l{i}", 0.0, 0.5))]
        width = units
    return nn.Sequential(*layers, nn.Linear(width, 10))


def objective(trial, epochs):
    found = load_digits()
    digits = TensorDataset(torch.tensor(found.images / 16, dtype=torch.float32), torch.tensor(found.target))
    parts = random_split(digits, [0.8, 0.2], generator=torch.Generator().manual_seed(0))
    batches, validation = DataLoader(parts[0], 64, shuffle=True), DataLoader(parts[1], 64)
    model = define_model(trial)
    name = trial.suggest_categorical("optimizer", ["Adam", "RMSprop", "SGD"])
    lr = trial.suggest_float("lr", 1e-5, 1e-1, log=True)
    optimizer = getattr(torch.optim, name)(model.parameters(), lr=lr)
    for epoch in range(epochs):
        model.train()
        for image, label in batches:
            loss = F.cross_entropy(model(image), label)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            right = torch.cat([model(image).argmax(1) == label for image, label in validation])
        accuracy = right.float().mean().item()
        trial.report(accuracy, epoch)
        if trial.should_prune():
            raise optuna.TrialPruned
    return accuracy


def main(trials, epochs):
    study = optuna.create_study(
        direction="maximize", sampler=optuna.samplers.TPESampler(seed=0), pruner=optuna.pruners.MedianPruner()
    )
    study.optimize(lambda trial: objective(trial, epochs), n_trials=trials, timeout=600)
    print(f"value {study.best_value:.4f} {study.best_params}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--epochs", type=int, default=8)
    main(**vars(parser.parse_args()))
