"""Many small tensors in one message."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ensemble.comm.communicator import Communicator


class FusedBroadcast:
    """Gives every rank the floating-point tensors of rank 0, in a single message.

    Used for weights at the start and for buffers (running statistics of batch normalization) before each step:
    with one message a step however many there are. Values travel in the widest type among them, fp32 at least,
    which holds all narrower ones exactly.

    Args:
        tensors: the same on every rank, in the same order; those that are not floating-point are left out.
        comm: the ranks.
    """

    def __init__(self, tensors: Sequence[Tensor], comm: Communicator) -> None:
        self._comm = comm
        self._tensors = [t for t in tensors if t.is_floating_point()] if comm.world > 1 else []
        self._dtype = torch.float32
        for tensor in self._tensors:
            self._dtype = torch.promote_types(self._dtype, tensor.dtype)

    @torch.no_grad()
    def __call__(self) -> None:
        """Do it."""
        if not self._tensors:
            return
        flat = torch.cat([t.detach().reshape(-1).to(self._dtype) for t in self._tensors])
        self._comm.broadcast_(flat)
        if self._comm.rank == 0:
            return
        start = 0
        for tensor in self._tensors:
            tensor.copy_(flat[start : start + tensor.numel()].view(tensor.shape))
            start += tensor.numel()
