"""The networks of the studies, and their data: CNN and ResNet learn CIFAR-10, an LSTM learns IMDB.

Both data sets are read from Parquet files of a directory; without one all learn the handwritten digits that
scikit-learn ships, the LSTM from the eight rows of pixels as a sequence.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ensemble.spec import Recipe, SpecError, unknown_name

if TYPE_CHECKING:
    import torch
    from torch import nn

    from pipelines import Pipeline

CNN, RESNET, LSTM = "cnn", "resnet", "lstm"
CIFAR10, IMDB, DIGITS = "cifar10", "imdb", "digits"
FIELDS = {CNN: "image", RESNET: "image", LSTM: "text"}
CLASSES = {CIFAR10: 10, IMDB: 2, DIGITS: 10}
# Mean and deviation of CIFAR-10's training images, and of the digits.
_MEAN, _STD = (0.491, 0.482, 0.447), (0.247, 0.244, 0.262)
_DIGITS_MEAN, _DIGITS_STD, _DIGITS_PIXELS = (0.3,), (0.37,), 8
# The largest norm of a step's gradient, as in Svyatkovskiy et al.
_LSTM_CLIP = 10.0

_SGD = {"name": "sgd", "lr": 0.1, "momentum": 0.9, "weight_decay": 5e-4}
#: The optimizer of each kind, where a study does not compare optimizers.
OPTIMIZERS: dict[str, dict[str, Any]] = {
    CNN: _SGD,
    RESNET: _SGD,
    LSTM: {"name": "adamw", "lr": 2e-3},
}
BATCH_SIZE = 64
EPOCHS = {CNN: 6, RESNET: 6, LSTM: 4}
DIGITS_EPOCHS = 4  # times as many: there are few digits

#: Numbers of a `Net` that a user may change.
NUMBERS = {
    "width": "channels of the first layer of a CNN or ResNet, doubled by each further layer",
    "blocks": "residual blocks of a ResNet, after its second and its last layer each",
    "pixels": "of a side of their images",
    "words": "rows of the LSTM's embedding",
    "embed": "values of a word",
    "hidden": "of the LSTM's layers",
    "layers": "of the LSTM",
    "length": "words of a text",
}


@dataclass(frozen=True, kw_only=True)
class Net:
    """A network in one size.

    Attributes:
        name: of the size, in tables.  kind: "cnn", "resnet" or "lstm".
        width, blocks, pixels, words, embed, hidden, layers, length: see `NUMBERS`; longer texts lose their
            beginning.
    """

    name: str
    kind: str
    width: int = 32
    blocks: int = 1
    pixels: int = 32
    words: int = 10_000
    embed: int = 200
    hidden: int = 200
    layers: int = 2
    length: int = 128

    def data(self, directory: str | None) -> str:
        """The name of its data set: the digits where there is no directory."""
        return DIGITS if directory is None else IMDB if self.kind == LSTM else CIFAR10

    def params(self, directory: str | None) -> dict[str, Any]:
        """The hyperparameters from which `model` builds it."""
        data = self.data(directory)
        made: dict[str, Any] = {"net": self.kind, "classes": CLASSES[data]}
        if self.kind != LSTM:
            blocks = {"blocks": self.blocks} if self.kind == RESNET else {}
            return {**made, "width": self.width, "channels": 1 if data == DIGITS else 3, **blocks}
        shape = {"embed": self.embed, "hidden": self.hidden, "layers": self.layers}
        return {**made, **shape, "words": 0 if data == DIGITS else self.words}

    def parameters(self, directory: str | None) -> int:
        """The number of its weights."""
        import torch

        with torch.device("meta"):
            return sum(p.numel() for p in model(self.params(directory)).parameters())


#: The sizes by name: "resnet" has 9 layers with 26 tensors of weights, "resnet-deep" 29 with 86; "lstm" is
#: Svyatkovskiy et al.'s, "lstm-large" has 79 million weights.
NETS = {
    net.name: net
    for net in (
        Net(name="cnn", kind=CNN),
        Net(name="cnn-small", kind=CNN, width=16, pixels=16),
        Net(name="resnet", kind=RESNET, width=16, pixels=16),
        Net(name="resnet-deep", kind=RESNET, width=16, pixels=16, blocks=6),
        Net(name="lstm", kind=LSTM),
        Net(name="lstm-small", kind=LSTM, embed=64, hidden=64),
        Net(name="lstm-large", kind=LSTM, words=20_000, embed=1024, hidden=2048),
    )
}


def net_of(name: str, **changed: int | None) -> Net:
    """A network by name, with those numbers changed that are not None.

    Raises:
        SpecError: there is no network of that name.
    """
    if name not in NETS:
        raise SpecError(unknown_name("there is no model", name, list(NETS)))
    numbers: dict[str, Any] = {key: value for key, value in changed.items() if value is not None}
    return dataclasses.replace(NETS[name], **numbers)


# --- data ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Splits:
    """Disjoint pipelines: `train` to learn from, `valid` to choose by, `test` to measure by."""

    train: Pipeline
    valid: Pipeline
    test: Pipeline


def splits(net: Net, directory: str | None, samples: int, held_out: int) -> Splits:
    """Split a network's data set into pipelines.

    Args:
        directory: holds cifar10/ and imdb/, each with train.parquet and test.parquet; None takes the digits.
        samples: to learn from; `held_out`: of `valid` and of `test`, each. Of the 1,797 digits at most 1,077 and
            360 are taken.

    Raises:
        SpecError: the files hold fewer.
        PipelineError: the files are missing or cannot be read.
    """
    from pipelines import Pipeline, sources, stages

    if directory is None:
        return _split_digits(net, samples, held_out)
    columns = (FIELDS[net.kind], "label")
    folder = Path(directory) / net.data(directory)
    both = sources.parquet(str(folder / "train.parquet"), columns=columns)
    test = sources.parquet(str(folder / "test.parquet"), columns=columns)
    if samples + held_out > len(both) or held_out > len(test):
        raise SpecError(
            f"{folder}: {samples} samples to learn from and twice {held_out} to measure by are more than the "
            f"{len(both)} and {len(test)} that there are; take fewer"
        )
    train, valid = both.take(samples + held_out).split(samples / (samples + held_out), seed=0)
    made = [Pipeline(source, seed=0) for source in (train, valid, test.take(held_out))]
    if net.kind == LSTM:
        vocabulary = stages.build_vocabulary((record["text"] for record in train), size=net.words - 2)
        made = [pipe.map(stages.tokenize("text", vocabulary=vocabulary)) for pipe in made]
        return Splits(*(pipe.map(stages.pad("text", length=net.length, truncate="start")) for pipe in made))
    resize = stages.resize("image", size=(net.pixels, net.pixels), interpolation="area")
    made = [pipe.map(stages.decode_jpeg("image")).map(resize) for pipe in made]
    crop = stages.random_crop("image", size=net.pixels, padding=max(1, net.pixels // 8))
    made[0] = made[0].map(crop).map(stages.random_flip("image"))
    return Splits(*(pipe.map(stages.scale("image", mean=_MEAN, std=_STD)) for pipe in made))


def _split_digits(net: Net, samples: int, held_out: int) -> Splits:
    import numpy as np
    from sklearn.datasets import load_digits

    from pipelines import Pipeline, sources, stages

    digits = load_digits()
    pixels = (digits.images * 15.9).astype(np.uint8)[:, None]
    records = sources.arrays(image=pixels, label=digits.target.astype(np.int64))
    train, others = records.split(0.6, seed=0)
    valid, test = others.split(0.5, seed=1)
    scale = stages.scale("image", mean=_DIGITS_MEAN, std=_DIGITS_STD)
    learning = Pipeline(train.take(min(samples, len(train))), seed=0)
    if net.kind == CNN:
        learning = learning.map(stages.random_crop("image", size=_DIGITS_PIXELS, padding=1))
    still = (Pipeline(source.take(min(held_out, len(source)))).map(scale) for source in (valid, test))
    return Splits(learning.map(scale), *still)


# --- the networks ------------------------------------------------------------------------------------------------


def recipe(net: Net) -> Recipe:
    """The recipe of a member; optimizer and schedule are fields of the Ensemble."""
    return Recipe(model=model, loss=loss, clip_norm=_LSTM_CLIP if net.kind == LSTM else None)


def model(params: dict[str, Any]) -> nn.Module:
    """Build the network of these hyperparameters (`Net.params`)."""
    return {CNN: _build_cnn, RESNET: _build_resnet, LSTM: _build_lstm}[params["net"]](params)


def loss(net: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Cross-entropy of each sample, [b]."""
    from torch.nn import functional

    values = batch["image"] if "image" in batch else batch["text"]
    return functional.cross_entropy(net(values), batch["label"], reduction="none")


def _build_cnn(params: dict[str, Any]) -> nn.Module:
    """Three blocks of convolution, batch normalization and pooling to half the size, then the mean over pixels."""
    from torch import nn

    channels, made = params["channels"], list[nn.Module]()
    for width in (params["width"], 2 * params["width"], 4 * params["width"]):
        made += [*_convolution(channels, width), nn.MaxPool2d(2)]
        channels = width
    made += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, params["classes"])]
    return _channels_last(made)


def _build_resnet(params: dict[str, Any]) -> nn.Module:
    """Four layers, of which three halve the size, with residual blocks after the second and the last.

    Page (2018) learned CIFAR-10 in few epochs with it, at width 64. Its scores are divided by 4, as his by 8.
    """
    from torch import nn

    class Residual(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.added = nn.Sequential(*_convolution(width, width), *_convolution(width, width))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.added(x)  # type: ignore[no-any-return]

    class Quarter(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x / 4

    width = params["width"]
    made = _convolution(params["channels"], width)
    for blocks in (params["blocks"], 0, params["blocks"]):
        first, *others = _convolution(width, 2 * width)
        made += [first, nn.MaxPool2d(2), *others, *(Residual(2 * width) for _ in range(blocks))]
        width *= 2
    made += [nn.AdaptiveMaxPool2d(1), nn.Flatten(), nn.Linear(width, params["classes"]), Quarter()]
    return _channels_last(made)


def _convolution(channels: int, width: int) -> list[nn.Module]:
    """A convolution with batch normalization and ReLU."""
    from torch import nn

    return [nn.Conv2d(channels, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]


def _channels_last(made: list[nn.Module]) -> nn.Module:
    """The layers, with channels last in memory: torch's CPU kernels take half the time, also in half precision."""
    import torch
    from torch import nn

    class ChannelsLast(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            """[b, c, h, w] to the same values in another order in memory."""
            return x.contiguous(memory_format=torch.channels_last)

    whole = nn.Sequential(ChannelsLast(), *made)
    return whole.to(memory_format=torch.channels_last)  # type: ignore[no-any-return,call-overload]


def _build_lstm(params: dict[str, Any]) -> nn.Module:
    """An embedding, an LSTM, the mean of its outputs over the words of a text, and a linear layer.

    Without words it reads the rows of an image [b, 1, h, w] as a sequence of length h.
    """
    from torch import nn

    class Classifier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            embed, words = params["embed"], params["words"]
            self.embed = nn.Embedding(words, embed, padding_idx=0) if words else nn.Linear(_DIGITS_PIXELS, embed)
            self.lstm = nn.LSTM(embed, params["hidden"], params["layers"], batch_first=True)
            self.out = nn.Linear(params["hidden"], params["classes"])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            """Word ids, int64 [b, length] with 0 for padding, or images [b, 1, h, w], to scores [b, classes]."""
            if x.is_floating_point():
                return self.out(self.lstm(self.embed(x.squeeze(1)))[0].mean(1))  # type: ignore[no-any-return]
            present = (x != 0).unsqueeze(-1)
            outputs, _ = self.lstm(self.embed(x))
            return self.out((outputs * present).sum(1) / present.sum(1).clamp(min=1))  # type: ignore[no-any-return]

    return Classifier()
