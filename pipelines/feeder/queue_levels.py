"""How full the queues between a pipeline's stages are over time: it names the bottleneck.

A queue that is mostly full stands before the stage that is too slow, one that is mostly empty behind it (this is
how Pittman et al., SC18, found theirs).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

RING, WORKERS, LINK, WAITING = "ring", "workers", "link", "waiting"


class Fullness:
    """Time-weighted means of levels between 0 and 1; noted by one thread, read by any.

    Args:
        clock: seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._since = clock()
        self._span_s = 0.0
        self._levels: dict[str, float] = {}
        self._sums: dict[str, float] = {}

    def note(self, **levels: float) -> None:
        """The levels from now on; none while there is nothing to measure."""
        with self._lock:
            self._count()
            self._levels = levels

    def seconds(self, name: str) -> float:
        """For how long a level was 1, or longer where it was less."""
        with self._lock:
            self._count()
            return self._sums.get(name, 0.0)

    def means(self) -> dict[str, float]:
        """The mean of each level over the time in which there were levels."""
        with self._lock:
            self._count()
            return {name: total / self._span_s if self._span_s else 0.0 for name, total in self._sums.items()}

    def _count(self) -> None:
        """Count the levels up to now."""
        now = self._clock()
        if self._levels:
            self._span_s += now - self._since
        for name, level in self._levels.items():
            self._sums[name] = self._sums.get(name, 0.0) + level * (now - self._since)
        self._since = now


def bottleneck(levels: dict[str, float]) -> str | None:
    """What held a stream up: "members", "preparation" or "links"; None where nothing was recorded.

    Args:
        levels: mean levels: `ring`, samples prepared and not yet given back, of its capacity; `workers`, those
            with something to prepare; `link`, the share of the time in which samples were being sent or fetched;
            `waiting`, that in which some consumer waited.
    """
    if not levels:
        return None
    if levels.get(WAITING, 0.0) < 0.5:
        return "members"
    return "links" if levels.get(LINK, 0.0) > levels.get(WORKERS, 0.0) else "preparation"
