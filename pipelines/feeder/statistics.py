"""Measures a running feeder: the levels of its queues and the rate of its readers."""

from __future__ import annotations

import time

from pipelines.feeder.consumers import Consumers
from pipelines.feeder.queue_levels import LINK, RING, WAITING, WORKERS, QueueLevels
from pipelines.feeder.worker_pool import WorkerPool
from pipelines.stream import Stream

_MIN_SPAN_S = 0.5


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

    def record(self, link_level: float | None) -> None:
        """Record the present levels.

        Args:
            link_level: the level of the link to other nodes; None without a group.
        """
        stream = self._stream
        reading = stream.active_readers if self.has_delivered else []
        if not reading:
            self.levels.record()
            return
        low = min(reader.position for reader in reading)
        levels = {
            RING: (stream.ready - min(low, stream.ready)) / stream.capacity,
            WORKERS: self._pool.busy_fraction,
            WAITING: float(self._consumers.is_any_waiting()),
        }
        if link_level is not None:
            levels[LINK] = link_level
        self.levels.record(**levels)

    def measure_demand(self) -> tuple[float, float]:
        """Measure the readers' demand over at least half a second.

        Returns:
            The fraction of the time in which some reader waited, and the samples/s that readers consume while
            none waits; 0 where unknown.
        """
        now, low, waited_s = time.monotonic(), self._stream.low, self.levels.seconds(WAITING)
        since, before, waited_before_s = self._before
        span = now - since
        if span > _MIN_SPAN_S:
            waiting = min(1.0, (waited_s - waited_before_s) / span)
            rate = max(0, low - before) / span / (1 - waiting) if waiting < 0.9 else 0.0
            self._before, self._known = (now, low, waited_s), (waiting, rate)
        return self._known
