"""Members of every task, of differing quality, with targets: float32 as they are saved."""

from __future__ import annotations

from typing import Any

import numpy as np

from ensemble.spec.task import Task, quantiles

Array = np.ndarray[Any, Any]

CLASSES, LABELS, LEVELS = 4, 3, (0.1, 0.5, 0.9)
TASKS = (Task("classification"), Task("multilabel"), Task("regression"), Task("gaussian"), quantiles(*LEVELS))


def make_members(
    task: Task, seed: int, members: int, n: int = 60, positions: tuple[int, ...] = (), ignored: float = 0.0
) -> tuple[list[Array], Array]:
    """Values of m members and their common target.

    Args:
        positions: of a sample; labels have none.
        ignored: the share of targets that take no part.
    """
    rng = np.random.default_rng(seed)
    shape = (n, LABELS) if task.kind == "multilabel" else (n, *positions)
    noise = rng.uniform(0.2, 3, members)
    if task.kind == "classification":
        target = rng.integers(0, CLASSES, shape)
        scores = [np.eye(CLASSES)[target] * 2 + s * rng.normal(size=(*shape, CLASSES)) for s in noise]
        values = [np.exp(own) / np.exp(own).sum(axis=-1, keepdims=True) for own in scores]
    elif task.kind == "multilabel":
        target = rng.integers(0, 2, shape)
        values = [1 / (1 + np.exp(-(2 * target - 1) * 1.5 - s * rng.normal(size=shape))) for s in noise]
    else:
        target = 10 * rng.normal(size=shape) + 30
        mean = [target + rng.normal() + 5 * s * rng.normal(size=shape) for s in noise]
        if task.kind == "regression":
            values = mean
        elif task.kind == "gaussian":
            values = [
                np.stack([own, (5 * s) ** 2 * rng.uniform(0.3, 3, shape)], axis=-1)
                for own, s in zip(mean, noise, strict=True)
            ]
        else:
            spread = np.array([-1.3, 0, 1.3]) * 5
            values = [own[..., None] + s * spread for own, s in zip(mean, noise, strict=True)]
    if ignored:
        drop = rng.random(shape) < ignored
        drop.flat[0] = False
        target = np.where(drop, -100, target) if target.dtype.kind == "i" else np.where(drop, np.nan, target)
    return [own.astype(np.float32) for own in values], target
