"""Two towers: users and items get vectors whose product ranks items, a search over width and rate. Plain torch.

The form is that of the tutorials of torch (https://docs.pytorch.org/tutorials/, torch 2.13) and Optuna 5.0.

python examples/ports/towers/plain.py [--members 8] [--epochs 4]
"""

import argparse
import itertools
import json
from concurrent.futures import ProcessPoolExecutor

import numpy as np
import optuna
import torch
from torch import nn
from torch.nn import functional as F

USERS, ITEMS, BATCH = 5000, 2000, 256
WIDTHS, RATES = (32, 64), (3e-4, 1e-3, 3e-3, 1e-2)


def make_interactions():
    """Twenty items for each user, drawn by the product of hidden vectors; every tenth row validates."""
    rng = np.random.default_rng(0)
    likes = rng.normal(size=(USERS, 8)) @ rng.normal(size=(8, ITEMS))
    item = np.argpartition(-(likes + rng.gumbel(size=likes.shape)), 20, axis=1)[:, :20].reshape(-1)
    user = np.repeat(np.arange(USERS), 20)
    valid = rng.permutation(len(user)) % 10 == 0
    return (user[~valid], item[~valid]), (user[valid], item[valid])


class Towers(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.user, self.item = (
            nn.Sequential(
                nn.Embedding(rows, width), nn.Linear(width, 2 * width), nn.ReLU(), nn.Linear(2 * width, 32)
            )
            for rows in (USERS, ITEMS)
        )

    def forward(self, user, item):
        return self.user(user) @ self.item(item).T  # each user of the batch with each item of it


def train(seed, width, lr, epochs):
    torch.manual_seed(seed)
    (user, item), valid = (tuple(map(torch.from_numpy, part)) for part in DATA)
    model = Towers(width)
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    for _ in range(epochs):
        model.train()
        for rows in torch.randperm(len(user)).split(BATCH):
            scores = model(user[rows], item[rows])
            loss = F.cross_entropy(scores, torch.arange(len(rows)))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        model.eval()
        total = 0.0
        with torch.no_grad():
            for u, i in zip(valid[0].split(BATCH), valid[1].split(BATCH), strict=True):
                total += F.cross_entropy(model(u, i), torch.arange(len(u)), reduction="sum").item()
    return total / len(valid[0])


def main():
    global DATA
    parser = argparse.ArgumentParser()
    parser.add_argument("--members", type=int, default=8)
    parser.add_argument("--epochs", type=int, default=4)
    options = parser.parse_args()
    torch.set_num_threads(1)
    DATA = make_interactions()  # before the processes are forked
    study = optuna.create_study(direction="minimize")
    for width, lr in itertools.product(WIDTHS, RATES):
        study.enqueue_trial({"width": width, "lr": lr})
    with ProcessPoolExecutor(2) as pool:

        def objective(trial):
            params = trial.suggest_categorical("width", WIDTHS), trial.suggest_categorical("lr", RATES)
            return pool.submit(train, trial.number, *params, options.epochs).result()

        study.optimize(objective, n_trials=options.members, n_jobs=2)
    print(json.dumps([trial.value for trial in study.trials]))


if __name__ == "__main__":
    main()
