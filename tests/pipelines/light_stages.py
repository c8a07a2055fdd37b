"""Stages of tests that import torch: a worker imports this module for them, which is cheap, and not the test's."""

from __future__ import annotations

import random
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
    return {**sample, "x": sample["x"] + (random.random() if sample["x"] == 9 else 0)}


class Seedable:
    """As albumentations' transforms: generators of its own, and a method that seeds them."""

    def __init__(self) -> None:
        self.parts = [{"rng": random.Random()}]

    def set_random_seed(self, seed: int) -> None:
        self.parts = [{"rng": random.Random(seed)}]

    def __call__(self, sample: dict[str, Any]) -> dict[str, Any]:
        return {**sample, "x": sample["x"] + self.parts[0]["rng"].random()}


class Randomizable:
    """MONAI's interface of a transform that draws: a generator `R`, and `set_random_state`."""

    def __init__(self) -> None:
        self.R = np.random.RandomState()

    def set_random_state(self, seed: int | None = None, state: Any = None) -> Randomizable:
        self.R = np.random.RandomState(seed) if state is None else state
        return self


class RandShiftd(Randomizable):
    def __call__(self, sample: dict[str, Any]) -> dict[str, Any]:
        return {**sample, "x": sample["x"] + self.R.rand()}


class Scaled:
    def __call__(self, sample: dict[str, Any]) -> dict[str, Any]:
        return {**sample, "x": sample["x"] * 2}


class Compose(Randomizable):
    """As MONAI's: it has `set_random_state` whatever is in it, and seeds what can be seeded."""

    def __init__(self, *transforms: Any) -> None:
        super().__init__()
        self.transforms = transforms

    def set_random_state(self, seed: int | None = None, state: Any = None) -> Randomizable:
        super().set_random_state(seed, state)
        for transform in self.transforms:
            if isinstance(transform, Randomizable):
                transform.set_random_state(int(self.R.randint(1 << 32, dtype="uint32")))
        return self

    def __call__(self, sample: dict[str, Any]) -> dict[str, Any]:
        for transform in self.transforms:
            sample = transform(sample)
        return sample
