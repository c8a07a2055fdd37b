"""Power over time of each node, thinned while it grows, so that a long run is no larger than a short one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ensemble.meter.origin import from_ticks
from ensemble.meter.usage_sums import LEAST_PEAK_S

if TYPE_CHECKING:
    from ensemble.events import Power
    from ensemble.meter.usage_records import PowerInterval

MOST = 1500  # points of a node
GAP_S = 2.0  # between two readings, from which on nobody measured meanwhile

#: Begin and end in Unix seconds, mean watts, of them idle (None where that is not known).
Point = tuple[float, float, float, float | None]


class PowerSeries:
    """The readings of all nodes.

    Attributes:
        last: the last `power` event of each node.
    """

    def __init__(self) -> None:
        self.last: dict[str, Power] = {}
        self._points: dict[str, list[Point]] = {}
        self._sources: dict[str, dict[str, None]] = {}

    def apply(self, event: Power, interval: PowerInterval) -> None:
        """Adds the reading of a `power` event.

        Args:
            interval: the time of which it is, as the parser knows it: a late reading goes on where the one before
                ended, as counters do.
        """
        node, length = event.node, interval.end - interval.start
        self.last[node] = event
        if interval.watts is None or length <= 0:
            return
        parts = [(part.ticks, part.idle) for part in interval.parts]
        energy, idle = sum(ticks for ticks, _ in parts), [idle for _, idle in parts if idle is not None]
        point = (
            round(interval.start, 3),
            round(interval.end, 3),
            round(from_ticks(energy) / length, 3),
            round(from_ticks(sum(idle)) / length, 3) if idle and len(idle) == len(parts) else None,
        )
        points = self._points.setdefault(node, [])
        points.append(point)
        if length < LEAST_PEAK_S:  # of so short a time it is no power: the mean with that before
            points[-2:] = _halve(points[-2:], GAP_S)
        self._sources.setdefault(node, {})[event.source or ""] = None
        if len(points) > 2 * MOST:
            self._points[node] = _halve(points, GAP_S)

    def describe(self) -> list[dict[str, Any]]:
        """Returns each node's points (`Point`), with their `origin` and `sources`."""
        return [
            {
                "node": node,
                "origin": self.last[node].origin,
                "sources": [source for source in self._sources[node] if source],
                "points": points,
            }
            for node, points in self._points.items()
        ]


def thin(points: Sequence[Point], most: int, gap_s: float) -> list[Point]:
    """Returns means of neighbours, of them again and so on, at most so many; a few more where gaps part them."""
    found = list(points)
    while len(found) > most and len(halved := _halve(found, gap_s)) < 0.9 * len(found):
        found = halved
    return found


def _halve(points: list[Point], gap_s: float) -> list[Point]:
    """Returns means of neighbours; two that do not touch are not merged."""
    halved: list[Point] = []
    i = 0
    while i < len(points):
        first, second = points[i], points[i + 1] if i + 1 < len(points) else None
        if second is None or second[0] - first[1] > gap_s:
            halved.append(first)
            i += 1
            continue
        weights = [max(end - begin, 1e-6) for begin, end, *_ in (first, second)]
        idle = None if None in (first[3], second[3]) else _mean(weights, (first[3] or 0.0, second[3] or 0.0))
        halved.append((first[0], second[1], _mean(weights, (first[2], second[2])), idle))
        i += 2
    return halved


def _mean(weights: list[float], values: tuple[float, float]) -> float:
    return round(sum(w * v for w, v in zip(weights, values, strict=True)) / sum(weights), 3)
