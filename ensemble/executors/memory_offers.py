"""What a node offers of its host memory: less where processes of others hold it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection

from ensemble.meter.memory import held_memory_gb
from ensemble.schedule.needs import Node
from pipelines.environment.machine_limits import available_bytes, limit_bytes

_LEAST = 0.05  # of the memory: what the system holds
_CHANGE = 0.06  # of the memory; it is more than `_LEAST`, around which what is offered jumps
_LOOK_S = 2.0
_REPORTED_S = 10.0  # after a change was reported, until the next one is looked for
_IDLE = 200  # a look takes at most one part in so many of a core: the kernel walks all pages of all processes


def find_memory_left(total_gb: float, limit_gb: float, available_gb: float, own_gb: float | None) -> float | None:
    """What others leave of the memory that a node offers, in GiB; None: all of it, or it is not known.

    Args:
        total_gb: what the node offers where others hold nothing.
        limit_gb: memory of the host, or of its control group; what is above `total_gb` is for rings.
        available_gb: of the limit, now. Page cache is available.
        own_gb: what processes of the run hold, rings included; None if unknown.
    """
    if available_gb >= (1 - _LEAST) * limit_gb or own_gb is None:
        return None
    left_gb = available_gb + own_gb - (limit_gb - total_gb)
    return None if left_gb >= (1 - _LEAST) * total_gb else round(max(0.0, left_gb), 3)


class MemoryOffers:
    """The host memory of a node during a run.

    Args:
        list_pids: returns the process ids of the ranks; those that this process started are known.
    """

    def __init__(self, list_pids: Callable[[], Collection[int]] = tuple) -> None:
        self._list_pids = list_pids
        self._total_gb = 0.0  # until the first offer
        self._reported: float | None = None
        self._is_changing = False
        self._next_look = 0.0

    def offer(self, host: Node) -> float | None:
        """What others leave now of a host that has all of its memory: `Node.memory_left_gb`."""
        self._total_gb = host.memory_gb
        self._reported = self._read()
        return self._reported

    def _read(self) -> float | None:
        began_s, limit_gb, available_gb = time.thread_time(), limit_bytes() / 2**30, available_bytes() / 2**30
        is_free = available_gb >= (1 - _LEAST) * limit_gb
        own_gb = None if is_free else held_memory_gb(os.getpid(), self._list_pids())
        self._next_look = time.monotonic() + max(_LOOK_S, _IDLE * (time.thread_time() - began_s))
        return find_memory_left(self._total_gb, limit_gb, available_gb, own_gb)

    def find_change(self) -> tuple[float | None] | None:
        """What others leave now, where that has changed since it was last returned; None where it has not.

        It is looked at now and then, and a change must last: what a process takes or frees while it is read counts
        once too often, or not at all.
        """
        if not self._total_gb or time.monotonic() < self._next_look:
            return None
        left_gb = self._read()
        before, self._is_changing = self._is_changing, self._differs(left_gb)
        if self._is_changing and not before:
            self._next_look = time.monotonic() + _LOOK_S
        if not (before and self._is_changing):
            return None
        self._reported, self._is_changing = left_gb, False
        self._next_look = max(self._next_look, time.monotonic() + _REPORTED_S)
        return (left_gb,)

    def _differs(self, left_gb: float | None) -> bool:
        one, other = (self._total_gb if gb is None else gb for gb in (self._reported, left_gb))
        return abs(one - other) > _CHANGE * self._total_gb
