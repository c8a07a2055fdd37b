"""What the workers of one member say to each other: the `Communicator` protocol, and `Alone` for a single one.

All ranks make the same calls in the same order; a *collective* is complete on a rank when it has what it needs,
not when all have. Reductions happen in place and leave the same bits on every rank.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:
    import torch

Op = Literal["sum", "max", "min"]


class CommunicatorError(RuntimeError):
    """A collective failed: a worker of the member is gone, late, or the network is."""


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

    def all_reduce_(self, tensor: torch.Tensor, op: Op = "sum") -> None:
        """Replace `tensor` by its reduction over all ranks."""

    def start_all_reduce_(self, tensor: torch.Tensor, op: Op = "sum") -> Pending:
        """The same without waiting; several may be under way, begun in the same order everywhere."""

    def broadcast_(self, tensor: torch.Tensor, root: int = 0) -> None:
        """Replace `tensor` by the one of rank `root`."""

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Every rank's tensor, by rank. They may differ in their first dimension, in nothing else."""

    def barrier(self, timeout_s: float) -> None:
        """Wait until all ranks are here."""

    def close(self) -> None:
        """Leave; peers that still wait for this rank get an error. May be called twice."""


class _Done:
    def wait(self) -> None:
        """Nothing to wait for."""


class Alone:
    """The communicator of a member with one worker: every collective is the identity and costs nothing."""

    rank = 0
    world = 1

    def all_reduce_(self, tensor: torch.Tensor, op: Op = "sum") -> None:
        """Leaves the tensor as it is."""

    def start_all_reduce_(self, tensor: torch.Tensor, op: Op = "sum") -> Pending:
        """Complete at once."""
        return _Done()

    def broadcast_(self, tensor: torch.Tensor, root: int = 0) -> None:
        """Leaves the tensor as it is."""

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """The tensor alone."""
        return [tensor]

    def barrier(self, timeout_s: float) -> None:
        """Returns at once."""

    def close(self) -> None:
        """Nothing to leave."""
