"""The scores of conformal prediction, their threshold, and how the penalty of regularised sets is chosen."""

from __future__ import annotations

import math
from typing import Any, Literal

import numpy as np

from ensemble.combine.metrics import Array, find_known
from pipelines.order.epoch_order import derive_bytes, mix

SetMethod = Literal["thr", "aps", "raps"]

PENALTIES = (0.001, 0.01, 0.1, 0.2, 0.5)
"""Of which `lam` of raps is chosen, as by Angelopoulos et al. 2021."""

TUNING = 0.2
"""The fraction of the calibration samples that choose the penalty of raps, and nothing else."""

_CHUNK = 2**20
"""Elements of values that are worked on at once."""

_ROUNDING = 1e-9
"""Relative rounding of (n + 1) * level: 10 * 0.9 is to be 9, and not a hair more."""


def find_threshold(scores: Array, part: Array, level: float) -> float:
    """The threshold of split conformal prediction, every sample counting once.

    The smallest t for which the sum over samples of the fraction of their scores that are not above t is at least
    (n + 1) * level; with one position a sample it is the ceil((n + 1) * level)-th smallest score.

    Args:
        scores: float64 [n, ...].
        part: bool [n, ...], which take part; a sample without any is not counted.
        level: between 0 and 1.

    Returns:
        The threshold; inf where n samples are too few for the level.
    """
    weight = weigh_positions(part)
    known = scores[part]
    order = np.argsort(known, kind="stable")
    samples = round(float(weight.sum()))
    wanted = (samples + 1) * level * (1 - _ROUNDING)
    at = int(np.searchsorted(np.cumsum(weight[order]), wanted))
    # The last sum is `samples` but for rounding, which is to hide no sample and to invent none.
    if wanted > samples or not len(known):
        return math.inf
    return float(known[order[min(at, len(known) - 1)]])


def score_classes(
    method: SetMethod, values: Array, draws: Array | None = None, *, lam: float = 0.0, k_reg: int = 0
) -> Array:
    """The score of every class: probabilities [n, ..., C] -> float64 of that shape.

    Args:
        draws: float64 [n], between 0 and 1: of randomised aps or raps.
        lam: of raps: what is added for each rank beyond `k_reg`.
        k_reg: of raps: the last rank that costs nothing, from 1.
    """
    p = np.asarray(values, dtype=np.float64)
    if method == "thr":
        return 1 - p
    order = np.argsort(-p, axis=-1, kind="stable")
    before = np.zeros(p.shape)
    np.cumsum(np.take_along_axis(p, order, axis=-1)[..., :-1], axis=-1, out=before[..., 1:])
    if method == "raps":
        before += lam * np.maximum(np.arange(1, p.shape[-1] + 1) - k_reg, 0)
    scores = np.empty(p.shape)
    np.put_along_axis(scores, order, before, axis=-1)
    return scores if draws is None else scores + draws.reshape(-1, *[1] * (p.ndim - 1)) * p


def score_true(
    method: SetMethod, values: Array, target: Array, draws: Array | None = None, **penalty: Any
) -> Array:
    """The score of the true class of each position, [n, ...]; of an ignored one that of class 0.

    Args:
        values: [n, ..., C].
        target: [n, ...].
        penalty: `lam` and `k_reg` of raps.
    """
    named = np.where(find_known(target), target, 0).astype(np.int64)[..., None]
    scores = np.empty(target.shape)
    for at in list_chunks(values):
        every = score_classes(method, values[at], None if draws is None else draws[at], **penalty)
        scores[at] = np.take_along_axis(every, named[at], axis=-1)[..., 0]
    return scores


def choose_tuning(index: Array) -> Array:
    """Which samples choose the penalty of raps, bool [n]: `TUNING` of them, rounded up, by a hash of the index.

    Args:
        index: int [n].
    """
    order = np.argsort(draw_uniform(0, index, "tune"), kind="stable")
    chosen = np.zeros(len(index), dtype=bool)
    chosen[order[: math.ceil(len(index) * TUNING)]] = True
    return chosen


def choose_penalty(values: Array, target: Array, level: float, draws: Array | None = None) -> dict[str, Any]:
    """The penalty of raps (Angelopoulos, Bates, Malik and Jordan 2021, appendix E, algorithms 3 and 4).

    `k_reg` is the rank of the true class that split conformal prediction finds at this level, the number of
    classes where samples are too few. `lam` is that of `PENALTIES` whose sets, with a threshold of these samples,
    are the smallest on them; of several the least.

    Args:
        values: [n, ..., C], of samples that are not to calibrate the threshold.
        target: [n, ...].
        level: the probability with which the truth is to be covered.
        draws: float64 [n]: of randomised raps.

    Returns:
        `lam` and `k_reg`.
    """
    part, classes = find_known(target), values.shape[-1]
    weight, sizes = weigh_positions(part), []
    k_reg = int(min(find_threshold(_rank_true(values, target), part, level), classes))
    for lam in PENALTIES:
        penalty: dict[str, Any] = {"lam": lam, "k_reg": k_reg}
        threshold = find_threshold(score_true("raps", values, target, draws, **penalty), part, level)
        size = np.empty(target.shape)
        for at in list_chunks(values):
            scores = score_classes("raps", values[at], None if draws is None else draws[at], **penalty)
            size[at] = (scores <= threshold).sum(axis=-1)
        sizes.append(float((size[part] * weight).sum()))
    return {"lam": PENALTIES[int(np.argmin(sizes))], "k_reg": k_reg}


def _rank_true(values: Array, target: Array) -> Array:
    """The rank of the true class, from 1, as `score_classes` orders classes: [n, ...]."""
    named = np.where(find_known(target), target, 0).astype(np.int64)[..., None]
    true = np.take_along_axis(values, named, axis=-1)
    before = np.arange(values.shape[-1]) < named
    rank: Array = 1.0 + ((values > true) | ((values == true) & before)).sum(axis=-1)
    return rank


def draw_uniform(seed: int, index: Array, purpose: str) -> Array:
    """A number between 0 and 1 for each sample, a function of the arguments alone: float64 [n].

    Args:
        index: int [n].
        purpose: numbers of two purposes are independent.
    """
    key = np.frombuffer(derive_bytes("conformal", purpose, seed, size=8), np.uint64)
    words = mix(mix(np.asarray(index, dtype=np.int64).astype(np.uint64) ^ key) + key)
    numbers: Array = (words >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return numbers


def weigh_positions(part: Array) -> Array:
    """The weight of each position that takes part, in order: 1 / (their number in its sample): float64."""
    flat = part.reshape(len(part), -1) if part.size else part.reshape(len(part), 0)
    count = flat.sum(axis=1)
    weight: Array = 1.0 / np.repeat(count, count)
    return weight


def list_chunks(values: Array) -> list[slice]:
    """Slices of the first axis, of about a million elements each."""
    step = max(1, _CHUNK * len(values) // max(1, values.size))
    return [slice(start, start + step) for start in range(0, len(values), step)]
