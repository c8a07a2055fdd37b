"""Time series of any length for the tests: what preparation processes import, so without torch."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

N, CHANNELS, LONGEST = 60, 3, 40


@functools.cache
def series() -> list[np.ndarray[Any, Any]]:
    """[channels, time] each, of 1 to LONGEST steps; its class is whether the first channel rises."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, LONGEST + 1, N)
    lengths[7] = LONGEST
    return [rng.normal(size=(CHANNELS, n)).astype(np.float32) for n in lengths]


LABELS = np.array([int(x[0].sum() > 0) for x in series()])


def jitter(sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    """An augmentation of what is still ragged: as many draws as the series has values."""
    return {**sample, "x": sample["x"] + rng.normal(scale=0.01, size=sample["x"].shape).astype(np.float32)}
