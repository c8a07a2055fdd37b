"""TabM, many MLPs in one, on a table of 20,000 rows: a search of 12 trials over its size and rate.

The form is that of https://github.com/yandex-research/tabm (tabm 0.0.3 on PyPI) with Optuna 5.0.

python examples/ports/tabm/plain.py [--members 12] [--epochs 1]
"""

import argparse
import itertools
import json
from concurrent.futures import ProcessPoolExecutor

import numpy as np
import optuna
import torch
from sklearn.preprocessing import StandardScaler
from tabm import TabM
from torch.nn import functional as F

BATCH, CLASSES = 256, [6, 6, 6]
SIZES, BLOCKS, RATES = (64, 128), (2, 3), (5e-4, 2e-3, 5e-3)


def make_table():
    """Numbers, categories and a target, scaled by the first 16,000 rows; the others validate."""
    rng, rows, cut = np.random.default_rng(0), 20_000, 16_000
    number, kind = rng.normal(size=(rows, 10)), rng.integers(0, 6, size=(rows, 3))
    target = number[:, 0] * number[:, 1] + 1.5 * (kind[:, 0] == 2) + 0.3 * rng.normal(size=rows)
    number = StandardScaler().fit(number[:cut]).transform(number).astype(np.float32)
    target = ((target - target[:cut].mean()) / target[:cut].std()).astype(np.float32)
    return [(number[part], kind[part], target[part]) for part in (slice(cut), slice(cut, None))]


def train(seed, size, blocks, lr, epochs):
    torch.manual_seed(seed)
    (number, kind, target), valid = (tuple(map(torch.from_numpy, part)) for part in DATA)
    model = TabM.make(n_num_features=10, cat_cardinalities=CLASSES, d_out=1, d_block=size, n_blocks=blocks)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=3e-4)
    for _ in range(epochs):
        model.train()
        for rows in torch.randperm(len(target)).split(BATCH):
            optimizer.zero_grad()
            outputs = model(number[rows], kind[rows]).squeeze(-1)  # [b, k], one for each of its MLPs
            loss = F.mse_loss(outputs, target[rows, None].expand_as(outputs))
            loss.backward()
            optimizer.step()
        model.eval()
        with torch.inference_mode():
            outputs = [model(x, c) for x, c in zip(valid[0].split(BATCH), valid[1].split(BATCH), strict=True)]
            error = F.mse_loss(torch.cat(outputs).squeeze(-1).mean(1), valid[2]).item()
    return error**0.5


def main():
    global DATA
    parser = argparse.ArgumentParser()
    parser.add_argument("--members", type=int, default=12)
    parser.add_argument("--epochs", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(1)
    DATA = make_table()  # before the processes are forked
    study = optuna.create_study(direction="minimize")
    for size, blocks, lr in itertools.product(SIZES, BLOCKS, RATES):
        study.enqueue_trial({"size": size, "blocks": blocks, "lr": lr})
    with ProcessPoolExecutor(2) as pool:

        def objective(trial):
            choices = (("size", SIZES), ("blocks", BLOCKS), ("lr", RATES))
            params = [trial.suggest_categorical(name, values) for name, values in choices]
            return pool.submit(train, trial.number, *params, options.epochs).result()

        study.optimize(objective, n_trials=options.members, n_jobs=2)
    print(json.dumps([trial.value for trial in study.trials]))


if __name__ == "__main__":
    main()
