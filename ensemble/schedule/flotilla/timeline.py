"""When everything starts and ends, if flotillas start in a given order, each as soon as it fits: the cost model.

A flotilla starts as a whole: when all its members find their slots, each on one node (best fit, the widest first),
and a stream is free. It overtakes none that is before it in the order. The pace at a position of its stream is
that of the slowest of its members that have not ended there, so a slow member with few epochs slows the others
only while it trains. A member's slots are free when it ends, the stream when the last one has.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from ensemble.schedule.flotilla.problem import Problem


@dataclass(frozen=True)
class Timeline:
    """Start of each flotilla, end of each member (by number), in the problem's unit of time."""

    starts: list[float]
    ends: list[float]
    makespan: float


class Clock:
    """Computes timelines of one problem; what does not change between plans is computed once."""

    def __init__(self, problem: Problem) -> None:
        self._times: list[list[float]] = problem.times.tolist()
        self._epochs: list[int] = problem.epochs.tolist()
        self._slots = problem.room.slots
        self._streams = problem.room.streams
        self._busy = problem.busy
        self._widest = max(self._slots)

    def timeline(self, flotillas: Sequence[Sequence[int]], widths: Sequence[int]) -> Timeline:
        """Args:
        flotillas: members' numbers, in order of start.
        widths: by member's number.

        Returns:
            A makespan of infinity where a flotilla does not fit even into the empty room.
        """
        free = list(self._slots)
        for held in self._busy:
            free[held.node] -= held.workers
        total, streams, now = sum(free), self._streams, 0.0
        by_free = _by_free(free, self._widest)
        last: dict[int, float] = {}
        for held in self._busy:
            if held.cohort is not None:
                last[held.cohort] = max(held.until_s, last.get(held.cohort, 0.0))
        streams -= len(last)
        ties = itertools.count()  # so that the queue never compares places
        releases: list[tuple[float, int, list[tuple[int, int]], int]] = [
            (held.until_s, next(ties), [(held.node, held.workers)], 0) for held in self._busy
        ]
        releases += [(until, next(ties), [], 1) for until in last.values()]
        heapq.heapify(releases)
        starts, ends, makespan = [], [0.0] * len(self._epochs), max((b.until_s for b in self._busy), default=0.0)
        for flotilla in flotillas:
            need = sum([widths[i] for i in flotilla])
            while True:
                found = None
                if need <= total and streams > 0:
                    found = _place(by_free, free, sorted(flotilla, key=lambda i: -widths[i]), widths)
                if found is not None:
                    break
                if not releases:
                    return Timeline([], [], math.inf)
                now = releases[0][0]
                while releases and releases[0][0] <= now:
                    _, _, places, stream = heapq.heappop(releases)
                    streams += stream
                    for node, workers in places:
                        _move(by_free, free, node, workers)
                        total += workers
            starts.append(now)
            total -= need
            streams -= 1
            end = now
            for members, length in self.lengths(flotilla, widths):
                end = now + length
                for i in members:
                    ends[i] = end
                heapq.heappush(releases, (end, next(ties), [found[i] for i in members], 0))
            heapq.heappush(releases, (end, next(ties), [], 1))
            makespan = max(makespan, end)
        return Timeline(starts, ends, makespan)

    def estimate(self, flotillas: Sequence[Sequence[int]], widths: Sequence[int]) -> float:
        """What no order of these flotillas can be below, without looking at nodes: to choose quickly."""
        area = streams = longest = 0.0
        for flotilla in flotillas:
            length = 0.0
            for members, length in self.lengths(flotilla, widths):
                area += length * sum([widths[i] for i in members])
            streams += length
            longest = max(longest, length)
        return max(area / sum(self._slots), streams / self._streams, longest)

    def lengths(self, flotilla: Sequence[int], widths: Sequence[int]) -> list[tuple[list[int], float]]:
        """Members that end together, and how long after the start, in order of the end."""
        times, epochs = self._times, self._epochs
        by_epochs: dict[int, list[int]] = {}
        for i in flotilla:
            by_epochs.setdefault(epochs[i], []).append(i)
        pace, segments = 0.0, []
        for last in sorted(by_epochs, reverse=True):
            pace = max(pace, max([times[i][widths[i]] for i in by_epochs[last]]))
            segments.append((last, pace))
        out, length, done = [], 0.0, 0
        for last, pace in reversed(segments):
            length += (last - done) * pace
            done = last
            out.append((by_epochs[last], length))
        return out


def _by_free(free: list[int], widest: int) -> list[dict[int, None]]:
    """Nodes by their free slots; a dict is a set that keeps its order, so that all is deterministic.

    Nodes on which more is taken than there is (they offered more when it started) are with the full ones.
    """
    out: list[dict[int, None]] = [{} for _ in range(widest + 1)]
    for node, slots in enumerate(free):
        out[max(slots, 0)][node] = None
    return out


def _move(by_free: list[dict[int, None]], free: list[int], node: int, by: int) -> None:
    del by_free[max(free[node], 0)][node]
    free[node] += by
    by_free[max(free[node], 0)][node] = None


def _place(
    by_free: list[dict[int, None]], free: list[int], members: Sequence[int], widths: Sequence[int]
) -> dict[int, tuple[int, int]] | None:
    """Member -> (node, slots) for all of them, the widest first, or None and nothing has changed."""
    found: dict[int, tuple[int, int]] = {}
    if len(free) == 1:  # one heap, however large: all together fit, so each does
        need = sum([widths[i] for i in members])
        if need > free[0]:
            return None
        _move(by_free, free, 0, -need)
        return {i: (0, widths[i]) for i in members}
    for i in members:
        slots = width = widths[i]
        while slots < len(by_free) and not by_free[slots]:
            slots += 1
        if slots == len(by_free):
            for node, workers in found.values():
                _move(by_free, free, node, workers)
            return None
        node = next(iter(by_free[slots]))
        _move(by_free, free, node, -width)
        found[i] = (node, width)
    return found
