"""Which positions of samples count where all predictions are too many: to be fitted to, or to be kept.

They are drawn, as every k-th might be a column of an image, and depend on the layout alone: all members, and whoever
reads what they saved, have the same ones.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ensemble.spec.task import Kind, Task

FEWEST = 1024
"""Positions of a sample from which on a part stands for all; below, they may be targets of different units."""

PIECE = 2**20
"""Numbers of one array that are worked on at once: temporaries stay near the processor's cache."""

TAILS: dict[Kind, int] = {"classification": 1, "regression": 0, "gaussian": 1, "quantiles": 1}
"""How many axes of values come after those of positions; of other tasks a sample cannot be divided."""


def count_positions(task: Task, shape: Sequence[int]) -> int:
    """How many positions a sample of values [n, ...] has that can be divided; 1 where it cannot."""
    found = math.prod(shape[1 : len(shape) - TAILS[task.kind]]) if task.kind in TAILS else 1
    return found if found >= FEWEST else 1


def choose_positions(task: Task, shape: Sequence[int], most: float) -> Any | None:
    """The positions of each sample, ascending, of which values [n, ...] are `most` numbers; None: all.

    At least one of each sample is chosen.
    """
    positions, size = count_positions(task, shape), math.prod(shape)
    if positions == 1 or size <= most:
        return None
    chosen = np.random.default_rng(0).choice(positions, max(1, int(positions * most / size)), replace=False)
    return np.sort(chosen)


def take_positions(array: Any, positions: Any, tail: int) -> Any:
    """[n, k, ...] of these k positions (a slice, or integers) of [n, ...], whose last `tail` axes stay."""
    return array.reshape(len(array), -1, *array.shape[array.ndim - tail :])[:, positions]


def list_pieces(task: Task, shape: Sequence[int]) -> list[tuple[slice, slice]]:
    """Divide values [n, ...] into some samples or some positions of one sample each: `take_positions` takes them."""
    if task.kind not in TAILS or math.prod(shape) <= PIECE:
        return [(slice(None), slice(None))]
    own, positions = max(1, math.prod(shape[1:])), count_positions(task, shape)
    if own <= PIECE:
        step = PIECE // own
        return [(slice(first, first + step), slice(None)) for first in range(0, shape[0], step)]
    step = max(1, PIECE * positions // own)
    return [
        (slice(row, row + 1), slice(first, first + step))
        for row in range(shape[0])
        for first in range(0, positions, step)
    ]
