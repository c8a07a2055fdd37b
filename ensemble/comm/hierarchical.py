"""All-reduce in two levels (Jia et al. 2018, section 3.3): inside groups, then between their leaders.

Each group reduces to its first rank, its **leader**; the leaders all-reduce, and each broadcasts in its group.
Where a group is a host, a message crosses the network once a host. A *hybrid* chooses by message size: a ring is
faster for large ones on fast links. Other groups give other bits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ensemble.comm.communicator import Communicator, Completed, Op, Pending
from ensemble.comm.exchange_plan import Way, Ways
from ensemble.comm.hosts import Groups
from ensemble.comm.worker_thread import PendingCall, WorkerThread


def choose_way(ways: Ways, size: int) -> Way:
    """The way for a message of `size` bytes: the first whose limit it does not exceed, else the last.

    Examples:
        >>> choose_way(((65536, "hierarchical"), (1048576, "flat")), 4096)
        'hierarchical'
    """
    return next((way for limit, way in ways if size <= limit), ways[-1][1])


class Hierarchical:
    """A `Communicator` with a hierarchical all-reduce; all other collectives are the base's.

    On the CPU several all-reduces may be in progress: a thread with separate groups runs them one after the other.
    On CUDA they run in the caller's stream, because several NCCL communicators in several threads can deadlock.

    Args:
        base: all ranks. Every rank makes the same `Hierarchical` from it.
        groups: each rank in exactly one.
        ways: of a hybrid, by message size (`choose_way`): where one is "flat", the all-reduce is the base's.

    Raises:
        ValueError: a rank is in no group or in several.
    """

    def __init__(self, base: Communicator, groups: Groups, ways: Ways = ()) -> None:
        if sorted(rank for group in groups for rank in group) != list(range(base.world)):
            raise ValueError(f"groups must hold each of the ranks 0 to {base.world - 1} once, got {groups}")
        self.base, self.groups, self.ways = base, groups, ways
        self.rank, self.world = base.rank, base.world
        self._group: Communicator | None = None
        self._leaders: Communicator | None = None
        for ranks in groups:
            made = base.group(ranks) if len(ranks) > 1 else None
            self._group = made or self._group
        if len(groups) > 1:
            self._leaders = base.group([min(ranks) for ranks in groups])
        self._thread = WorkerThread(torch.get_num_threads())
        self._last: PendingCall | None = None
        self._last_flat: Pending = Completed()

    def all_reduce_(self, tensor: torch.Tensor, op: Op = "sum") -> None:
        """See `Communicator`."""
        is_idle = tensor.device.type == "cpu" and (self._last is None or self._last.done)
        if is_idle and not self._is_flat(tensor):
            self._reduce(tensor, op)
        else:
            self.start_all_reduce_(tensor, op).wait()

    def start_all_reduce_(self, tensor: torch.Tensor, op: Op = "sum") -> Pending:
        """See `Communicator`."""
        if self._is_flat(tensor):
            self._last_flat = self.base.start_all_reduce_(tensor, op)
            return self._last_flat
        if tensor.device.type == "cpu":  # the two ways have separate connections
            self._last = self._thread.start(lambda: self._reduce(tensor, op))
            return self._last
        self._last_flat.wait()  # collectives of one NCCL communicator must end before another is used
        self._reduce(tensor, op)
        return Completed()

    def _is_flat(self, tensor: torch.Tensor) -> bool:
        return bool(self.ways) and choose_way(self.ways, tensor.nbytes) == "flat"

    def _reduce(self, tensor: torch.Tensor, op: Op) -> None:
        if self._group is not None:
            if op == "sum":
                self._group.reduce_(tensor)
            else:
                self._group.all_reduce_(tensor, op)
        if self._leaders is not None:
            self._leaders.all_reduce_(tensor, op)
        if self._group is not None:
            self._group.broadcast_(tensor)

    def stop_thread(self) -> None:
        """End the thread; the base stays open."""
        self._thread.close()

    def close(self) -> None:
        """See `Communicator`."""
        self.stop_thread()
        self.base.close()

    @property
    def sent_bytes(self) -> float:
        """See `Communicator`."""
        return self.base.sent_bytes

    def reduce_(self, tensor: torch.Tensor, root: int = 0) -> None:
        """See `Communicator`."""
        self.base.reduce_(tensor, root)

    def reduce_scatter(self, tensor: torch.Tensor) -> torch.Tensor:
        """See `Communicator`."""
        return self.base.reduce_scatter(tensor)

    def broadcast_(self, tensor: torch.Tensor, root: int = 0) -> None:
        """See `Communicator`."""
        self.base.broadcast_(tensor, root)

    def all_gather(self, tensor: torch.Tensor, *, equal: bool = False) -> list[torch.Tensor]:
        """See `Communicator`."""
        return self.base.all_gather(tensor, equal=equal)

    def all_to_all(self, tensor: torch.Tensor) -> torch.Tensor:
        """See `Communicator`."""
        return self.base.all_to_all(tensor)

    def group(self, ranks: Sequence[int]) -> Communicator | None:
        """See `Communicator`."""
        return self.base.group(ranks)

    def barrier(self, timeout_s: float) -> None:
        """See `Communicator`."""
        self.base.barrier(timeout_s)
