"""A study in a database that goes on when it is called again, with a first guess: see storage_member.py.

python examples/optuna/storage_plain.py [--trials 20] [--epochs 27] [--storage sqlite:///study.db]
"""

import argparse

import optuna
import torch
from sklearn.datasets import load_breast_cancer
from sklearn.model_selection import train_test_split
from sklearn.preprocessing import StandardScaler
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset


def objective(trial, epochs):
    x, y = load_breast_cancer(return_X_y=True)
    x_train, x_valid, y_train, y_valid = train_test_split(x, y, test_size=0.25, random_state=0, stratify=y)
    scaler = StandardScaler().fit(x_train)
    x_train, x_valid = (torch.tensor(scaler.transform(each), dtype=torch.float32) for each in (x_train, x_valid))
    batches = DataLoader(TensorDataset(x_train, torch.tensor(y_train)), 32, shuffle=True)
    width = trial.suggest_int("width", 4, 64, log=True)
    model = nn.Sequential(nn.Linear(30, width), nn.Tanh(), nn.Linear(width, 2))
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=trial.suggest_float("lr", 1e-4, 1e-1, log=True),
        weight_decay=trial.suggest_float("weight_decay", 1e-6, 1e-1, log=True),
    )
    for epoch in range(epochs):
        for x, y in batches:
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        with torch.no_grad():
            loss = F.cross_entropy(model(x_valid), torch.tensor(y_valid)).item()
        trial.report(loss, epoch)
        if trial.should_prune():
            raise optuna.TrialPruned
    return loss


def main(trials, epochs, storage):
    study = optuna.create_study(
        study_name="cancer",
        storage=storage,
        load_if_exists=True,
        sampler=optuna.samplers.TPESampler(multivariate=True, seed=0),
        pruner=optuna.pruners.SuccessiveHalvingPruner(min_resource=3, reduction_factor=3),
    )
    study.enqueue_trial({"width": 16, "lr": 1e-3, "weight_decay": 1e-4}, skip_if_exists=True)
    study.optimize(lambda trial: objective(trial, epochs), n_trials=trials)
    print(f"value {study.best_value:.4f} {study.best_params}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--epochs", type=int, default=27)
    parser.add_argument("--storage", default="sqlite:///study.db")
    main(**vars(parser.parse_args()))
