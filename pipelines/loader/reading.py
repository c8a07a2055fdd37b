"""Which part of a stream one rank of one consumer reads."""

from __future__ import annotations

from dataclasses import dataclass

from pipelines import order
from pipelines.checks import MOST_RANKS, check_integer


@dataclass(frozen=True)
class ReadRange:
    """What one rank of one consumer reads of a stream over n samples."""

    n: int
    batch_size: int
    epochs: range
    rank: int = 0
    world: int = 1
    drop_last: bool = False
    start_step: int = 0

    def __post_init__(self) -> None:
        for name, low in (("batch_size", 1), ("world", 1), ("start_step", 0)):
            object.__setattr__(self, name, check_integer(name, getattr(self, name), low))
        check_integer("world", self.world, 1, MOST_RANKS)
        rank = check_integer("rank", self.rank, 0, self.world - 1, f" of world {self.world}")
        object.__setattr__(self, "rank", rank)

    @property
    def steps(self) -> int:
        """Global batches in an epoch."""
        return order.steps_per_epoch(self.n, self.batch_size, drop_last=self.drop_last)

    def first_step(self, epoch: int) -> int:
        """The first step to read in an epoch."""
        return min(self.start_step, self.steps) if epoch == self.epochs.start else 0

    def places(self, step: int) -> tuple[int, int]:
        """Places [start, stop) of a global batch in its epoch."""
        return order.batch_bounds(self.n, self.batch_size, step)

    def own(self, start: int, stop: int) -> tuple[int, int]:
        """The part of a global batch that belongs to this rank."""
        return order.rank_bounds(start, stop, self.rank, self.world)
