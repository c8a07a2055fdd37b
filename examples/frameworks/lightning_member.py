"""CIFAR-10 with Lightning: lightning_plain.py as an ensemble of eight seeds on one pipeline.

ensemble run examples/frameworks/lightning_member.py --set data=DIR      (DIR holds cifar10/train.parquet)
"""

import io

import lightning as L
import pyarrow.dataset
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from PIL import Image
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset
from torchvision.transforms import v2

from ensemble import Ensemble, Member, Recipe
from ensemble.integrations.lightning import fit
from pipelines import Pipeline, sources, stages

VALID = v2.Compose([v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Normalize([0.5] * 3, [0.25] * 3)])
TRAIN = v2.Compose([v2.ToImage(), v2.RandomCrop(32, padding=4), v2.RandomHorizontalFlip(), *VALID.transforms[1:]])


class Photographs(Dataset):
    def __init__(self, table, transform):
        self.images, self.labels = table["image"].combine_chunks().field("bytes"), table["label"].to_numpy()
        self.transform = transform

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, i):
        image = Image.open(io.BytesIO(self.images[i].as_py())).convert("RGB")
        return self.transform(image), self.labels[i]


class Classifier(L.LightningModule):
    def __init__(self, width, lr):
        super().__init__()
        self.save_hyperparameters()
        layers = []
        for before, after in ((3, width), (width, 2 * width), (2 * width, 4 * width)):
            layers += [nn.Conv2d(before, after, 3, 2, 1, bias=False), nn.BatchNorm2d(after), nn.ReLU()]
        self.net = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4 * width, 10))

    def forward(self, image):
        return self.net(image)

    def training_step(self, batch, index):
        image, label = batch
        loss = F.cross_entropy(self(image), label)
        self.log("train_loss", loss, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch, index):
        image, label = batch
        scores = self(image)
        self.log("val_loss", F.cross_entropy(scores, label))
        self.log("accuracy", (scores.argmax(1) == label).float().mean())

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)
        steps = self.trainer.estimated_stepping_batches
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=self.hparams.lr, total_steps=steps)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def train(member):
    callbacks = [EarlyStopping("val_loss"), ModelCheckpoint(monitor="val_loss")]
    fit(member, Classifier(**member.params), fields=("image", "label"), callbacks=callbacks)


def spec(data: str = "data", seeds: int = 8, epochs: int = 3, samples: int = 6000):
    table = pyarrow.dataset.dataset(f"{data}/cifar10/train.parquet").head(samples, columns=["image", "label"])
    cut = round(0.8 * samples)
    parts = [
        Pipeline(sources.dataset(Photographs(part, lambda image: image))) for part in (table[:cut], table[cut:])
    ]
    return Ensemble(
        name="photographs",
        recipe=Recipe(model=lambda params: Classifier(**params), train=train, objective="accuracy"),
        members=[Member({"width": 16, "lr": 0.02}) for _ in range(seeds)],
        train=parts[0].map(stages.tv_transform(TRAIN, images="image")),
        valid=parts[1].map(stages.tv_transform(VALID, images="image")),
        epochs=epochs,
        batch_size=64,
    )
