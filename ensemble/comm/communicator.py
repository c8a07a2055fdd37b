"""How the workers of one member communicate: the `Communicator` protocol, and `SingleRank` for one worker.

All ranks make the same calls in the same order; a *collective* is complete on a rank when it has what it needs,
not when all have. Reductions leave the same bits on every rank that gets them. A communicator is used by one
thread at a time; a thread that talks while another does takes a group of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:
    import torch

Op = Literal["sum", "max", "min"]
Collective = Literal["all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast", "reduce"]


def count_sent_bytes(collective: Collective, size: int, world: int) -> float:
    """Bytes that each of `world` ranks sends on the average.

    Args:
        size: bytes of the tensor that the rank hands over.
    """
    if collective == "all_gather":
        return float(size * (world - 1))
    times = 2 if collective == "all_reduce" else 1
    return times * size * (world - 1) / world


class CommunicatorError(RuntimeError):
    """A collective failed: a worker of the member is gone, late, or the network is.

    Attributes:
        lost_ranks: the ranks to blame, as the member counts them; empty where nobody is known to be.
    """

    def __init__(self, message: str, lost_ranks: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.lost_ranks = tuple(lost_ranks)


class Pending(Protocol):
    """A collective that is under way; its tensor is not to be touched before `wait` returns."""

    def wait(self) -> None:
        """Block until it is complete (on CUDA: until the current stream waits for it)."""


class Communicator(Protocol):
    """The workers of one member. Every method but `close` raises `CommunicatorError` when a peer is lost."""

    @property
    def rank(self) -> int:
        """This worker, 0 <= rank < world."""

    @property
    def world(self) -> int:
        """How many workers."""

    @property
    def sent_bytes(self) -> float:
        """What this rank has sent so far, groups included, by the formulas of `ensemble.comm.communicator`."""

    def all_reduce_(self, tensor: torch.Tensor, op: Op = "sum") -> None:
        """Replace `tensor` by its reduction over all ranks."""

    def start_all_reduce_(self, tensor: torch.Tensor, op: Op = "sum") -> Pending:
        """The same without waiting; several may be under way, begun in the same order everywhere."""

    def reduce_(self, tensor: torch.Tensor, root: int = 0) -> None:
        """Replace rank `root`'s `tensor` by the sum over all ranks; what lies in the others' is undefined then."""

    def reduce_scatter(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks of [world * n, ...]: rank r gets the rows r * n to (r + 1) * n, [n, ...]."""

    def broadcast_(self, tensor: torch.Tensor, root: int = 0) -> None:
        """Replace `tensor` by the one of rank `root`."""

    def all_gather(self, tensor: torch.Tensor, *, equal: bool = False) -> list[torch.Tensor]:
        """Every rank's tensor, by rank. They may differ in their first dimension, in nothing else.

        Args:
            equal: they do not differ at all, as every rank knows: a message about their lengths is saved.
        """

    def all_to_all(self, tensor: torch.Tensor) -> torch.Tensor:
        """Of [world * n, ...], the rows r * n to (r + 1) * n go to rank r: what has come, by rank, alike."""

    def group(self, ranks: Sequence[int]) -> Communicator | None:
        """A communicator of some ranks, numbered anew in rank order; None on the ranks that are not of it.

        Every rank of this one asks for the same groups in the same order. A group of all ranks is a second way
        beside this one. Groups are closed with the communicator that made them.
        """

    def barrier(self, timeout_s: float) -> None:
        """Wait until all ranks are here."""

    def close(self) -> None:
        """Leave; peers that still wait for this rank get an error. May be called twice."""


class Completed:
    """What is complete already."""

    def wait(self) -> None:
        """Nothing to wait for."""


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
        """Itself, or nobody."""
        return self if list(ranks) == [0] else None

    def barrier(self, timeout_s: float) -> None:
        """Returns at once."""

    def close(self) -> None:
        """Nothing to leave."""
