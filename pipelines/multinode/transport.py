"""Exchanges memory between nodes: a small protocol, and its implementation over torch.distributed.

A `Group` is a set of ranks and a channel; each of its ranks makes the same calls in the same order, and each call
blocks until it is done. Groups in different channels do not wait for each other: threads that each have their own
group transfer at the same time. Another transport needs these three methods only; it ends with its process.
"""

from __future__ import annotations

import datetime
import importlib
import os
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]


class Group(Protocol):
    """A set of ranks that exchange memory."""

    def broadcast(self, buffer: Bytes, root: int) -> None:
        """Copy `buffer`, uint8 [n], from rank `root` of the communicator to all other ranks of the group."""

    def all_gather(self, parts: Sequence[Bytes]) -> None:
        """Send this rank's part to the other ranks and receive theirs.

        Args:
            parts: one buffer for each rank of the group, in its order; each has the same length on all ranks.
        """


class Communicator(Protocol):
    """All nodes' feeders, ranked from 0."""

    rank: int
    world: int

    def group(self, ranks: Sequence[int], channel: int) -> Group:
        """Make the group of these ranks in a channel.

        All ranks of the communicator make the same groups in the same order, each once.
        """


def connect(transport: str, *, path: str, rank: int, world: int, interface: str, timeout_s: float) -> Communicator:
    """Connect to the other ranks.

    Args:
        transport: "gloo", "nccl", "horovod", or "module:function" of another, which is called with the other
            arguments.
        path: absolute, of a file that does not exist yet, on a file system that all ranks see.
        rank, world: this rank, and the number of ranks.
        interface: the network interface to bind to.
        timeout_s: the longest time of a call.
    """
    if transport in ("gloo", "nccl"):
        return TorchCommunicator(transport, path, rank, world, interface, timeout_s)
    if transport == "horovod":
        from pipelines.multinode.horovod import HorovodCommunicator

        return HorovodCommunicator(path, rank, world, interface, timeout_s)
    module, _, function = transport.partition(":")
    made: Communicator = getattr(importlib.import_module(module), function)(
        path=path, rank=rank, world=world, interface=interface, timeout_s=timeout_s
    )
    return made


class TorchCommunicator:
    """A communicator over torch.distributed: gloo, or NCCL, which stages through the first CUDA device."""

    def __init__(self, backend: str, path: str, rank: int, world: int, interface: str, timeout_s: float) -> None:
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = interface
        self.rank, self.world = rank, world
        self._device = torch.device("cuda:0" if backend == "nccl" else "cpu")
        store = dist.FileStore(path, world)  # type: ignore[attr-defined]
        dist.init_process_group(
            backend,
            store=store,
            rank=rank,
            world_size=world,
            timeout=datetime.timedelta(seconds=timeout_s),
            device_id=self._device if backend == "nccl" else None,
        )

    def group(self, ranks: Sequence[int], channel: int) -> TorchGroup:
        """See `Communicator`."""
        import torch.distributed as dist

        return TorchGroup(dist.new_group(list(ranks)), tuple(ranks), self.rank, self._device)


class TorchGroup:
    """A process group of torch.distributed; stages host memory if the backend needs a device's."""

    def __init__(self, group: Any, ranks: tuple[int, ...], rank: int, device: Any) -> None:
        self._group, self._ranks, self._rank, self._device = group, ranks, rank, device

    def broadcast(self, buffer: Bytes, root: int) -> None:
        """See `Group`."""
        import torch
        import torch.distributed as dist

        host = torch.from_numpy(buffer)
        there = host.to(self._device)
        dist.broadcast(there, src=root, group=self._group)
        if there is not host and self._rank != root:
            host.copy_(there)

    def all_gather(self, parts: Sequence[Bytes]) -> None:
        """See `Group`; each rank sends its part to each other rank, without an intermediate copy."""
        import torch
        import torch.distributed as dist

        tensors = [torch.from_numpy(part).to(self._device) for part in parts]
        own = self._ranks.index(self._rank)
        mine = tensors[own]
        calls = []
        # Each rank starts with a different peer, so that no interface receives all parts at once.
        for step in range(1, len(self._ranks)):
            to, source = (own + step) % len(self._ranks), (own - step) % len(self._ranks)
            if mine.numel():
                calls.append(dist.P2POp(dist.isend, mine, self._ranks[to], self._group))
            if tensors[source].numel():
                calls.append(dist.P2POp(dist.irecv, tensors[source], self._ranks[source], self._group))
        for work in dist.batch_isend_irecv(calls) if calls else ():
            work.wait()
        for part, tensor in zip(parts, tensors, strict=True):
            if tensor.device.type != "cpu" and tensor is not mine:
                torch.from_numpy(part).copy_(tensor)
