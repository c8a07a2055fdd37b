"""An order in which each class has an exact share of the positions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np

from pipelines.errors import PipelineError
from pipelines.fingerprint import describe_array, digest, known_as
from pipelines.order.epoch_order import Indices, permute
from pipelines.order.sampled_order import SampledOrder, group_by_class


@known_as("pipelines.sampling.mixed")
class MixedOrder(SampledOrder):
    """Gives class c exactly `counts[c]` positions of each epoch, evenly spread.

    Position j of a class lies at (j + 1/2) / count of the epoch (Webster's method): of the first t positions a
    class has its share, within 1/2 + share * (classes - 2) / 2. It is the use number e * count + permutation_e(j)
    of the class, which takes its records in a random order that all epochs share.
    """

    def __init__(self, codes: Indices, counts: Sequence[int], seed: int) -> None:
        self.positions = sum(counts)
        self.digest = digest([describe_array(codes), list(counts)])
        self._counts, self._seed = counts, seed
        by_class = group_by_class(codes, len(counts), "mixed", seed)
        self._records = np.split(by_class, np.cumsum(np.bincount(codes, minlength=len(counts)))[:-1])
        # The pattern of classes repeats: of 7,000 and 3,000 positions it is that of 7 and 3.
        self._round = np.array(counts) // math.gcd(*counts)
        numbers = np.concatenate([np.arange(count) for count in self._round])
        classes = np.repeat(np.arange(len(counts)), self._round)
        order = np.argsort((numbers + 0.5) / self._round[classes], kind="stable")
        self._classes = classes[order].astype(np.min_scalar_type(len(counts)))
        self._numbers = numbers[order].astype(np.min_scalar_type(int(self._round.max())))

    def __call__(self, epoch: int, start: int, stop: int) -> Indices:
        rounds, places = np.divmod(np.arange(start, stop), len(self._classes))
        classes = self._classes[places]
        numbers = self._numbers[places] + rounds * self._round[classes]
        records = np.empty(stop - start, np.int64)
        for code in np.unique(classes).tolist():
            is_own, own, count = classes == code, self._records[code], self._counts[code]
            uses = permute(numbers[is_own].astype(np.uint64), count, "mixed", self._seed, epoch, code)
            records[is_own] = own[(uses.astype(np.int64) + epoch * count) % len(own)]
        return records


def count_positions(shares: Sequence[float], sizes: Sequence[int], samples: int | None) -> list[int]:
    """Divides the positions of an epoch among classes by shares.

    Args:
        shares: of each class, at least 0; they need not sum to 1.
        sizes: records of each class.
        samples: number of positions; None: the most with which an epoch has no record twice.

    Returns:
        The positions of each class: its share, rounded down, or up where most of a position is missing.
    """
    try:
        exact = [Fraction(str(float(share))) for share in shares]  # 7/10 for 0.7, which no float is
    except (TypeError, ValueError):
        exact = [Fraction(-1)]
    if min(exact) < 0 or not sum(exact):
        raise PipelineError(f"sampling.mixed() needs finite shares of at least 0, not all 0, got {list(shares)}")
    exact = [share / sum(exact) for share in exact]
    if samples is None:
        samples = math.floor(min(size / share for size, share in zip(sizes, exact, strict=True) if share))
    exact = [share * samples for share in exact]
    counts = [math.floor(count) for count in exact]
    by_rest = sorted(range(len(counts)), key=lambda place: counts[place] - exact[place])
    for place in by_rest[: samples - sum(counts)]:
        counts[place] += 1
    return counts
