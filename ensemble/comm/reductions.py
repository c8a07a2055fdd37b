"""Sums one bucket of gradients over the ranks: the `Reduction` protocol, and the uncompressed all-reduce.

The gradients of a bucket are one flat tensor. In addition each parameter has a *presence*: whether this rank has a
gradient for it, and after the exchange how many ranks have one (a codec may report 1 for any number).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ensemble.comm.communicator import Communicator, Pending

_MASK = 2**64 - 1


def splitmix64(value: int) -> int:
    """Hash an integer to 64 bits by the finalizer of SplitMix64 (Steele, Lea, Flood 2014)."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def mix_integers(*parts: int) -> int:
    """Hash integers to 63 bits, one after the other by `splitmix64`; close arguments give unrelated values."""
    value = 0
    for part in parts:
        value = splitmix64(value + part)
    return value >> 1


@dataclass(frozen=True)
class ExchangeStep:
    """The parameters of one exchange.

    Attributes:
        key: of the random numbers; the same on all ranks.
        loss_scale: the factor of the gradients; residuals are kept without it.
        absent: the indices, in the bucket, of the parameters for which this rank has no gradient.
    """

    key: int
    loss_scale: float
    absent: Sequence[int]


class Reduction(Protocol):
    """Sums one bucket over the ranks, with state that is kept from step to step.

    Attributes:
        values: [n], this rank's gradients before `start`, the sums when it is complete.
        present: [parameters], not 0 where this rank, and when complete any rank, has a gradient.
    """

    values: Tensor
    present: Tensor

    def start(self, step: ExchangeStep) -> Pending:
        """Start the exchange of `values` and `present`."""

    def end_step(self, applied: bool) -> None:
        """End the step; where its sums were not applied, restore the state from before it."""

    def rank_state(self) -> list[Tensor]:
        """The state of this rank, to be saved and copied into; the same shapes on all ranks.

        The first tensor begins with the residual of the bucket's values; a second is the residual of a stripe.
        """

    def shared_state(self) -> list[Tensor]:
        """The state that is equal on all ranks, to be saved and copied into."""


class PlainAllReduce:
    """The communicator's own all-reduce.

    Args:
        n: number of values.
        parameters: number of presences, which follow the values in the same message.
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
        """There is no state."""

    def rank_state(self) -> list[Tensor]:
        """There is no state."""
        return []

    def shared_state(self) -> list[Tensor]:
        """There is no state."""
        return []
