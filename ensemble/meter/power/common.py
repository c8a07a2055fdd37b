"""Defines the interface of power sources; each vendor has a file beside this one.

A **power source** says how much energy some part of a node used since it was last asked. Hardware offers
either an energy counter (joules since some moment, better) or the present power (watts, to be integrated).
A source that this machine does not have is an `Absent` with the reason in one line; nothing is ever guessed
in its place.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from ensemble.meter.origin import Origin

Kind = Literal["cpu", "dram", "gpu", "node"]


class PowerError(Exception):
    """A source that was there cannot be read any more; the message is one line with the reason."""


@dataclass(frozen=True)
class Trapezoid:
    """Power between two moments, a straight line: unix times in seconds, watts at both."""

    start: float
    end: float
    start_w: float
    end_w: float

    @property
    def energy_j(self) -> float:
        """The area below the line."""
        return (self.end - self.start) * (self.start_w + self.end_w) / 2

    def clip(self, since: float) -> Trapezoid:
        """What of it lies after a moment."""
        since = min(max(since, self.start), self.end)
        if since == self.start:
            return self
        part = (since - self.start) / (self.end - self.start)
        return Trapezoid(since, self.end, self.start_w + part * (self.end_w - self.start_w), self.end_w)


@dataclass(frozen=True)
class Reading:
    """Energy of one part of the node since the source was last read.

    Attributes:
        name: of the part, such as ``package-0`` or ``gpu-3``.
        kind: what it feeds; decides how it is split over members (CPU time, or who holds the device). ``node`` is
            the whole node, all other parts included.
        energy_j: joules since the last reading.
        device: id of the GPU; None for what is no GPU.
        curve: of a meter whose figures come late: the power that became known since the last reading, in order of
            time. None: energy_j is that of the time since the last reading.
    """

    name: str
    kind: Kind
    energy_j: float
    device: str | None = None
    curve: tuple[Trapezoid, ...] | None = None


@dataclass(frozen=True)
class Absent:
    """A source that this machine does not offer, and why."""

    name: str
    reason: str


@dataclass(frozen=True)
class PowerSource:
    """What every vendor's file opens.

    Attributes:
        name: short, such as ``rapl``; shown beside every figure.
        kind: ``cpu`` or ``gpu``: which half of the node it covers; ``node``: all of it.
        origin: ``measured`` or ``estimated``.
        read: returns the energy of each part since the last call, the first time since the opening. Raises
            `PowerError` where the source cannot be read (any more).
        close: releases what the source holds; it is not read again.
        is_late: whether its figures come later than those of other sources; then they are a `Reading.curve`.
        reopen: opens it anew after it was lost; absent until all of it is there again. None: it stays lost.
    """

    name: str
    kind: Kind
    origin: Origin
    read: Callable[[], list[Reading]]
    close: Callable[[], None] = lambda: None
    is_late: bool = False
    reopen: Callable[[], PowerSource | Absent] | None = None
