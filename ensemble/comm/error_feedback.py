"""The residuals of error feedback: over a step that may be reverted, and over a change of the number of ranks.

All values sent and the residuals add up to the sum of all gradients, also when a member resumes with more ranks:
each new rank gets an equal share of the sum of the residuals.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from ensemble.comm.communicator import Communicator, Pending
from ensemble.comm.reductions import ExchangeStep
from ensemble.comm.worker_thread import WorkerThread, run_immediately

#: For each tensor of `Reduction.rank_state`, those of all ranks.
Shares = Sequence[Sequence[Tensor]]


def remaining_error(
    own: Sequence[Shares], numbers: Sequence[Sequence[int]], sizes: Mapping[int, int]
) -> dict[int, Tensor]:
    """The sum of all ranks' residuals, fp32 [values], by parameter number.

    Args:
        own: for each bucket. The first tensor has the residuals of the bucket's values, then padding; a second one
            is the residual of the rank's stripe, stripes in rank order.
        numbers: for each bucket, the numbers of its parameters in their order there.
        sizes: values of each parameter, by its number.
    """
    errors: dict[int, Tensor] = {}
    for shares, bucket in zip(own, numbers, strict=True):
        if not shares:
            continue
        ends = list(itertools.accumulate(sizes[number] for number in bucket))
        total = torch.stack(list(shares[0])).sum(dim=0)[: ends[-1]]
        if len(shares) > 1:
            total += torch.cat(list(shares[1]))[: ends[-1]]
        for number, end in zip(bucket, ends, strict=True):
            errors[number] = total[end - sizes[number] : end]
    return errors


class CompressedReduction:
    """The base of compressed `Reduction`s: what a step may revert, and error feedback.

    Subclasses provide `values`, `present` and `_exchange`.

    Args:
        comm: the ranks; used by `thread` alone.
        thread: runs the exchange beside the backward pass; None runs it in the calling thread, which on CUDA only
            queues it on the device.
        sizes: values of the parameters.
        shared: the initial state that is equal on all ranks.
        residuals: the initial state of this rank, see `Reduction.rank_state`; empty without error feedback.
        revertible: whether a step may be reverted (a loss scale overflows), which needs the state twice.
    """

    present: Tensor

    def __init__(
        self,
        comm: Communicator,
        thread: WorkerThread | None,
        sizes: Sequence[int],
        *,
        shared: Sequence[Tensor] = (),
        residuals: Sequence[Tensor],
        revertible: bool,
    ) -> None:
        self._comm, self._thread, self._shared = comm, thread, len(shared)
        ends = itertools.accumulate(sizes)
        self._places = [slice(end - size, end) for size, end in zip(sizes, ends, strict=True)]
        self._state = [*shared, *residuals]
        #: The state after the current step; one and the same unless steps are revertible.
        self._next_state = [tensor.clone() for tensor in self._state] if revertible else self._state

    def start(self, step: ExchangeStep) -> Pending:
        """See `Reduction`."""
        begin = run_immediately if self._thread is None else self._thread.start
        return begin(lambda: self._exchange(step))

    def end_step(self, applied: bool) -> None:
        """See `Reduction`."""
        if applied:
            self._state, self._next_state = self._next_state, self._state

    def rank_state(self) -> list[Tensor]:
        """See `Reduction`."""
        return self._state[self._shared :]

    def shared_state(self) -> list[Tensor]:
        """See `Reduction`."""
        return self._state[: self._shared]

    def _exchange(self, step: ExchangeStep) -> None:
        raise NotImplementedError

    @contextlib.contextmanager
    def _feed_back(
        self, number: int, values: Tensor, places: Sequence[slice], step: ExchangeStep
    ) -> Iterator[Tensor | None]:
        """Add a residual to the values, and yield the memory for the new one; None without error feedback.

        A parameter for which no rank has a gradient is left out of the exchange: its residual does not change.

        Args:
            number: of the residual.
            places: of the parameters `step.absent` in it.
        """
        if not self.rank_state():
            yield None
            return
        number += self._shared
        residual = self._state[number]
        before = [residual[place].clone() for place in places]
        values.add_(residual, alpha=step.loss_scale)
        new = self._next_state[number]
        yield new
        if step.loss_scale != 1:
            new.div_(step.loss_scale)
        for parameter, place, kept in zip(step.absent, places, before, strict=True):
            if not self.present[parameter]:
                new[place] = kept
