"""How nodes exchange memory: a small protocol, and its form over torch.distributed (`horovod` has another).

A `Group` is some of the ranks and a lane; its calls are made in the same order by each of its ranks and block
until they are done. Groups in different lanes do not wait for each other, so that several transfers are under way
when several threads each have a group of their own. Another transport needs these three methods and no more; it
ends with its process.
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
    """Some ranks that exchange memory with each other."""

    def broadcast(self, buffer: Bytes, root: int) -> None:
        """Send what lies in `buffer` at rank `root` of the communicator into that of all others, uint8 [n]."""
        ...

    def all_gather(self, parts: Sequence[Bytes]) -> None:
        """Send this rank's part to the others and receive theirs: one a rank of the group, in its order.

        Parts may be of different lengths, or empty; each is as long everywhere.
        """
        ...


class Communicator(Protocol):
    """The nodes' feeders, numbered from 0."""

    rank: int
    world: int

    def group(self, ranks: Sequence[int], lane: int) -> Group:
        """The group of these ranks in a lane; all ranks of the communicator ask for the same groups in the same
        order."""
        ...


def connect(transport: str, *, path: str, rank: int, world: int, interface: str, timeout_s: float) -> Communicator:
    """Meet the other ranks.

    Args:
        transport: "gloo", "nccl", "horovod", or "module:function" of another, which is called with the other
            arguments.
        path: a file that does not exist yet, on a file system that all ranks see.
        rank, world: this rank, and how many there are.
        interface: the network interface to bind to.
        timeout_s: how long a call may take before it fails.
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
    """Over torch.distributed: gloo, or NCCL, which stages through the first CUDA device."""

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
        self._groups: dict[tuple[tuple[int, ...], int], TorchGroup] = {}

    def group(self, ranks: Sequence[int], lane: int) -> TorchGroup:
        """The group of these ranks in a lane."""
        import torch.distributed as dist

        key = (tuple(ranks), lane)
        if key not in self._groups:
            self._groups[key] = TorchGroup(dist.new_group(list(ranks)), key[0], self.rank, self._device)
        return self._groups[key]


class TorchGroup:
    """A process group of torch.distributed; memory of the CPU is staged where the backend wants a device's."""

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
        """See `Group`; each rank sends its part to each other: nothing is copied on the way."""
        import torch
        import torch.distributed as dist

        tensors = [torch.from_numpy(part).to(self._device) for part in parts]
        own = self._ranks.index(self._rank)
        mine = tensors[own]
        calls = []
        # Each rank begins with another peer, so that no interface has all the others' parts at once.
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
