"""Computes what of a node's total is left when its measured parts are taken away: fans, power supplies, boards.

The parts of a node sum to its total: the processors, memory and GPUs that are measured by themselves, and the
rest.
The meter of the whole node and those of the parts are not read at the same moment, nor do they average over the
same time; so in a single interval the parts may be more than the total. Then the rest is 0, and what is missing is
taken from the rest of later intervals: no energy is negative, and the sums are right.

An external meter's rows come late. So the parts of the very time that the rows cover are taken away: the parts'
energy is kept for a while as a function of time, linear within each interval.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from ensemble.meter.origin import to_ticks
from ensemble.meter.power.common import Trapezoid

_KEEP_S = 300.0


class ResidualPower:
    """The rest of one node, in ticks of joules (`ensemble.meter.origin`).

    Args:
        now: unix time in seconds; energy before it does not count.
    """

    def __init__(self, now: float) -> None:
        self._since = now
        self._times = [now]
        self._sums = [0]  # ticks of the parts, from the beginning to each of the times
        self._until = (now, 0)  # up to where parts have been taken away, and their sum there
        self._carry = 0  # what later rests owe: at most 0

    def subtract(self, now: float, parts: int, whole: float | Sequence[Trapezoid]) -> tuple[int, float | None]:
        """The rest that an interval adds.

        Args:
            now: unix time in seconds; the interval ends then.
            parts: ticks of the measured parts in the interval.
            whole: joules of the whole node in the same interval, or its power that has become known meanwhile.

        Returns:
            Ticks, at least 0; the seconds that they are of, None where these are the interval.
        """
        self._times.append(max(now, self._times[-1]))
        self._sums.append(self._sums[-1] + parts)
        covered_s = None
        if isinstance(whole, (int, float)):
            due = to_ticks(whole) - parts
            self._until = (self._times[-1], self._sums[-1])
        else:
            covered_s, due = 0.0, 0
            for each in whole:
                if each.end > self._since:
                    clipped = each.clip(self._since)
                    covered_s += clipped.end - clipped.start
                    due += to_ticks(clipped.energy_j) - self._take_parts(clipped.start, clipped.end)
        self._forget()
        due += self._carry
        self._carry = min(0, due)
        return max(0, due), covered_s

    def _take_parts(self, start: float, end: float) -> int:
        """Ticks of the parts in a time, which is not before the one of the last call."""
        until, before = self._until
        if start != until:
            before = self._sum_at(start)
        self._until = (end, self._sum_at(end))
        return self._until[1] - before

    def _sum_at(self, t: float) -> int:
        i = bisect_right(self._times, t)
        if i == 0:
            return self._sums[0]
        if i == len(self._times):
            return self._sums[-1]
        (t0, t1), (s0, s1) = self._times[i - 1 : i + 1], self._sums[i - 1 : i + 1]
        return s0 + round((s1 - s0) * (t - t0) / (t1 - t0))

    def _forget(self) -> None:
        """Forgets what is too old for a row to come."""
        kept = bisect_right(self._times, self._times[-1] - _KEEP_S)
        del self._times[: max(0, kept - 1)], self._sums[: max(0, kept - 1)]
