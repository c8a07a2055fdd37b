"""Augmentation by torchvision on one shared pipeline, and its strength as a hyperparameter of the members.

ensemble run examples/augment.py --set data=DIR      (DIR holds train.parquet and test.parquet, as for cifar10.py)

Jitter, rotation, RandAugment and erasing are done once for all members. What differs is done by each member,
on the shared samples: a fresh draw of noise, as strong as its hyperparameter says.
"""

import torch
from torch import nn
from torch.nn import functional as F
from torchvision.transforms import v2

from ensemble import Ensemble, Recipe, Resources
from pipelines import Pipeline, sources, stages

MEAN, STD = (0.491, 0.482, 0.447), (0.247, 0.244, 0.262)
AUGMENT = v2.Compose([v2.ColorJitter(0.3, 0.3, 0.3), v2.RandomRotation(10), v2.RandAugment(1, 5)])


class Noise:
    """Adds noise of a standard deviation; drawn from torch, so declared `random="torch"`."""

    def __init__(self, strength):
        self.strength = strength

    def __call__(self, image):
        return image + self.strength * torch.randn(image.shape).numpy()


def model(params):
    width, layers = params["width"], []
    for before, after in ((3, width), (width, 2 * width), (2 * width, 4 * width)):
        layers += [nn.Conv2d(before, after, 3, 2, 1, bias=False), nn.BatchNorm2d(after), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4 * width, 10))


def loss(net, batch):
    return F.cross_entropy(net(batch["image"]), batch["label"], reduction="none")


def optimizer(net, params):
    return torch.optim.SGD(net.parameters(), lr=params["lr"], momentum=0.9, weight_decay=5e-4, nesterov=True)


def spec(data: str = "cifar10", samples: int = 50_000, epochs: int = 10, members: int = 3):
    train, test = (sources.parquet(f"{data}/{x}.parquet", columns=("image", "label")) for x in ("train", "test"))
    train, valid = train.take(min(samples, len(train))).split(0.9, seed=0)
    decode, normalize = stages.decode_jpeg("image"), stages.scale("image", mean=MEAN, std=STD)
    shared = (
        Pipeline(train, seed=0)
        .map(decode)
        .map(AUGMENT, field="image", id="jitter, rotation, RandAugment")
        .map(v2.RandomErasing(p=0.25), field="image", id="erasing")
        .map(normalize)
    )

    def pipeline(params):
        noise = Noise(params["noise"])
        return shared.map(noise, field="image", random="torch", id=f"noise {params['noise']}")

    return Ensemble(
        name="augment",
        recipe=Recipe(model=model, loss=loss, optimizer=optimizer),
        members=[{"width": 16, "lr": 0.1, "noise": noise} for noise in (0.0, 0.1, 0.2)][:members],
        train=pipeline,
        valid=Pipeline(valid).map(decode).map(normalize),
        test=Pipeline(test.take(min(samples, len(test)))).map(decode).map(normalize),
        epochs=epochs,
        batch_size=128,
        resources=Resources(cpus_per_worker=0.25, gpus_per_worker=0.25),
    )
