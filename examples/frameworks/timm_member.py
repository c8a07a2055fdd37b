"""CIFAR-10 with timm: timm_plain.py as an ensemble of eight seeds on one pipeline.

ensemble run examples/frameworks/timm_member.py --set data=DIR      (DIR holds cifar10/train.parquet)
"""

import dataclasses

import lightning_member
import timm
import torch
from timm.data import Mixup
from timm.loss import SoftTargetCrossEntropy
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2
from timm.utils import ModelEmaV3

from ensemble import Recipe

FIELDS = ("image", "label")


def build(params):
    return timm.create_model("test_resnet", num_classes=10)


def measure(model, batches):
    model.eval()
    with torch.no_grad():
        right = torch.cat([model(image).argmax(1) == label for image, label in batches])
    return right.float().mean().item()


def train(member):
    batches, validation = member.dataloader("train", fields=FIELDS), member.dataloader("valid", fields=FIELDS)
    model = build(member.params)
    optimizer = create_optimizer_v2(model, opt="adamw", lr=3e-3, weight_decay=0.05)
    epochs = member.identity.epochs
    schedule, _ = create_scheduler_v2(optimizer, sched="cosine", num_epochs=epochs, warmup_epochs=1)
    averaged = ModelEmaV3(model, decay=0.98)
    mixup, loss = Mixup(mixup_alpha=0.2, num_classes=10), SoftTargetCrossEntropy()
    model, optimizer = member.prepare(model, optimizer)
    member.state("schedule", schedule)
    member.state("averaged", averaged)
    for epoch in range(epochs):
        model.train()
        for image, label in batches:
            image, target = mixup(image, label)
            loss(model(image), target).backward()
            optimizer.step()
            optimizer.zero_grad()
            averaged.update(model)
        schedule.step(epoch + 1)
        member.report(accuracy=measure(averaged.module, validation))
    member.use_weights(averaged.module)
    member.predict_all()


def predict(model, batch):
    return model(batch["image"]).softmax(1)


def spec(data: str = "data", seeds: int = 8, epochs: int = 3, samples: int = 6000):
    recipe = Recipe(model=build, train=train, predict=predict, objective="accuracy")
    return dataclasses.replace(lightning_member.spec(data, seeds, epochs, samples), recipe=recipe)
