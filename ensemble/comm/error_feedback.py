"""What error feedback remembers when a member goes on with more ranks than have written it down.

What was sent in all steps and what is remembered add up to the sum of all gradients
(`ensemble.comm.compressed_all_reduce`).
That has to hold over the change too. The exchange is a *sum* over the ranks, so what matters is the sum of what
the ranks remember, not who remembers it. Each of the new ranks takes an equal part: the whole would be the largest
of what a single rank encodes, and its encoding would lose as much more.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

#: For each tensor that a reduction remembers (`Reduction.rank_state`), that of every rank.
Shares = Sequence[Sequence[Tensor]]


def remaining_error(
    own: Sequence[Shares], numbers: Sequence[Sequence[int]], sizes: Mapping[int, int]
) -> dict[int, Tensor]:
    """What all ranks together remember of each parameter, fp32 [values], by the parameter's number.

    Args:
        own: of each bucket. The first tensor has a value for each of the bucket's, and then padding; a second one
            is a stripe, which the ranks have one after the other.
        numbers: of each bucket's parameters, in the order in which they lie there.
        sizes: values of each parameter, by its number.
    """
    found: dict[int, Tensor] = {}
    for shares, bucket in zip(own, numbers, strict=True):
        if not shares:
            continue
        ends = list(itertools.accumulate(sizes[number] for number in bucket))
        total = torch.stack(list(shares[0])).sum(dim=0)[: ends[-1]]
        if len(shares) > 1:
            total += torch.cat(list(shares[1]))[: ends[-1]]
        for number, end in zip(bucket, ends, strict=True):
            found[number] = total[end - sizes[number] : end]
    return found


class StepState:
    """What a reduction remembers: that of the steps that counted, and that of the step under way.

    They are one and the same unless a step may come to nothing.

    A parameter for which no rank has a gradient takes nothing out of the exchange, so what was remembered of it is
    not to be spent: `copies` keeps it aside where that may be so.

    Args:
        kept: as it is before the first step.
        revertible: whether a step may come to nothing.
    """

    def __init__(self, kept: list[Tensor], revertible: bool) -> None:
        self.current = kept
        self.next = [tensor.clone() for tensor in kept] if revertible else kept

    def copies(self, number: int, places: Sequence[slice]) -> list[Tensor]:
        """Copies of what tensor `number` remembers at some places, before the step."""
        return [self.current[number][place].clone() for place in places]

    def end_step(self, applied: bool) -> None:
        """The step under way has ended: keep what is new, or what was."""
        if applied:
            self.current, self.next = self.next, self.current
