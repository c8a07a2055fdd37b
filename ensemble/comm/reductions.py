"""How one bucket of gradients is summed over the ranks: the `Reduction` protocol, and the plain all-reduce.

A bucket's gradients lie in one flat tensor. Beside it every parameter has a *presence*: whether this rank has a
gradient for it, and after the exchange how many ranks have (a codec may say 1 for any number).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ensemble.comm.communicator import Communicator, Pending


@dataclass(frozen=True)
class Step:
    """What an exchange is to know of its step.

    Attributes:
        key: for what is drawn at random: alike on all ranks.
        unit: what the gradients are multiplied by (the loss scale); what is remembered is in units of 1.
        absent: the parameters for which this rank has no gradient, by their place in the bucket.
    """

    key: int
    unit: float
    absent: Sequence[int]


class Reduction(Protocol):
    """One bucket's way over the network, with what it remembers from step to step.

    Attributes:
        values: [n], where this rank's gradients are put before `start` and the sums lie after it.
        present: one number for each parameter of the bucket: not 0 where this rank, and then any rank, has one.
    """

    values: Tensor
    present: Tensor

    def start(self, step: Step) -> Pending:
        """Begin the exchange of what lies in `values` and `present`."""

    def settle(self, taken: bool) -> None:
        """The step is over: whether its sums were used. Where they were not, nothing of it is remembered."""

    def memory(self) -> list[Tensor]:
        """What a resume needs of this rank alone, alike in number and shape on all; may be copied into.

        The first tensor begins with what the bucket's values still lack; a second is a stripe of that.
        """

    def common(self) -> list[Tensor]:
        """What a resume needs that is the same on all ranks; may be copied into."""


class AllReduced:
    """The sum as the communicator makes it.

    Args:
        n: values.  parameters: presences; they travel behind the values in the same message.
    """

    def __init__(
        self, comm: Communicator, n: int, parameters: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._comm = comm
        self._message = torch.zeros(n + parameters, dtype=dtype, device=device)
        self.values, self.present = self._message[:n], self._message[n:]

    def start(self, step: Step) -> Pending:
        """See `Reduction`."""
        return self._comm.start_all_reduce_(self._message)

    def settle(self, taken: bool) -> None:
        """Nothing is remembered."""

    def memory(self) -> list[Tensor]:
        """Nothing is remembered."""
        return []

    def common(self) -> list[Tensor]:
        """Nothing is remembered."""
        return []


class Memory:
    """What a reduction remembers: that of the steps that counted, and that of the step under way.

    They are one and the same unless a step may come to nothing.

    A parameter for which no rank has a gradient takes nothing out of the exchange, so what was remembered of it is
    not to be spent: `held` keeps it aside where that may be so.

    Args:
        kept: as it is before the first step.
        revertible: whether a step may come to nothing.
    """

    def __init__(self, kept: list[Tensor], revertible: bool) -> None:
        self.kept = kept
        self.new = [tensor.clone() for tensor in kept] if revertible else kept

    def held(self, number: int, places: Sequence[slice]) -> list[Tensor]:
        """Copies of what tensor `number` remembers at some places, before the step."""
        return [self.kept[number][place].clone() for place in places]

    def settle(self, taken: bool) -> None:
        """The step under way has ended: keep what is new, or what was."""
        if taken:
            self.kept, self.new = self.new, self.kept
