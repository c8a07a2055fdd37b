"""What the ranks of a member must agree on after each step, in one message of three numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ensemble.comm import Communicator, Pending
from ensemble.train.job import COMMANDS, Command


@dataclass(frozen=True)
class Signal:
    """What came of a step on all ranks together.

    Attributes:
        command: what rank 0 was asked to do, if anything.
        finite: whether every rank's loss was a number.
        loss_sum: the losses of the global batch, added up.
    """

    command: Command | None
    finite: bool
    loss_sum: float


class StepSync:
    """Sent before the backward pass, received after the step, so that the exchange costs no time of its own.

    On CUDA nothing is read back before `receive`, the step's only wait for the device.
    """

    def __init__(self, comm: Communicator, device: torch.device) -> None:
        self._comm = comm
        self._device = device
        self._command: Command | None = None
        self._sum: Tensor | None = None
        self._flags: Tensor | None = None
        self._pending: Pending | None = None

    def send(self, command: Command | None, loss_sum: Tensor | None) -> None:
        """Begin a step's message.

        Args:
            command: what this rank was asked; only rank 0 is asked anything.
            loss_sum: the losses of this rank's samples added up, None where it has no sample.
        """
        self._command, self._sum = command, None if loss_sum is None else loss_sum.detach()
        if self._comm.world == 1:
            return
        flags = torch.zeros(3, dtype=torch.float64, device=self._device)
        if command is not None:
            flags[0] = COMMANDS.index(command) + 1
        if self._sum is not None:
            flags[1] = torch.logical_not(torch.isfinite(self._sum))
            flags[2] = self._sum
        self._flags = flags
        self._pending = self._comm.start_all_reduce_(flags)

    def receive(self) -> Signal:
        """The message of all ranks."""
        if self._comm.world == 1:
            loss_sum = 0.0 if self._sum is None else float(self._sum)
            return Signal(self._command, math.isfinite(loss_sum), loss_sum)
        assert self._pending is not None and self._flags is not None
        self._pending.wait()
        code, infinite, loss_sum = self._flags.tolist()
        return Signal(COMMANDS[int(code) - 1] if code else None, infinite == 0, loss_sum)
