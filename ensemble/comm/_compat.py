"""The private API of torch that this package uses; no other module uses any.

It stands in `comm`, the first of the rooms that use it: `train` imports from there. Checked with the versions in
`CHECKED_WITH`. With any other, `tests/test_compat.py` fails and lists the names to look at;
`tests/comm/test_comm_compat.py` fails when one of them has changed or lost its effect.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed import distributed_c10d

CHECKED_WITH = ("2.13.0",)

Tensors = list[Tensor] | tuple[Tensor, ...]


def abort_process_groups() -> None:
    """Give up all process groups of this process at once, without a wait for the other ranks.

    `torch.distributed.distributed_c10d._abort_process_group` (since 2.6) aborts NCCL's communicators within one
    group call, so that they do not wait for each other. `destroy_process_group` waits for collectives that a lost
    rank never joins; `ProcessGroup.abort`, which is public, aborts one group and leaves it registered.

    Unnecessary with: a public `abort_process_group`.
    """
    distributed_c10d._abort_process_group()


# `torch._foreach_*`: one call, and on a GPU a few kernels, for a whole list of tensors. They exist since 1.9 and
# are described in torch's documentation as beta; torch's own optimizers are made of them. Unnecessary with: public
# names for them.


def foreach_norms(tensors: Tensors) -> Tensor:
    """The L2 norm of each tensor, [len(tensors)], by `torch._foreach_norm`."""
    return torch.stack(torch._foreach_norm(tensors))


def foreach_add(tensors: Tensors, others: Tensors, factor: float) -> Tensors:
    """`tensor + factor * other` of each pair, by `torch._foreach_add`."""
    return torch._foreach_add(tensors, others, alpha=factor)


def foreach_multiply(tensors: Tensors, factors: float | Tensors) -> Tensors:
    """Each tensor times one factor, or times its own (of no dimension), by `torch._foreach_mul`."""
    return torch._foreach_mul(tensors, factors)


def foreach_multiply_(tensors: Tensors, factor: float) -> None:
    """`foreach_multiply` in place, by `torch._foreach_mul_`."""
    torch._foreach_mul_(tensors, factor)


def foreach_add_(tensors: Tensors, others: Tensors, factor: float = 1.0) -> None:
    """`foreach_add` in place, by `torch._foreach_add_`."""
    torch._foreach_add_(tensors, others, alpha=factor)


def foreach_subtract_(tensors: Tensors, others: Tensors) -> None:
    """`tensor - other` of each pair, in place, by `torch._foreach_sub_`."""
    torch._foreach_sub_(tensors, others)


def count_writes(tensor: Tensor) -> int:
    """How often torch has written to a tensor's memory in place, by `Tensor._version`.

    Unnecessary with: a public counter, or tensors that cannot be written to.
    """
    return tensor._version
