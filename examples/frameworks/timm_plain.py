"""CIFAR-10 with timm: its model, schedule, averaged weights and mixup. The original of timm_member.py.

python examples/frameworks/timm_plain.py DATA [--seed 0] [--epochs 3] [--samples 6000]
"""

import argparse

import pyarrow.dataset
import timm
import torch
from lightning_plain import TRAIN, VALID, Photographs
from timm.data import Mixup
from timm.loss import SoftTargetCrossEntropy
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2
from timm.utils import ModelEmaV3, random_seed
from torch.utils.data import DataLoader


def build(params):
    return timm.create_model("test_resnet", num_classes=10)


def measure(model, batches):
    model.eval()
    with torch.no_grad():
        right = torch.cat([model(image).argmax(1) == label for image, label in batches])
    return right.float().mean().item()


def main(data, seed, epochs, samples):
    random_seed(seed)
    table = pyarrow.dataset.dataset(f"{data}/cifar10/train.parquet").head(samples, columns=["image", "label"])
    cut = round(0.8 * samples)
    batches = DataLoader(Photographs(table[:cut], TRAIN), batch_size=64, shuffle=True)
    validation = DataLoader(Photographs(table[cut:], VALID), batch_size=64)
    model = build({})
    optimizer = create_optimizer_v2(model, opt="adamw", lr=3e-3, weight_decay=0.05)
    schedule, _ = create_scheduler_v2(optimizer, sched="cosine", num_epochs=epochs, warmup_epochs=1)
    averaged = ModelEmaV3(model, decay=0.98)
    mixup, loss = Mixup(mixup_alpha=0.2, num_classes=10), SoftTargetCrossEntropy()
    for epoch in range(epochs):
        model.train()
        for image, label in batches:
            image, target = mixup(image, label)
            loss(model(image), target).backward()
            optimizer.step()
            optimizer.zero_grad()
            averaged.update(model)
        schedule.step(epoch + 1)
        print(f"accuracy {measure(averaged.module, validation):.4f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("data")
    for name, default in (("seed", 0), ("epochs", 3), ("samples", 6000)):
        parser.add_argument(f"--{name}", type=int, default=default)
    main(**vars(parser.parse_args()))
