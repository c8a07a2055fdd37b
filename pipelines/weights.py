"""Weights samples by their `index`: members that read one stream learn from different samples.

A weights object maps indices, int64 [b], to weights, float32 [b], and is a pure function of them. A sample of
weight 0 is left out of this consumer's batches, and `batch["weight"]` says what the others are worth to it. Over
the samples of weight above 0 the mean is 1: weighted losses estimate the risk over the resampled data.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from pipelines.checks import check_any_integer, check_integer
from pipelines.errors import PipelineError
from pipelines.fingerprint import known_as
from pipelines.order.epoch_order import Indices, Words, derive_bytes, mix, permute

if TYPE_CHECKING:
    import torch

Weights = Callable[[Indices], npt.NDArray[np.float32]]
_DRAWN = 1 - math.exp(-1)  # the share of samples that a bootstrap sample has


@known_as("pipelines.weights.bootstrap", version=2)
@dataclass(frozen=True)
class Bootstrap:
    """See `bootstrap`."""

    seed: int

    def __call__(self, index: Indices) -> npt.NDArray[np.float32]:
        first, second = np.frombuffer(derive_bytes("bootstrap", self.seed, size=16), np.uint64)
        draws = mix(mix(index.astype(np.uint64) + first) + second)
        counts = np.searchsorted(_poisson_thresholds(), draws, side="right")
        return (counts * _DRAWN).astype(np.float32)


class HeldOut:
    """Base of weights that leave out the fold `held_out`."""

    held_out: int

    def __call__(self, index: Indices) -> npt.NDArray[np.float32]:
        return (~self.is_held_out(index)).astype(np.float32)

    def is_held_out(self, index: Indices) -> npt.NDArray[np.bool_]:
        return np.asarray(self.number(index) == self.held_out)

    def number(self, index: Indices) -> Indices:
        """Returns the fold of each sample, int64 [b]; PipelineError where an index is not below n."""
        raise NotImplementedError


@known_as("pipelines.weights.fold", version=2)
@dataclass(frozen=True)
class Fold(HeldOut):
    """See `fold`."""

    n: int
    k: int
    held_out: int
    seed: int

    def number(self, index: Indices) -> Indices:
        _check_indices(index, self.n)
        places = permute(index.astype(np.uint64), self.n, "folds", self.seed)
        bounds = np.array([self.n * number // self.k for number in range(self.k + 1)], np.int64)
        return np.searchsorted(bounds, places.astype(np.int64), side="right") - 1


@known_as("pipelines.weights.assigned_fold", version=2)
@dataclass(frozen=True)
class AssignedFold(HeldOut):
    """See `assigned_fold`."""

    folds: npt.NDArray[np.int64]
    held_out: int

    def number(self, index: Indices) -> Indices:
        _check_indices(index, len(self.folds))
        return self.folds[index]


@known_as("pipelines.weights.expanding_window", version=2)
@dataclass(frozen=True)
class ExpandingWindow:
    """See `expanding_window`."""

    places: npt.NDArray[np.int64]
    end: int
    first: int
    last: int

    def __call__(self, index: Indices) -> npt.NDArray[np.float32]:
        _check_indices(index, len(self.places))
        return (self.places[index] < self.end).astype(np.float32)

    def is_held_out(self, index: Indices) -> npt.NDArray[np.bool_]:
        _check_indices(index, len(self.places))
        places = self.places[index]
        return (self.first <= places) & (places < self.last)


@known_as("pipelines.weights.assigned", version=2)
@dataclass(frozen=True)
class Assigned:
    """See `assigned`."""

    weights: npt.NDArray[np.float32]

    def __call__(self, index: Indices) -> npt.NDArray[np.float32]:
        _check_indices(index, len(self.weights))
        return self.weights[index]


def bootstrap(seed: int) -> Bootstrap:
    """Weights each sample by how often a bootstrap sample draws it: Poisson(1) counts, keyed by (seed, index).

    They are scaled so that the mean over the samples that are drawn is 1; 36.8 % are not drawn. Poisson(1) is what
    the counts of n draws with replacement tend to, and needs neither n nor an array (Oza and Russell, "Online
    Bagging and Boosting", 2001). The counts add up to n only in the mean, with the standard deviation sqrt(n).

    Args:
        seed: an integer; each seed gives another bootstrap sample. All epochs have the same one.

    Returns:
        A function of indices, int64 [b], that returns weights, float32 [b].

    Raises:
        PipelineError: the seed is not an integer.

    Examples:
        >>> bootstrap(seed=0)(np.arange(5))
        array([...], dtype=float32)
    """
    return Bootstrap(check_any_integer("bootstrap: seed", seed))


def fold(n: int, k: int, held_out: int, seed: int = 0) -> Fold:
    """Weights the samples of one of k folds with 0, and all others with 1.

    The folds are a random partition of range(n), of sizes that differ by one at most, and a function of (n, k,
    seed) alone.

    Args:
        n: number of samples in the source.
        k: number of folds, 2 to n.
        held_out: the fold, 0 to k - 1, whose samples have weight 0.
        seed: an integer; each seed gives another partition.

    Returns:
        A function of indices, int64 [b], that returns weights, float32 [b]; it has a method `number(indices)` that
        returns the fold of each sample.

    Raises:
        PipelineError: an argument is not an integer or not in its range.

    Examples:
        >>> fold(n=4, k=2, held_out=0)(np.arange(4)).sum()
        np.float32(2.0)
    """
    n, k, held_out, seed = (
        check_any_integer(f"fold: {name}", value)
        for name, value in (("n", n), ("k", k), ("held_out", held_out), ("seed", seed))
    )
    if not 2 <= k <= n:
        raise PipelineError(f"fold: k must be between 2 and the number of samples, {n}; got {k}")
    if not 0 <= held_out < k:
        raise PipelineError(f"fold: held_out must be in 0..{k - 1}, got {held_out}")
    return Fold(n, k, held_out, seed)


def assigned_fold(folds: Indices, held_out: int) -> AssignedFold:
    """Weights the samples of one of several given folds with 0, and all others with 1.

    Args:
        folds: the fold of each sample, int64 [n], as `Source.number_folds` returns them.
        held_out: the fold whose samples have weight 0.

    Returns:
        A function as `fold` returns it.

    Raises:
        PipelineError: no sample is in that fold, or all are.

    Examples:
        >>> folds = source.number_folds(5, stratify="label")
        >>> loader = pipe.loader(32, weights=assigned_fold(folds, held_out=0))
    """
    folds = np.asarray(folds)
    held_out = check_any_integer("assigned_fold: held_out", held_out)
    if folds.ndim != 1 or folds.dtype.kind not in "iu":
        raise PipelineError(f"assigned_fold: folds must be integers [n], got {folds.dtype} {list(folds.shape)}")
    if not 0 < np.count_nonzero(folds == held_out) < len(folds):
        raise PipelineError(
            f"assigned_fold: fold {held_out} must have some, and not all, of the {len(folds)} samples"
        )
    return AssignedFold(folds.astype(np.int64), held_out)


def expanding_window(places: Indices, k: int, held_out: int, gap: int = 0) -> ExpandingWindow:
    """Weights the samples before one of k blocks in time with 1, and others with 0.

    The blocks are those of scikit-learn's `TimeSeriesSplit(k, gap=gap)`: n // (k + 1) samples each, the last k of
    the series. Before them is a start that no block holds out.

    Args:
        places: the place of each sample in the order of time, int64 [n], as `Source.rank` returns them.
        k: number of blocks, at least 2.
        held_out: the block, 0 to k - 1.
        gap: how many samples directly before the block have weight 0, too.

    Returns:
        A function of indices, int64 [b], that returns weights, float32 [b]; it has a method `is_held_out(index)`.

    Raises:
        PipelineError: an argument is not in its range, or no sample is left before the block.

    Examples:
        >>> loader = pipe.loader(32, weights=expanding_window(source.rank("day"), 5, held_out=0))
    """
    n = len(places)
    k = check_integer("expanding_window: k", k, 2)
    held_out = check_integer("expanding_window: held_out", held_out, 0, k - 1)
    gap = check_integer("expanding_window: gap", gap, 0)
    size = n // (k + 1)
    first = n - (k - held_out) * size
    if size == 0 or n - k * size - gap <= 0:
        raise PipelineError(
            f"expanding_window: {n} samples in {k} blocks with a gap of {gap} leave none to learn from before the "
            "first block: take fewer blocks or a smaller gap"
        )
    return ExpandingWindow(np.asarray(places, np.int64), first - gap, first, first + size)


def assigned(weights: npt.ArrayLike) -> Assigned:
    """Weights each sample as given, scaled so that the mean over the samples of weight above 0 is 1.

    Args:
        weights: the weight of each sample, [n], finite, at least 0, not all 0, as `Source.weigh_classes` gives.

    Returns:
        A function of indices, int64 [b], that returns weights, float32 [b].

    Raises:
        PipelineError: the weights are others.

    Examples:
        >>> loader = pipe.loader(32, weights=assigned(source.weigh_classes("label")))
    """
    values = np.asarray(weights, np.float64)
    if values.ndim != 1 or not (np.isfinite(values).all() and (values >= 0).all() and values.sum() > 0):
        raise PipelineError(f"assigned: weights [n] must be finite, at least 0 and not all 0, got {values!r:.100}")
    return Assigned((values * (np.count_nonzero(values) / values.sum())).astype(np.float32))


def weigh(weights: Weights, index: npt.NDArray[np.int64]) -> torch.Tensor:
    """Computes the weights of samples, float32 [b], and checks them.

    Args:
        weights: the user's weights.
        index: the index of each sample, int64 [b].
    """
    import torch

    values = np.asarray(weights(index), np.float32)
    if values.shape != index.shape or not (np.isfinite(values) & (values >= 0)).all():
        raise PipelineError(
            f"weights= must map indices [{len(index)}] to as many finite weights of at least 0, got "
            f"{values!r:.200}"
        )
    tensor = torch.empty(len(index))  # aligned, as all of a batch is
    tensor.numpy()[:] = values
    return tensor


def _check_indices(index: Indices, n: int) -> None:
    if index.size and not (index.min() >= 0 and index.max() < n):
        raise PipelineError(f"weights or folds of {n} samples have no sample {index.min()} to {index.max()}")


@functools.cache
def _poisson_thresholds() -> Words:
    """Returns P(X <= count) of a Poisson(1) variable in units of 2^-64, uint64 [20], up to where it reaches 1.

    Computed with fractions: exp() of a math library may differ in the last bit between machines.
    """
    inverse_e = sum(Fraction((-1) ** j, math.factorial(j)) for j in range(30))
    masses = [inverse_e / math.factorial(count) for count in range(21)]
    return np.array([int(sum(masses[: count + 1]) * 2**64) for count in range(20)], np.uint64)
