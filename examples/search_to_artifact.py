"""A search whose best trials become one calibrated model: combined, exported, and used with torch alone.

python examples/search_to_artifact.py digits            (--data path/to/cifar10: photographs instead)
ensemble run examples/search_to_artifact.py             (the search alone)
"""

import argparse
import subprocess
import sys
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

import ensemble
from ensemble import Ensemble, Recipe, Resources, Search, choice, integer, loguniform, uniform
from pipelines import Pipeline, sources, stages

PREDICT = """import sys, torch  # runs where the artifact is used
program, given = torch.export.load(sys.argv[1] + "/model.pt2").module(), torch.load(sys.argv[2])
label = given.pop("label")
with torch.inference_mode():
    found = program(given)
print(f"predicted   with torch alone: {(found.argmax(1) == label).sum()} of {len(label)} test samples are right")
"""


def model(params):
    layers, channels = [], params["channels"]
    for depth in range(params["depth"]):
        width = params["width"] * 2**depth
        layers += [nn.Conv2d(channels, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(2)]
        channels = width
    pool = nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Dropout(params["dropout"])
    return nn.Sequential(*layers, *pool, nn.Linear(4 * channels, 10))


def loss(net, batch):
    return F.cross_entropy(net(batch["image"]), batch["label"], reduction="none")


def read(data: str, samples: int):
    """The splits as decoded images, and their number of channels: CIFAR-10 in Parquet, or handwritten digits."""
    if data:
        files = [sources.parquet(f"{data}/{x}.parquet", columns=("image", "label")) for x in ("train", "test")]
        whole, test = (file.take(min(samples, len(file))) for file in files)
        train, valid = whole.split(0.9, seed=0)
        return [Pipeline(x, seed=0).map(stages.decode_jpeg("image")) for x in (train, valid, test)], 3
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = (digits.images * 15.9).astype(np.uint8)[:, None]
    train, rest = sources.arrays(image=images, label=digits.target.astype(np.int64)).split(0.4, seed=0)
    return [Pipeline(x, seed=0) for x in (train, *rest.split(0.5, seed=1))], 1


def spec(data: str = "", trials: int = 16, epochs: int = 9, samples: int = 50_000, concurrent: int = 4):
    (train, valid, test), channels = read(data, samples)
    space = {"width": choice(8, 16, 32), "depth": integer(1, 3), "dropout": uniform(0.0, 0.5)}
    space |= {"lr": loguniform(0.01, 0.3), "channels": channels}
    pruner = {"name": "hyperband", "min_resource": 3, "reduction_factor": 2}
    normalize = stages.scale("image", mean=(0.45,) * channels, std=(0.3,) * channels)
    return Ensemble(
        name="search_to_artifact",
        recipe=Recipe(model=model, loss=loss, objective="loss"),
        search=Search(space, trials=trials, sampler="tpe", pruner=pruner),
        optimizer={"name": "sgd", "momentum": 0.9},
        keep="best",
        combine="greedy",  # of the finished trials those that help, by their predictions on the validation split
        train=train.map(stages.random_crop("image", size=32 if data else 8, padding=1)).map(normalize),
        valid=valid.map(normalize),
        test=test.map(normalize),
        epochs=epochs,
        batch_size=64,
        resources=Resources(cpus_per_worker=1 / concurrent),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("artifact", help="the folder to write")
    parser.add_argument("--data", default="", help="a folder with train.parquet and test.parquet of CIFAR-10")
    for name, value in (("trials", 16), ("epochs", 9), ("samples", 50_000)):
        parser.add_argument(f"--{name}", type=int, default=value)
    given = vars(parser.parse_args())
    artifact = given.pop("artifact")
    result = ensemble.submit(spec(**given), f"runs/{Path(artifact).name}", executor="local").wait()
    print(result.summary())
    made = ensemble.export(result.run_dir, artifact)
    print(f"artifact    {made}: its README.md says how it is loaded")
    batch = next(iter(read(given["data"], given["samples"])[0][2].take(256).loader(256)))
    torch.save({name: batch[name].clone() for name in ("image", "label")}, result.run_dir / "test_samples.pt")
    subprocess.run([sys.executable, "-I", "-c", PREDICT, made, result.run_dir / "test_samples.pt"], check=True)


if __name__ == "__main__":
    main()
