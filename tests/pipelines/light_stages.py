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
