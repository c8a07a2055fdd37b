"""The residuals of error feedback: over a step that may be reverted, and over a change of the number of ranks.

All values sent and the residuals add up to the sum of all gradients (`ensemble.comm.compressed_all_reduce`), also
when a member resumes with more ranks. The exchange is a *sum* over the ranks, so only the sum of the residuals
matters, not which rank holds them. Each new rank gets an equal share: the whole would be the largest value that a
single rank encodes, and its encoding would lose as much more.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

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


class StepState:
    """The state of a reduction before the current step and after it; one and the same unless steps are revertible.

    The exchange leaves out a parameter for which no rank has a gradient, so its residual must not change: `copies`
    saves it where that may be the case.

    Args:
        initial: the state before the first step.
        revertible: whether a step may be reverted.
    """

    def __init__(self, initial: list[Tensor], revertible: bool) -> None:
        self.current = initial
        self.next = [tensor.clone() for tensor in initial] if revertible else initial

    def copies(self, number: int, places: Sequence[slice]) -> list[Tensor]:
        """Copies of some slices of state tensor `number`, before the step."""
        return [self.current[number][place].clone() for place in places]

    def end_step(self, applied: bool) -> None:
        """End the step: accept the new state, or keep the one from before."""
        if applied:
            self.current, self.next = self.next, self.current
