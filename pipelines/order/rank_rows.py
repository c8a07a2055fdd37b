"""The rows of each epoch that one data-parallel rank reads, counted one after the other.

A loader with preparation workers of its own has them prepare just these. A pure function of integers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pipelines.order.epoch_order import batch_bounds, rank_bounds, steps_per_epoch


@dataclass(frozen=True)
class RankRows:
    """The rows of a rank in an epoch of n samples, in the order in which it reads them.

    Attributes:
        n: samples in an epoch.
        batch_size: samples in a global batch.
        drop_last: whether an epoch's last, smaller batch is left out.
    """

    n: int
    batch_size: int
    rank: int = 0
    world: int = 1
    drop_last: bool = False

    @property
    def steps(self) -> int:
        """Global batches in an epoch."""
        return steps_per_epoch(self.n, self.batch_size, drop_last=self.drop_last)

    @property
    def per_batch(self) -> int:
        first, last = rank_bounds(0, min(self.n, self.batch_size), self.rank, self.world)
        return last - first

    @property
    def per_epoch(self) -> int:
        return self.bounds(self.steps - 1)[1] if self.steps else 0

    def bounds(self, step: int) -> tuple[int, int]:
        """The rows [start, stop) of a global batch, counted from the epoch's start; past the last step: none."""
        start = step * self.per_batch
        if step >= self.steps:
            return self.per_epoch, self.per_epoch
        first, last = self._places(step)
        return start, start + last - first

    def places(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """The places [first, last) in the epoch of the rows [start, stop), piece by piece."""
        step = start // self.per_batch if self.per_batch else self.steps - 1
        step = min(step, self.steps - 1)  # the last batch's share may be larger than a whole one's by rounding
        while start < stop:
            begin, end = self.bounds(step)
            first, _ = self._places(step)
            until = min(stop, end)
            if start < until:
                yield first + start - begin, first + until - begin
                start = until
            step += 1

    def _places(self, step: int) -> tuple[int, int]:
        return rank_bounds(*batch_bounds(self.n, self.batch_size, step), self.rank, self.world)
