"""A communicator that does as another one does; what it does otherwise is for its subclasses to say."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ensemble.comm.communicator import Communicator, Op, Pending

if TYPE_CHECKING:
    import torch


class Forwarding:
    """A `Communicator` of the same ranks as `base`, which does all the work; closing it closes `base`."""

    def __init__(self, base: Communicator) -> None:
        self.base = base

    @property
    def rank(self) -> int:
        """See `Communicator`."""
        return self.base.rank

    @property
    def world(self) -> int:
        """See `Communicator`."""
        return self.base.world

    @property
    def sent_bytes(self) -> float:
        """See `Communicator`."""
        return self.base.sent_bytes

    def all_reduce_(self, tensor: torch.Tensor, op: Op = "sum") -> None:
        """See `Communicator`."""
        self.base.all_reduce_(tensor, op)

    def start_all_reduce_(self, tensor: torch.Tensor, op: Op = "sum") -> Pending:
        """See `Communicator`."""
        return self.base.start_all_reduce_(tensor, op)

    def reduce_(self, tensor: torch.Tensor, root: int = 0) -> None:
        """See `Communicator`."""
        self.base.reduce_(tensor, root)

    def reduce_scatter(self, tensor: torch.Tensor) -> torch.Tensor:
        """See `Communicator`."""
        return self.base.reduce_scatter(tensor)

    def broadcast_(self, tensor: torch.Tensor, root: int = 0) -> None:
        """See `Communicator`."""
        self.base.broadcast_(tensor, root)

    def all_gather(self, tensor: torch.Tensor, *, equal: bool = False) -> list[torch.Tensor]:
        """See `Communicator`."""
        return self.base.all_gather(tensor, equal=equal)

    def all_to_all(self, tensor: torch.Tensor) -> torch.Tensor:
        """See `Communicator`."""
        return self.base.all_to_all(tensor)

    def group(self, ranks: Sequence[int]) -> Communicator | None:
        """See `Communicator`."""
        return self.base.group(ranks)

    def barrier(self, timeout_s: float) -> None:
        """See `Communicator`."""
        self.base.barrier(timeout_s)

    def close(self) -> None:
        """See `Communicator`."""
        self.base.close()
