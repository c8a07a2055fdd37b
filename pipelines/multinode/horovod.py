"""Exchanges memory between nodes over Horovod: groups are process sets.

Each process carries out its calls one after the other, so channels do not send at the same time as they do over
torch.distributed. A channel does not wait for the calls of another.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from pipelines.multinode.horovod_start import MAX_ELEMENTS, HorovodSession, start

Bytes = npt.NDArray[np.uint8]

#: Milliseconds. Longer than members' cycles: feeders send large messages, and should use little CPU time.
CYCLE_MS = 5.0


class HorovodCommunicator:
    """A `pipelines.multinode.transport.Communicator` over Horovod."""

    def __init__(self, path: str, rank: int, world: int, interface: str, timeout_s: float) -> None:
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        store = dist.FileStore(path, world)  # type: ignore[attr-defined]
        self._horovod = start(
            store, rank=rank, world=world, interface=interface, timeout_s=timeout_s, cycle_ms=CYCLE_MS
        )
        self.rank, self.world = rank, world

    def group(self, ranks: Sequence[int], channel: int) -> HorovodGroup:
        """See `Communicator`; groups of the same ranks are one process set."""
        members = self._horovod.process_set(ranks) if len(ranks) > 1 else None
        return HorovodGroup(self._horovod, members, tuple(ranks), f"lane {channel}")


class HorovodGroup:
    """A process set; its calls are named by the channel and counted, so that channels need not keep an order."""

    def __init__(self, horovod: HorovodSession, members: Any, ranks: tuple[int, ...], name: str) -> None:
        self._horovod, self._members, self._ranks, self._name = horovod, members, ranks, name
        self._calls = 0

    def broadcast(self, buffer: Bytes, root: int) -> None:
        """See `pipelines.multinode.transport.Group`."""
        import torch

        if self._members is None:
            return
        hvd = self._horovod.hvd
        for at in range(0, len(buffer), MAX_ELEMENTS):
            piece = torch.from_numpy(buffer[at : at + MAX_ELEMENTS])
            with self._horovod.limit_time("a broadcast"):
                hvd.synchronize(
                    hvd.broadcast_async_(piece, root, name=self._next_name(), process_set=self._members)
                )

    def all_gather(self, parts: Sequence[Bytes]) -> None:
        """See `pipelines.multinode.transport.Group`."""
        if self._members is None:
            return
        each = MAX_ELEMENTS // len(parts)
        for at in range(0, max(map(len, parts)), each):
            self._gather([part[at : at + each] for part in parts])

    def _gather(self, parts: Sequence[Bytes]) -> None:
        import torch

        hvd = self._horovod.hvd
        mine = parts[self._ranks.index(self._horovod.rank)]
        with self._horovod.limit_time("an all-gather"):
            handle = hvd.allgather_async(torch.from_numpy(mine), name=self._next_name(), process_set=self._members)
            gathered = hvd.synchronize(handle).numpy()
        start = 0
        for rank in sorted(self._ranks):
            part = parts[self._ranks.index(rank)]
            if part is not mine:
                part[:] = gathered[start : start + len(part)]
            start += len(part)

    def _next_name(self) -> str:
        self._calls += 1
        return f"{self._name} {self._calls}"
