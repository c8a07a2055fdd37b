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

_MASK = 2**64 - 1


def mix_integers(*parts: int) -> int:
    """63 bits of some integers: neighbouring arguments give unrelated values.

    The finalizer of SplitMix64 (Steele, Lea, Flood 2014), applied to one argument after the other.
    """
    value = 0
    for part in parts:
        value = (value + part + 0x9E3779B97F4A7C15) & _MASK
        value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
        value ^= value >> 31
    return value >> 1


@dataclass(frozen=True)
class ExchangeStep:
    """What an exchange is to know of its step.

    Attributes:
        key: for what is drawn at random: alike on all ranks.
        loss_scale: what the gradients are multiplied by (the loss scale); what is remembered is in units of 1.
        absent: the parameters for which this rank has no gradient, by their place in the bucket.
    """

    key: int
    loss_scale: float
    absent: Sequence[int]


class Reduction(Protocol):
    """One bucket's way over the network, with what it remembers from step to step.

    Attributes:
        values: [n], where this rank's gradients are put before `start` and the sums lie after it.
        present: one number for each parameter of the bucket: not 0 where this rank, and then any rank, has one.
    """

    values: Tensor
    present: Tensor

    def start(self, step: ExchangeStep) -> Pending:
        """Begin the exchange of what lies in `values` and `present`."""

    def end_step(self, applied: bool) -> None:
        """The step is over: whether its sums were used. Where they were not, nothing of it is remembered."""

    def rank_state(self) -> list[Tensor]:
        """What a resume needs of this rank alone, alike in number and shape on all; may be copied into.

        The first tensor begins with what the bucket's values still lack; a second is a stripe of that.
        """

    def shared_state(self) -> list[Tensor]:
        """What a resume needs that is the same on all ranks; may be copied into."""


class PlainAllReduce:
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

    def start(self, step: ExchangeStep) -> Pending:
        """See `Reduction`."""
        return self._comm.start_all_reduce_(self._message)

    def end_step(self, applied: bool) -> None:
        """Nothing is remembered."""

    def rank_state(self) -> list[Tensor]:
        """Nothing is remembered."""
        return []

    def shared_state(self) -> list[Tensor]:
        """Nothing is remembered."""
        return []
