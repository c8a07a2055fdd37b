"""The clock by which a controller limits others: it hardly runs while the controller itself stands still.

In a run that is frozen as a whole (a suspended Slurm job, `docker pause`), or where a file system holds the
controller, it sees late what members sent in time: no limit runs meanwhile.
"""

from __future__ import annotations

import time
from collections.abc import Callable

#: A controller that does not look at its clock for so long stood still. It looks each half second.
STALL_S = 5.0
#: The seconds of a stall that count: where each turn is as slow, limits still end.
COUNTED_S = 1.0


class StallFreeClock:
    """Seconds of a monotonic clock without the stalls of its reader.

    Args:
        clock: the time in seconds, of a clock that does not go back.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._now = self._read_at = clock()

    def read(self) -> float:
        """The time; after a stall only `COUNTED_S` later than at the last call."""
        read_at = self._clock()
        passed_s = read_at - self._read_at
        self._now += passed_s if passed_s <= STALL_S else COUNTED_S
        self._read_at = read_at
        return self._now
