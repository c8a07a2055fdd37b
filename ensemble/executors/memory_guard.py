"""Ends a rank before Ray ends the node's agent for lack of memory, and all ranks of the node with it.

Ray kills a worker process of its own once the node's memory is used up to a threshold (95 %, or
RAY_memory_usage_threshold). It knows the agent only, not the ranks that the agent started.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

from pipelines.environment.machine_limits import available_bytes, limit_bytes

_THRESHOLD, _REFRESH = "RAY_memory_usage_threshold", "RAY_memory_monitor_refresh_ms"
_MARGIN = 0.02  # of the node's memory, below Ray's threshold
_EVERY_S = 0.25
_PAUSE_S = 2.0  # after a rank was ended, until its memory is free


class RankMemory(NamedTuple):
    """Memory of one rank in bytes: what it uses, and what it was granted (None: unknown)."""

    number: int
    used: int
    granted: int | None


class MemoryGuard:
    """Chooses ranks to be ended while the node is short of memory.

    Args:
        fraction: measures the used part of the memory that this host, or its control group, has.

    Attributes:
        next_look: when `choose` looks again (monotonic clock).
    """

    def __init__(self, fraction: Callable[[], float] | None = None) -> None:
        self._fraction = fraction or _used_fraction
        self._threshold = float(os.environ.get(_THRESHOLD, "0.95")) - _MARGIN
        self._is_on = os.environ.get(_REFRESH) != "0"
        self.next_look = 0.0

    def choose(self, list_memory: Callable[[], Iterable[RankMemory]]) -> list[int]:
        """The number of the rank to be ended now; empty while there is enough memory, or no rank.

        Args:
            list_memory: the ranks of the node; called only if memory is short.
        """
        now_s = time.monotonic()
        if now_s < self.next_look:
            return []
        self.next_look = now_s + _EVERY_S
        if not self._is_on or self._fraction() < self._threshold:
            return []
        ranks = list(list_memory())
        if not ranks:
            return []
        self.next_look = now_s + _PAUSE_S
        return [max(ranks, key=lambda rank: (rank.used - (rank.granted or 0), rank.used)).number]


def _used_fraction() -> float:
    return 1.0 - available_bytes() / max(1, limit_bytes())
