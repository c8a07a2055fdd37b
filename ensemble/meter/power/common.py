"""The interface of power sources; each vendor has a file beside this one.

A power source says how much energy a part of a node used since it was last asked. What this machine does not
have is an `Absent` with the reason in one line.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from ensemble.meter.origin import Origin

Kind = Literal["cpu", "dram", "gpu", "node"]


class PowerError(Exception):
    """A source that was there cannot be read any more; the message is one line with the reason."""


@dataclass(frozen=True)
class Reading:
    """Energy of one part of the node since the source was last read.

    Attributes:
        name: of the part, such as ``package-0`` or ``gpu-3``.
        kind: what it feeds; decides how it is split over members (CPU time, or who holds the device). ``node`` is
            the whole node, all other parts included.
        energy_j: joules since the last reading.
        device: id of the GPU; None for what is no GPU.
    """

    name: str
    kind: Kind
    energy_j: float
    device: str | None = None


@dataclass(frozen=True)
class Absent:
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
        reopen: opens it anew after it was lost; absent until all of it is there again. None: it stays lost.
    """

    name: str
    kind: Kind
    origin: Origin
    read: Callable[[], list[Reading]]
    close: Callable[[], None] = lambda: None
    reopen: Callable[[], PowerSource | Absent] | None = None


def integrate_power(
    power_mw: Callable[[], int], clock: Callable[[], float] = time.monotonic
) -> Callable[[], float]:
    """Returns a function of the joules since it was last called: the trapezoid rule on the power at each call."""
    last = (clock(), power_mw())

    def read_joules() -> float:
        nonlocal last
        (t0, p0), last = last, (clock(), power_mw())
        return (last[0] - t0) * (p0 + last[1]) / 2e3

    return read_joules
