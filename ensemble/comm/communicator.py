"""How the workers of one member communicate: the `Communicator` protocol, and `SingleRank` for one worker.

All ranks make the same calls in the same order. A *collective* is complete on a rank when that rank has its
result. Reductions give the same bits on all ranks. One thread at a time uses a communicator; others use groups
of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:
    import torch

Op = Literal["sum", "max", "min"]
Collective = Literal["all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast", "reduce"]


def count_sent_bytes(collective: Collective, size: int, world: int) -> float:
    """Bytes that each of `world` ranks sends, on average.

    Args:
        size: of the tensor on one rank, bytes.
    """
    if collective == "all_gather":
        return float(size * (world - 1))
    times = 2 if collective == "all_reduce" else 1
    return times * size * (world - 1) / world


class CommunicatorError(RuntimeError):
    """A collective failed: a worker of the member was lost, was late, or the network failed.

    Attributes:
        lost_ranks: the ranks that are lost, as the member numbers them; empty where none is known to be.
    """

    def __init__(self, message: str, lost_ranks: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.lost_ranks = tuple(lost_ranks)


class Pending(Protocol):
    """A collective in progress; its tensor must not be used before `wait` returns."""

    def wait(self) -> None:
        """Block until it is complete (on CUDA: until the current stream waits for it)."""


class Communicator(Protocol):
    """The workers of one member. Every method but `close` raises `CommunicatorError` when a peer is lost."""

    @property
    def rank(self) -> int:
        """The number of this worker, 0 <= rank < world."""

    @property
    def world(self) -> int:
        """The number of workers."""

    @property
    def sent_bytes(self) -> float:
        """Bytes that this rank has sent so far, groups included (`count_sent_bytes`)."""

    def all_reduce_(self, tensor: torch.Tensor, op: Op = "sum") -> None:
        """Replace `tensor` by its reduction over all ranks."""

    def start_all_reduce_(self, tensor: torch.Tensor, op: Op = "sum") -> Pending:
        """Start `all_reduce_` without waiting; several may be in progress, in the same order on all ranks."""

    def reduce_(self, tensor: torch.Tensor, root: int = 0) -> None:
        """Replace rank `root`'s `tensor` by the sum over all ranks; the other ranks' is undefined then."""

    def reduce_scatter(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum [world * n, ...] over all ranks; rank r gets its rows r * n to (r + 1) * n, [n, ...]."""

    def broadcast_(self, tensor: torch.Tensor, root: int = 0) -> None:
        """Replace `tensor` by that of rank `root`."""

    def all_gather(self, tensor: torch.Tensor, *, equal: bool = False) -> list[torch.Tensor]:
        """Return every rank's tensor, by rank. Their shapes may differ in the first dimension only.

        Args:
            equal: the shapes are equal, which saves a message about their lengths. The same on all ranks.
        """

    def all_to_all(self, tensor: torch.Tensor) -> torch.Tensor:
        """Send the rows r * n to (r + 1) * n of [world * n, ...] to rank r; returns the received rows, by rank."""

    def group(self, ranks: Sequence[int]) -> Communicator | None:
        """Make a communicator of some ranks, renumbered in rank order; None on ranks that are not in it.

        Every rank makes the same groups in the same order. A group of all ranks is independent of this
        communicator. Groups are closed with the communicator that made them.
        """

    def barrier(self, timeout_s: float) -> None:
        """Wait until all ranks have called it."""

    def close(self) -> None:
        """Leave the group; peers that still wait for this rank get an error. May be called twice."""


class Completed:
    """A `Pending` that is complete."""

    def wait(self) -> None:
        """Return at once."""


class SingleRank:
    """The communicator of a member with one worker: every collective is the identity and costs nothing."""

    rank = 0
    world = 1
    sent_bytes = 0.0

    def all_reduce_(self, tensor: torch.Tensor, op: Op = "sum") -> None:
        """Leaves the tensor as it is."""

    def start_all_reduce_(self, tensor: torch.Tensor, op: Op = "sum") -> Pending:
        """Complete at once."""
        return Completed()

    def reduce_(self, tensor: torch.Tensor, root: int = 0) -> None:
        """Leaves the tensor as it is."""

    def reduce_scatter(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor."""
        return tensor

    def broadcast_(self, tensor: torch.Tensor, root: int = 0) -> None:
        """Leaves the tensor as it is."""

    def all_gather(self, tensor: torch.Tensor, *, equal: bool = False) -> list[torch.Tensor]:
        """The tensor alone."""
        return [tensor]

    def all_to_all(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor."""
        return tensor

    def group(self, ranks: Sequence[int]) -> Communicator | None:
        """This communicator for `[0]`, else None."""
        return self if list(ranks) == [0] else None

    def barrier(self, timeout_s: float) -> None:
        """Returns at once."""

    def close(self) -> None:
        """Nothing to leave."""
