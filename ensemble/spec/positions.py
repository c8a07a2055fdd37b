"""Which positions of samples count where all predictions are too many: to be fitted to, or to be kept.

They are drawn, as every k-th might be a column of an image, and depend on the layout alone: all members have the
same ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ensemble.spec.task import IGNORED, Kind, Task

if TYPE_CHECKING:
    from ensemble.spec.ensemble import Ensemble

FEWEST = 1024
"""Positions of a sample from which on a part stands for all; below, they may be targets of different units."""

PIECE = 2**20
"""Numbers of one array that are worked on at once: temporaries stay near the processor's cache."""

TAILS: dict[Kind, int] = {"classification": 1, "regression": 0, "gaussian": 1, "quantiles": 1}
"""How many axes of values come after those of positions; of other tasks a sample cannot be divided."""


def count_positions(task: Task, shape: Sequence[int]) -> int:
    """How many positions a sample of values [n, ...] has that can be divided; 1 where it cannot."""
    count = math.prod(shape[1 : len(shape) - TAILS[task.kind]]) if task.kind in TAILS else 1
    return count if count >= FEWEST else 1


def choose_positions(task: Task, shape: Sequence[int], most: float) -> Any | None:
    """The positions of each sample, ascending, of which values [n, ...] are `most` numbers; None: all."""
    positions, size = count_positions(task, shape), math.prod(shape)
    if positions == 1 or size <= most:
        return None
    chosen = np.random.default_rng(0).choice(positions, max(1, int(positions * most / size)), replace=False)
    return np.sort(chosen)


def choose_kept(ensemble: Ensemble, task: Task, row: Sequence[int]) -> tuple[Any | None, str]:
    """The positions of which a member's predictions are kept, as long as they are within the declared bound.

    Args:
        row: the shape of what is predicted of a sample.

    Returns:
        The positions, int64 [k], None for all or nothing; and why these are not all, else "".
    """
    samples = sum(len(split) for split in (ensemble.valid, ensemble.test) if split is not None)
    size, gb, shape = count_bytes(ensemble, task, row), ensemble.keep_predictions_gb, (samples, *row)
    if size <= gb * 1e9:
        return None, ""
    why = (
        f"the predictions of {shape[0]:,} samples of shape {list(row)} take {size / 1e9:.3g} GB a member, more "
        f"than Ensemble.keep_predictions_gb={gb:g}"
    )
    most = math.prod(shape) * gb * 1e9 / size
    kept = None if callable(ensemble.combine) else choose_positions(task, shape, most)
    if kept is None:
        return None, f"{why}, and a part of a sample cannot be used: none are saved; declare a larger limit"
    return kept, f"{why}: {len(kept):,} of the {count_positions(task, shape):,} positions of each sample are kept"


def count_bytes(ensemble: Ensemble, task: Task, row: Sequence[int]) -> int:
    """How much the predictions of a member on all splits take, with their targets; see `choose_kept`."""
    samples = sum(len(split) for split in (ensemble.valid, ensemble.test) if split is not None)
    targets = 0 if task.kind == "free" else math.prod(row[: len(row) - TAILS.get(task.kind, 0)])
    return samples * (4 * math.prod(row) + 8 * targets)


def take_positions(array: Any, positions: Any, tail: int) -> Any:
    """[n, k, ...] of these k positions (a slice, or integers) of [n, ...], whose last `tail` axes stay."""
    end = array.ndim - tail
    return array.reshape(len(array), math.prod(array.shape[1:end]), *array.shape[end:])[:, positions]


def locate(lengths: Any, longest: Sequence[int] | None = None) -> Any:
    """Which of the positions [n, *longest] samples of these lengths [n, axes] have; None: those of the longest."""
    longest = lengths.max(axis=0) if longest is None else longest
    is_own = np.ones((len(lengths), *longest), dtype=bool)
    for axis, length in enumerate(longest):
        inside = np.arange(length) < lengths[:, axis, None]
        is_own &= inside.reshape(-1, *(length if at == axis else 1 for at in range(len(longest))))
    return is_own


def fill_up(
    flat: Any,
    lengths: Any,
    longest: Sequence[int] | None = None,
    *,
    is_target: bool = False,
    out: Callable[..., Any] = np.empty,
) -> Any:
    """The positions [N, ...] of samples of unlike lengths [n, axes] as [n, *longest, ...]. What is added is a
    target that takes no part, or the values of the first position.
    """
    is_own = locate(lengths, longest)
    nothing = np.nan if flat.dtype.kind == "f" else IGNORED
    filled = out((*is_own.shape, *flat.shape[1:]), flat.dtype)
    filled[...] = nothing if is_target else flat[0] if len(flat) else 0
    filled[is_own] = flat
    return filled


def list_pieces(task: Task, shape: Sequence[int]) -> list[tuple[slice, slice]]:
    """Divide values [n, ...] into some samples, or some positions of one sample, each: for `take_positions`."""
    if task.kind not in TAILS or math.prod(shape) <= PIECE:
        return [(slice(None), slice(None))]
    own, positions = max(1, math.prod(shape[1:])), count_positions(task, shape)
    if own <= PIECE:
        step = PIECE // own
        return [(slice(first, first + step), slice(None)) for first in range(0, shape[0], step)]
    step = max(1, PIECE * positions // own)
    parts = [slice(first, first + step) for first in range(0, positions, step)]
    return [(slice(row, row + 1), part) for row in range(shape[0]) for part in parts]
