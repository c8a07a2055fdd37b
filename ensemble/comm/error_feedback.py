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

#: For each tensor that a reduction remembers (`Reduction.memory`), that of every rank.
Shares = Sequence[Sequence[Tensor]]


def owed(own: Sequence[Shares], numbers: Sequence[Sequence[int]], sizes: Mapping[int, int]) -> dict[int, Tensor]:
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
