"""What is measured of a feeder while it runs: the levels of its queues, and how fast its readers would go."""

from __future__ import annotations

import time

from pipelines.feeder.consumers import Consumers
from pipelines.feeder.queue_levels import LINK, RING, WAITING, WORKERS, Fullness
from pipelines.feeder.worker_pool import Crew
from pipelines.stream import Stream

_LEAST_S = 0.5


class Gauge:
    """Reads a feeder's bookkeeping; every call comes from its one thread.

    Attributes:
        levels: how full its queues were.
        delivered: whether anything has been: before that there is nothing to measure.
    """

    def __init__(self, stream: Stream, consumers: Consumers, crew: Crew) -> None:
        self.levels = Fullness()
        self.delivered = False
        self._stream, self._consumers, self._crew = stream, consumers, crew
        self._before = (time.monotonic(), 0, 0.0)
        self._known = (0.0, 0.0)

    def note(self, link_level: float | None) -> None:
        """Take the levels of this moment.

        Args:
            link_level: of the link to other nodes; None where there is none.
        """
        stream = self._stream
        reading = stream.reading if self.delivered else []
        if not reading:
            self.levels.note()
            return
        low = min(reader.position for reader in reading)
        levels = {
            RING: (stream.ready - min(low, stream.ready)) / stream.capacity,
            WORKERS: self._crew.busy,
            WAITING: float(self._consumers.waiting()),
        }
        if link_level is not None:
            levels[LINK] = link_level
        self.levels.note(**levels)

    def demand(self) -> tuple[float, float]:
        """The share of the time in which some reader waited, and the samples/s that they take when none does.

        Over half a second at least; 0 where not known.
        """
        now, low, waited_s = time.monotonic(), self._stream.low, self.levels.seconds(WAITING)
        since, before, waited_before_s = self._before
        span = now - since
        if span > _LEAST_S:
            waiting = min(1.0, (waited_s - waited_before_s) / span)
            rate = max(0, low - before) / span / (1 - waiting) if waiting < 0.9 else 0.0
            self._before, self._known = (now, low, waited_s), (waiting, rate)
        return self._known
