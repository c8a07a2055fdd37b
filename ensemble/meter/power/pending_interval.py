"""Holds the time of a node open until rows of its external meter cover it.

A meter's rows come late, and perhaps only every few seconds. What they say must be in the interval in which it was
used, not in that in which it has come. So what the node's other sources say is kept, slice by slice, and given out
when rows cover the end of a slice. Time that no row will ever cover is given out as such: its energy is not known,
which is another thing than 0 J.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ensemble.meter.origin import from_ticks, to_ticks
from ensemble.meter.power.common import Trapezoid

EnergyPart = Mapping[str, Any]


class Slice(NamedTuple):
    """What the node's own sources said of a while.

    Attributes:
        end: unix time in seconds; it began where the one before it ended.
        seconds: its length.
        busy_s: CPU-seconds of all processes; None where they are not known.
        parts: with `energy_j`, a whole number of ticks.
    """

    end: float
    seconds: float
    busy_s: float | None
    parts: Sequence[EnergyPart]


class Stretch(NamedTuple):
    """Time that is decided: rows cover all of it, or will cover none of it.

    Attributes:
        slices: that it consists of.
        energy_j: of the whole node; None where no row covers it.
        end: unix time in seconds.
    """

    slices: Sequence[Slice]
    energy_j: float | None
    end: float


@dataclass
class PendingInterval:
    """The time of a node that is not decided yet.

    Attributes:
        start: unix time in seconds; nothing before it counts.
        slices: since then, in order.
        known: what rows say of the time since then, in order.
    """

    start: float
    slices: list[Slice] = field(default_factory=list)
    known: list[Trapezoid] = field(default_factory=list)

    @property
    def end(self) -> float:
        """The end of the last slice, in unix seconds."""
        return self.slices[-1].end if self.slices else self.start

    @property
    def is_covered(self) -> bool:
        """Whether rows have come of all of it, or of later time."""
        return self.covered_until >= self.end

    @property
    def covered_until(self) -> float:
        """Up to when rows have come, in unix seconds."""
        return self.known[-1].end if self.known else self.start

    def add(self, now: float, seconds: float, busy_s: float | None, parts: Sequence[EnergyPart]) -> None:
        """Adds a slice that ends now."""
        self.slices.append(Slice(max(now, self.end), seconds, busy_s, parts))

    def add_rows(self, known: Iterable[Trapezoid]) -> None:
        """Adds what has become known of the meter's power."""
        self.known += [each for each in known if each.end > self.start]

    def decide(self, is_last: bool = False) -> Stretch | None:
        """Gives out the first stretch that is decided; None: that of no time is.

        Args:
            is_last: no more rows come: all time is decided.
        """
        if self.end <= self.start:
            return None
        covered = self._find_covered()
        if covered is None:  # rows begin later, if there are any
            until = self.known[0].start if self.known else self.end
            return self._take(min(until, self.end), is_covered=False) if self.known or is_last else None
        if not is_last and len(covered) == len(self.known):  # rows go on: whole slices, whose parts were read
            ends = [each.end for each in self.slices if each.end <= covered[-1].end]
            return self._take(ends[-1], is_covered=True) if ends else None
        return self._take(min(covered[-1].end, self.end), is_covered=True)

    def _find_covered(self) -> list[Trapezoid] | None:
        """What is known without a gap from the start on; None where nothing is."""
        covered: list[Trapezoid] = []
        until = self.start
        for each in self.known:
            if each.start > until:
                break
            covered.append(each)
            until = each.end
        return covered or None

    def _take(self, until: float, *, is_covered: bool) -> Stretch:
        """Removes the time up to a moment; a slice that goes on beyond it is cut in proportion."""
        energy_j = sum(each.clip(self.start).energy_j - each.clip(until).energy_j for each in self.known)
        taken: list[Slice] = []
        while self.slices and self.start < until:
            if self.slices[0].end > until:
                before, self.slices[0] = _cut(self.slices[0], self.start, until)
            else:
                before = self.slices.pop(0)
            taken.append(before)
            self.start = before.end
        self.known = [each for each in self.known if each.end > self.start]
        return Stretch(taken, energy_j if is_covered else None, until)


def _cut(whole: Slice, start: float, at: float) -> tuple[Slice, Slice]:
    """The two sides of a slice that began at `start`; their energy sums to its energy exactly."""
    share = (at - start) / (whole.end - start)
    before, after = [], []
    for part in whole.parts:
        ticks = to_ticks(part["energy_j"])
        first = round(ticks * share)
        before.append({**part, "energy_j": from_ticks(first)})
        after.append({**part, "energy_j": from_ticks(ticks - first)})
    busy_s = whole.busy_s
    return (
        Slice(at, whole.seconds * share, None if busy_s is None else busy_s * share, before),
        Slice(whole.end, whole.seconds * (1 - share), None if busy_s is None else busy_s * (1 - share), after),
    )
