"""Measures a running feeder: the levels of its queues, which name the bottleneck, and the rate of its readers.

A queue before the slowest stage is mostly full, one behind it mostly empty (the method of Pittman et al., SC18).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # a report reads levels without importing a feeder
    from pipelines.feeder.consumers import Consumers
    from pipelines.order.stream import Stream
    from pipelines.workers.worker_pool import WorkerPool

RING, WORKERS, LINK, WAITING, FULL = "ring", "workers", "link", "waiting", "full"
_MIN_SPAN_S = 0.5


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

    def record(self, since: float | None = None, /, **levels: float) -> None:
        """Set the levels from now on; no levels while there is nothing to measure.

        Args:
            since: a moment of the clock from which they hold already, if none was set later.
        """
        if levels == self._levels:
            return
        with self._lock:
            self._accumulate(since)
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

    @property
    def recorded_s(self) -> float:
        """Seconds in which there were levels: with it `means` of two moments give those of the time between."""
        with self._lock:
            self._accumulate()
            return self._span_s

    def _accumulate(self, until: float | None = None) -> None:
        """Add the present levels up to a moment, by default now."""
        now_s = self._clock()
        if until is not None:
            now_s = min(now_s, max(until, self._since))
        if self._levels:
            self._span_s += now_s - self._since
        for name, level in self._levels.items():
            self._sums[name] = self._sums.get(name, 0.0) + level * (now_s - self._since)
        self._since = now_s


class FeederStatistics:
    """A feeder's measurements; every call comes from its one thread.

    Attributes:
        levels: how full its queues were.
        has_delivered: whether any block is ready; before that nothing is measured.
    """

    def __init__(self, stream: Stream, consumers: Consumers, pool: WorkerPool) -> None:
        self.levels = QueueLevels()
        self.has_delivered = False
        self._stream, self._consumers, self._pool = stream, consumers, pool
        self._before = (time.monotonic(), 0, 0.0)
        self._known = (0.0, 0.0)
        self._is_waiting = False

    def record(self, link_level: float | None) -> None:
        """Record the present levels.

        Args:
            link_level: the level of the link to other nodes; None without a group.
        """
        stream = self._stream
        if stream.is_complete and stream.readers:
            self.levels.record(**{RING: 1.0, WORKERS: 0.0, WAITING: 0.0, FULL: 1.0})
            return
        reading = stream.active_readers if self.has_delivered else []
        if not reading:
            self.levels.record()
            return
        low = min([reader.position for reader in reading])
        waits_since = self._consumers.waits_since()
        levels = {
            RING: max(0, stream.ready - low) / stream.capacity,
            WORKERS: self._pool.busy_fraction,
            WAITING: float(waits_since is not None),
            FULL: float(stream.ready + stream.block_size > low + stream.capacity),
        }
        if link_level is not None:
            levels[LINK] = link_level
        self.levels.record(None if self._is_waiting else waits_since, **levels)
        self._is_waiting = waits_since is not None

    def measure_demand(self) -> tuple[float, float]:
        """Measure the readers' demand over at least half a second.

        Returns:
            The fraction of the time in which some reader waited, and the samples/s that readers consume while
            none waits; 0 where unknown.
        """
        now_s, low, waited_s = time.monotonic(), self._stream.low, self.levels.seconds(WAITING)
        since, before, waited_before_s = self._before
        span = now_s - since
        if span > _MIN_SPAN_S:
            waiting = min(1.0, (waited_s - waited_before_s) / span)
            rate = max(0, low - before) / span / (1 - waiting) if waiting < 0.9 else 0.0
            self._before, self._known = (now_s, low, waited_s), (waiting, rate)
        return self._known


def bottleneck(levels: dict[str, float]) -> str | None:
    """The bottleneck of a stream: "members", "preparation" or "links"; None if nothing was recorded.

    Args:
        levels: mean levels: `ring`, the fraction of slots with samples that are not yet released; `workers`, the
            fraction of busy workers; `link`, the fraction of the time in which samples were sent or received;
            `waiting`, the fraction in which some consumer waited. `full`, in which the ring had no room for
            another block, is not needed.
    """
    if not levels:
        return None
    if levels.get(WAITING, 0.0) < 0.5:
        return "members"
    return "links" if levels.get(LINK, 0.0) > levels.get(WORKERS, 0.0) else "preparation"
