"""CIFAR-10 with Lightning, as people write it: the original of lightning_member.py.

python examples/frameworks/lightning_plain.py DATA [--seed 0] [--epochs 3] [--samples 6000]
"""

import argparse
import io

import lightning as L
import pyarrow.dataset
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from PIL import Image
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset
from torchvision.transforms import v2

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


def main(data, seed, epochs, samples):
    L.seed_everything(seed)
    table = pyarrow.dataset.dataset(f"{data}/cifar10/train.parquet").head(samples, columns=["image", "label"])
    cut = round(0.8 * samples)
    train, valid = Photographs(table[:cut], TRAIN), Photographs(table[cut:], VALID)
    callbacks = [EarlyStopping("val_loss"), ModelCheckpoint(monitor="val_loss")]
    trainer = L.Trainer(
        max_epochs=epochs, accelerator="cpu", logger=False, enable_progress_bar=False, callbacks=callbacks
    )
    trainer.fit(
        Classifier(width=16, lr=0.02),
        DataLoader(train, batch_size=64, shuffle=True),
        DataLoader(valid, batch_size=64),
    )
    (found,) = trainer.validate(dataloaders=DataLoader(valid, batch_size=64), ckpt_path="best", verbose=False)
    print(f"accuracy {found['accuracy']:.4f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("data")
    for name, default in (("seed", 0), ("epochs", 3), ("samples", 6000)):
        parser.add_argument(f"--{name}", type=int, default=default)
    main(**vars(parser.parse_args()))
