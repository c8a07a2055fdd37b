"""What every system trains: photographs, their preparation, a network. Needs torch, numpy and Pillow only.

The processes of other systems run in an environment of their own, which has none of this project's dependencies.
"""

from __future__ import annotations

import io
import itertools
import mmap
import tarfile
import time
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch import nn
from torch.utils.data import Dataset

SIDE, BATCH = 64, 32


class Photographs(Dataset[tuple[torch.Tensor, int]]):
    """JPEG photographs of a tar archive, in a random order of their own; each counts `repeats` times an epoch."""

    def __init__(self, archive: str, repeats: int = 4) -> None:
        self._archive = archive
        self._memory: mmap.mmap | None = None
        with tarfile.open(archive) as tar:
            files = sorted((file.name, file.offset_data, file.size) for file in tar if file.isfile())
        self._places = [(at, size, label) for label, (_, at, size) in enumerate(files)] * repeats
        self.classes = len(files)

    def __len__(self) -> int:
        return len(self._places)

    def read(self, number: int) -> tuple[bytes, int]:
        """The bytes of a photograph, and its class."""
        if self._memory is None:  # in each process: an open map is not pickled
            with open(self._archive, "rb") as file:
                self._memory = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
        at, size, label = self._places[number]
        return self._memory[at : at + size], label

    def __getitem__(self, number: int) -> tuple[torch.Tensor, int]:
        """As a Dataset of torch has it: prepared, with torch's seed for this worker and sample."""
        content, label = self.read(number)
        return torch.from_numpy(prepare(content, np.random.default_rng(int(torch.randint(2**31, ()))))), label


def prepare(content: bytes, rng: np.random.Generator) -> npt.NDArray[np.float32]:
    """A photograph as [3, SIDE, SIDE]: decoded, cropped at random, flipped at random, normalized."""
    image = Image.open(io.BytesIO(content)).convert("RGB")
    side = int(min(image.size) * rng.uniform(0.6, 1.0))
    left, top = (int(rng.integers(0, length - side + 1)) for length in image.size)
    small = image.resize((SIDE, SIDE), Image.Resampling.BILINEAR, (left, top, left + side, top + side))
    pixels = np.asarray(small, np.float32).transpose(2, 0, 1) / 127.5 - 1.0
    return np.ascontiguousarray(pixels[:, :, ::-1] if rng.random() < 0.5 else pixels)


def build(width: int, classes: int) -> nn.Module:
    """A network of three convolutions."""
    widths = (3, width, 2 * width, 4 * width)
    layers = [
        (nn.Conv2d(before, after, 3, stride=2, padding=1), nn.ReLU())
        for before, after in itertools.pairwise(widths)
    ]
    head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], classes))
    return nn.Sequential(*(layer for pair in layers for layer in pair), *head)


def train(batches: Iterable[Any], width: int, classes: int, lr: float) -> dict[str, float]:
    """Train a network on batches of (images, labels); returns samples, seconds and the last batch's loss."""
    torch.set_num_threads(1)
    model = build(width, classes)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    samples, began_s = 0, time.monotonic()
    loss = torch.zeros(())
    for images, labels in batches:
        loss = nn.functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        samples += len(labels)
    return {"samples": samples, "seconds": time.monotonic() - began_s, "loss": float(loss)}
