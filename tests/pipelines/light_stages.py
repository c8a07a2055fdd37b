"""Stages of tests that import torch: a worker imports this module for them, which is cheap, and not the test's."""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path
from typing import Any

import numpy as np


def lengthen(sample: dict[str, Any]) -> dict[str, Any]:
    n = int(sample["label"])
    return {"tokens": np.arange(n % 5), "label": sample["label"], "text": "a " * (n % 3)}


def jitter(sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    """A stage of a member's own: it sees the sample as the stages before left it."""
    target = sample["target"]
    assert type(target["labels"]) is tuple and type(target["labels"][1]) is int and type(target["name"]) is str
    return {**sample, "target": {**target, "boxes": target["boxes"] * rng.random(dtype=np.float32)}}


def shifted(sample: dict[str, Any]) -> dict[str, Any]:
    return {**sample, "x": sample["x"] + random.random() + np.random.rand()}


def late(sample: dict[str, Any]) -> dict[str, Any]:
    """Draws for one record in the middle."""
    return {**sample, "x": sample["x"] + (random.random() if sample["x"] == 9 else 0)}


class Seedable:
    """As albumentations' transforms: generators of its own, and a method that seeds them."""

    def __init__(self) -> None:
        self.parts = [{"rng": random.Random()}]

    def set_random_seed(self, seed: int) -> None:
        self.parts = [{"rng": random.Random(seed)}]

    def __call__(self, sample: dict[str, Any]) -> dict[str, Any]:
        return {**sample, "x": sample["x"] + self.parts[0]["rng"].random()}


def kill_own_process(sample: dict[str, Any]) -> dict[str, Any]:
    """Ends whoever prepares, but the process `PARENT`."""
    if os.environ.get("PARENT") != str(os.getpid()):
        os.kill(os.getpid(), signal.SIGKILL)
    return sample


class LazyFile:
    """The usual lazy HDF5 Dataset, without `__getstate__`."""

    def __init__(self, path: Path, first: int = 0) -> None:
        self.path, self.first, self.file = path, first, None

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> dict[str, Any]:
        if self.file is None:
            import h5py

            self.file = h5py.File(self.path, "r")
        return {"x": self.file["x"][self.first + index]}
