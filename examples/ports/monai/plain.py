"""A UNet of MONAI finds balls in generated volumes: four members, each with its own seed.

The form is that of https://github.com/Project-MONAI/tutorials, spleen_segmentation_3d (monai 1.6.1 on PyPI).

python examples/ports/monai/plain.py [--members 4] [--epochs 5]
"""

import argparse
import json
from concurrent.futures import ProcessPoolExecutor

import numpy as np
import torch
from monai.data import CacheDataset, DataLoader
from monai.losses import DiceLoss
from monai.metrics import DiceMetric
from monai.networks.nets import UNet
from monai.transforms import Compose, EnsureChannelFirstd, RandFlipd, RandGaussianNoised, ScaleIntensityd
from monai.utils import set_determinism

BATCH, SIZE = 4, 40
BOTH = ["image", "label"]
SCALE = [EnsureChannelFirstd(BOTH, channel_dim="no_channel"), ScaleIntensityd("image")]
AUGMENT = [RandFlipd(BOTH, prob=0.5, spatial_axis=0), RandGaussianNoised("image", prob=0.5, std=0.1)]


def make_volumes():
    """Noise with one to three balls in it, which the label marks: 64 volumes; the last 16 validate."""
    rng, volumes = np.random.default_rng(0), []
    grid = np.stack(np.meshgrid(*[np.arange(SIZE)] * 3, indexing="ij"))
    for _ in range(64):
        label = np.zeros((SIZE,) * 3, bool)
        for _ in range(rng.integers(1, 4)):
            centre = rng.integers(8, SIZE - 8, size=(3, 1, 1, 1))
            label |= ((grid - centre) ** 2).sum(0) < rng.integers(4, 8) ** 2
        image = 0.3 * rng.normal(size=label.shape) + label
        volumes.append({"image": image.astype(np.float32), "label": label.astype(np.uint8)})
    return volumes[:48], volumes[48:]


def build():
    sizes = {"channels": (8, 16, 32), "strides": (2, 2), "num_res_units": 1}
    return UNet(spatial_dims=3, in_channels=1, out_channels=1, norm="batch", **sizes)


def train(seed, epochs):
    torch.set_num_threads(1)
    set_determinism(seed)
    data = [
        CacheDataset(part, Compose(transforms), progress=False, num_workers=1)
        for part, transforms in zip(DATA, (SCALE + AUGMENT, SCALE), strict=True)
    ]
    batches, validation = (
        DataLoader(data[0], batch_size=BATCH, shuffle=True),
        DataLoader(data[1], batch_size=BATCH),
    )
    model, loss_function, metric = build(), DiceLoss(sigmoid=True), DiceMetric()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-2)
    for _ in range(epochs):
        model.train()
        for batch in batches:
            optimizer.zero_grad()
            loss = loss_function(model(batch["image"]), batch["label"])
            loss.backward()
            optimizer.step()
        model.eval()
        metric.reset()
        with torch.no_grad():
            for batch in validation:
                metric(model(batch["image"]) > 0, batch["label"])
    return metric.aggregate().item()


def main():
    global DATA
    parser = argparse.ArgumentParser()
    parser.add_argument("--members", type=int, default=4)
    parser.add_argument("--epochs", type=int, default=5)
    options = parser.parse_args()
    DATA = make_volumes()  # before the processes are forked
    with ProcessPoolExecutor(2) as pool:
        print(json.dumps(list(pool.map(train, range(options.members), [options.epochs] * options.members))))


if __name__ == "__main__":
    main()
