"""Linear heads on the features of one frozen network, which are computed once for all of them.

ensemble run examples/probes.py --set data=DIR       (DIR holds train.parquet and test.parquet, as for cifar10.py)

The network is a stage of the pipeline: it computes on batches where samples are prepared. Nothing before or in it
is random, so the features are the same in each epoch, and are computed once for all epochs, too.
"""

import torch
from torch import nn
from torch.nn import functional as F
from torchvision.models import resnet18

from ensemble import Ensemble, Recipe
from pipelines import Pipeline, sources, stages

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def frozen(weights):
    """A ResNet-18 without its head; random weights, which are the same in each process, where there is no file."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        network = resnet18()
    if weights:
        network.load_state_dict(torch.load(weights, weights_only=True))
    network.fc = nn.Identity()
    return network


def model(params):
    return nn.Sequential(nn.BatchNorm1d(512, affine=False), nn.Linear(512, 10))


def loss(head, batch):
    return F.cross_entropy(head(batch["image"]), batch["label"], reduction="none")


def optimizer(head, params):
    return torch.optim.SGD(head.parameters(), lr=params["lr"], momentum=0.9, weight_decay=params["decay"])


def spec(data: str = "cifar10", samples: int = 50_000, epochs: int = 10, members: int = 32, weights: str = ""):
    images = sources.parquet(f"{data}/train.parquet", columns=("image", "label")).take(samples)
    train, valid = images.split(0.9, seed=0)
    network = frozen(weights)

    def features(source):
        image = Pipeline(source, seed=0).map(stages.decode_jpeg("image")).map(stages.resize("image", 64))
        scaled = image.map(stages.scale("image", mean=MEAN, std=STD))
        return scaled.map_batches(network, field="image", batch_size=32)

    grid = [{"lr": 0.1 / 2**step, "decay": decay} for step in range(8) for decay in (0.0, 1e-5, 1e-4, 1e-3)]
    return Ensemble(
        name="probes",
        recipe=Recipe(model=model, loss=loss, optimizer=optimizer),
        members=grid[:members],
        train=features(train),
        valid=features(valid),
        epochs=epochs,
        batch_size=128,
    )
