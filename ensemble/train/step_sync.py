"""Agrees on the outcome of each step among the ranks of a member, in one message of three numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ensemble.comm import Communicator, Pending
from ensemble.train.job import STEP_ACTIONS, StepAction


@dataclass(slots=True)
class StepResult:
    """The result of a step, equal on all ranks.

    Attributes:
        command: to rank 0, or a checkpoint that it takes to be due, if any.
        skipped: whether an overflow of the loss scale skipped the step.
    """

    loss_sum: float
    command: StepAction | None
    is_finite: bool = True
    skipped: bool = False


class StepSync:
    """Sends before the backward pass and receives after the step, so that the exchange costs no time of its own.

    On CUDA nothing is read back before `receive`, the step's only wait for the device.
    """

    def __init__(self, comm: Communicator, device: torch.device) -> None:
        self._comm, self._device = comm, device
        self._command: StepAction | None = None
        self._loss_sum: Tensor | None = None
        self._message: Tensor | None = None
        self._pending: Pending | None = None

    def send(self, command: StepAction | None, loss_sum: Tensor | None) -> None:
        """Start a step's all-reduce.

        Args:
            command: only rank 0 has one.
            loss_sum: the sum of the losses of this rank's samples; None where it has no sample.
        """
        self._command, self._loss_sum = command, loss_sum
        if self._comm.world == 1:
            return
        message = self._message = torch.zeros(3, dtype=torch.float64, device=self._device)
        if command is not None:
            message[0] = STEP_ACTIONS.index(command) + 1
        if loss_sum is not None:
            message[1] = torch.logical_not(torch.isfinite(loss_sum))
            message[2] = loss_sum
        self._pending = self._comm.start_all_reduce_(message)

    def receive(self) -> StepResult:
        """Wait for the result; the same on all ranks."""
        if self._comm.world == 1:
            loss_sum = 0.0 if self._loss_sum is None else float(self._loss_sum)
            return StepResult(loss_sum, self._command, math.isfinite(loss_sum))
        assert self._pending is not None and self._message is not None
        self._pending.wait()
        code, non_finite_ranks, loss_sum = self._message.tolist()
        return StepResult(loss_sum, STEP_ACTIONS[int(code) - 1] if code else None, non_finite_ranks == 0)
