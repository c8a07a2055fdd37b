"""Eight small residual networks on CIFAR-10, from Parquet files of JPEGs, on one shared pipeline.

ensemble run examples/cifar10.py --set data=DIR      (DIR holds train.parquet and test.parquet)
"""

import torch
from torch import nn
from torch.nn import functional as F

from ensemble import Ensemble, Recipe, Resources
from pipelines import Pipeline, sources, stages

MEAN, STD = (0.491, 0.482, 0.447), (0.247, 0.244, 0.262)


class Block(nn.Module):
    """Two convolutions and a way past them."""

    def __init__(self, channels_in: int, channels: int, stride: int):
        super().__init__()
        self.first = nn.Conv2d(channels_in, channels, 3, stride, 1, bias=False)
        self.second = nn.Conv2d(channels, channels, 3, 1, 1, bias=False)
        self.past = nn.Conv2d(channels_in, channels, 1, stride, bias=False)
        self.norms = nn.ModuleList([nn.BatchNorm2d(channels) for _ in range(2)])

    def forward(self, x):
        y = F.relu(self.norms[0](self.first(x)))
        return F.relu(self.norms[1](self.second(y)) + self.past(x))


def model(params):
    width = params["width"]
    return nn.Sequential(
        nn.Conv2d(3, width, 3, 1, 1, bias=False),
        Block(width, width, 1),
        Block(width, 2 * width, 2),
        Block(2 * width, 4 * width, 2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4 * width, 10),
    )


def loss(net, batch):
    return F.cross_entropy(net(batch["image"]), batch["label"], reduction="none")


def optimizer(net, params):
    return torch.optim.SGD(net.parameters(), lr=params["lr"], momentum=0.9, weight_decay=5e-4, nesterov=True)


def schedule(opt, params, steps):
    return torch.optim.lr_scheduler.OneCycleLR(opt, max_lr=params["lr"], total_steps=steps)


def spec(
    data: str = "cifar10", samples: int = 50_000, epochs: int = 10, members: int = 8, precision: str = "bf16"
):
    train, test = (sources.parquet(f"{data}/{x}.parquet", columns=("image", "label")) for x in ("train", "test"))
    train, valid = train.take(min(samples, len(train))).split(0.9, seed=0)
    decode, normalize = stages.decode_jpeg("image"), stages.scale("image", mean=MEAN, std=STD)
    return Ensemble(
        name="cifar10",
        recipe=Recipe(model=model, loss=loss, optimizer=optimizer, schedule=schedule),
        members=[{"width": w, "lr": lr} for w in (16, 24, 32, 48) for lr in (0.05, 0.2)][:members],
        train=Pipeline(train, seed=0)
        .map(decode)
        .map(stages.random_crop("image", size=32, padding=4))
        .map(stages.random_flip("image"))
        .map(normalize),
        valid=Pipeline(valid).map(decode).map(normalize),
        test=Pipeline(test.take(min(samples, len(test)))).map(decode).map(normalize),
        epochs=epochs,
        batch_size=128,
        precision=precision,
        resources=Resources(cpus_per_worker=0.25, gpus_per_worker=0.125),
    )
