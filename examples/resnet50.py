"""ResNet-50 on folders of images, as trained in four minutes (Jia et al. 2018): LARS, warm-up, very large batches.

ensemble run examples/resnet50.py --set data=imagenet      (it holds train/CLASS/*.jpg and val/CLASS/*.jpg)

Weights of normalization and biases are not decayed (the default of `lars`), labels are smoothed, and the learning
rate follows the batch: it is warmed up from `base_batch_size` for `warmup` epochs, then falls as a polynomial.
"""

from torch import nn
from torch.nn import functional as F

from ensemble import Ensemble, Recipe, Resources
from pipelines import Pipeline, sources, stages

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def normed(channels_in: int, channels: int, kernel: int, stride: int = 1, gamma: float = 1.0):
    norm = nn.BatchNorm2d(channels)
    nn.init.constant_(norm.weight, gamma)
    return nn.Sequential(nn.Conv2d(channels_in, channels, kernel, stride, kernel // 2, bias=False), norm)


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions beside a shortcut; the last normalization begins at 0 (Goyal et al. 2017)."""

    def __init__(self, channels_in: int, width: int, stride: int):
        super().__init__()
        self.first, self.second = normed(channels_in, width, 1), normed(width, width, 3, stride)
        self.third = normed(width, 4 * width, 1, gamma=0.0)
        is_same = channels_in == 4 * width and stride == 1
        self.shortcut = nn.Identity() if is_same else normed(channels_in, 4 * width, 1, stride)

    def forward(self, x):
        inner = self.third(F.relu(self.second(F.relu(self.first(x)))))
        return F.relu(inner + self.shortcut(x))


def make_resnet(classes: int, width: int = 64, depths: tuple[int, ...] = (3, 4, 6, 3)):
    layers, channels = [normed(3, width, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1)], width
    for stage, depth in enumerate(depths):
        for block in range(depth):
            layers.append(Bottleneck(channels, width << stage, 2 if stage and not block else 1))
            channels = 4 * (width << stage)
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes))


def model(params):
    return make_resnet(params["classes"], params["width"])


def spec(
    data: str = "imagenet",
    epochs: int = 90,
    batch_size: int = 8192,
    size: int = 224,
    width: int = 64,
    warmup: float = 5.0,
    members: int = 2,
    workers: int = 8,
    precision: str = "bf16",
):
    train, valid = (sources.image_folder(f"{data}/{split}") for split in ("train", "val"))
    normalize = stages.scale("image", mean=MEAN, std=STD)
    shown = [
        Pipeline(split)
        .map(stages.decode_image("image"))
        .map(stages.resize("image", shorter=size * 8 // 7))
        .map(stages.center_crop("image", size))
        .map(normalize)
        for split in valid.split(0.5, seed=0)
    ]
    return Ensemble(
        name="resnet50",
        recipe=Recipe(
            model=model,
            loss="cross_entropy",
            inputs=("image",),
            label_smoothing=0.1,
            split_metrics=("top5_accuracy",),
        ),
        optimizer={"name": "lars", "momentum": 0.9, "weight_decay": 1e-4},
        schedule={"name": "polynomial", "power": 2.0, "warmup_epochs": warmup, "base_batch_size": 256},
        members=[{"lr": 0.1 * (n + 1), "width": width, "classes": len(train.classes)} for n in range(members)],
        train=Pipeline(train, seed=0)
        .map(stages.decode_image("image"))
        .map(stages.random_resized_crop("image", size))
        .map(stages.random_flip("image"))
        .map(normalize),
        valid=shown[0],
        test=shown[1],
        epochs=epochs,
        batch_size=batch_size,
        precision=precision,
        resources=Resources(workers=workers, gpus_per_worker=1),
    )
