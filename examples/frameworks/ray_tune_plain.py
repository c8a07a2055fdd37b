"""Handwritten digits with Ray Tune and ASHA, as people write it: the original of ray_tune_member.py.

python examples/frameworks/ray_tune_plain.py [--trials 8] [--epochs 9] [--storage DIR]
"""

import argparse
import os
import tempfile

import torch
from ray import tune
from ray.tune.schedulers import ASHAScheduler
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset, random_split

SPACE = {"width": tune.choice([16, 32, 64]), "lr": tune.loguniform(1e-3, 1.0)}


def build(config):
    width = config["width"]
    return nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))


def train(config):
    found = load_digits()
    digits = TensorDataset(torch.tensor(found.images / 16, dtype=torch.float32), torch.tensor(found.target))
    parts = random_split(digits, [0.8, 0.2], generator=torch.Generator().manual_seed(0))
    batches, validation = DataLoader(parts[0], 64, shuffle=True), DataLoader(parts[1], 64)
    model = build(config)
    optimizer = torch.optim.SGD(model.parameters(), lr=config["lr"], momentum=0.9)
    first = 0
    if (checkpoint := tune.get_checkpoint()) is not None:
        with checkpoint.as_directory() as folder:
            saved = torch.load(f"{folder}/saved.pt")
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        first = saved["epoch"] + 1
    for epoch in range(first, config["epochs"]):
        model.train()
        for image, label in batches:
            loss = F.cross_entropy(model(image), label)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            right = torch.cat([model(image).argmax(1) == label for image, label in validation])
        with tempfile.TemporaryDirectory() as folder:
            saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}
            torch.save(saved, f"{folder}/saved.pt")
            tune.report(
                {"accuracy": right.float().mean().item()}, checkpoint=tune.Checkpoint.from_directory(folder)
            )


def main(trials, epochs, storage):
    tuner = tune.Tuner(
        tune.with_resources(train, {"cpu": 1}),
        param_space={**SPACE, "epochs": epochs},
        tune_config=tune.TuneConfig(
            metric="accuracy",
            mode="max",
            num_samples=trials,
            scheduler=ASHAScheduler(max_t=epochs, grace_period=1, reduction_factor=3),
        ),
        run_config=tune.RunConfig(name="digits", storage_path=os.path.abspath(storage)),
    )
    best = tuner.fit().get_best_result()
    print(f"accuracy {best.metrics['accuracy']:.4f} {best.config}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--trials", type=int, default=8)
    parser.add_argument("--epochs", type=int, default=9)
    parser.add_argument("--storage", default="tune")
    main(**vars(parser.parse_args()))
