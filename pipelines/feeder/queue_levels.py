"""Measures how full the queues between a pipeline's stages are, and names the bottleneck.

A queue before the slowest stage is mostly full, one behind it mostly empty (the method of Pittman et al., SC18).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

RING, WORKERS, LINK, WAITING = "ring", "workers", "link", "waiting"


class QueueLevels:
    """Time-weighted means of levels between 0 and 1; recorded by one thread, read by any.

    Args:
        clock: returns seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._since = clock()
        self._span_s = 0.0
        self._levels: dict[str, float] = {}
        self._sums: dict[str, float] = {}

    def record(self, **levels: float) -> None:
        """Set the levels from now on; no levels while there is nothing to measure."""
        with self._lock:
            self._accumulate()
            self._levels = levels

    def seconds(self, name: str) -> float:
        """The integral of a level over time, in seconds."""
        with self._lock:
            self._accumulate()
            return self._sums.get(name, 0.0)

    def means(self) -> dict[str, float]:
        """The mean of each level over the time in which there were levels."""
        with self._lock:
            self._accumulate()
            return {name: total / self._span_s if self._span_s else 0.0 for name, total in self._sums.items()}

    def _accumulate(self) -> None:
        """Add the present levels up to now."""
        now = self._clock()
        if self._levels:
            self._span_s += now - self._since
        for name, level in self._levels.items():
            self._sums[name] = self._sums.get(name, 0.0) + level * (now - self._since)
        self._since = now


def bottleneck(levels: dict[str, float]) -> str | None:
    """The bottleneck of a stream: "members", "preparation" or "links"; None if nothing was recorded.

    Args:
        levels: mean levels: `ring`, the fraction of slots with samples that are not yet released; `workers`, the
            fraction of busy workers; `link`, the fraction of the time in which samples were sent or received;
            `waiting`, the fraction in which some consumer waited.
    """
    if not levels:
        return None
    if levels.get(WAITING, 0.0) < 0.5:
        return "members"
    return "links" if levels.get(LINK, 0.0) > levels.get(WORKERS, 0.0) else "preparation"
