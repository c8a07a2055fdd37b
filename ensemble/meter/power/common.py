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
class Reading:
    """Energy of one part of the node since the source was last read.

    Attributes:
        name: of the part, such as ``package-0`` or ``gpu-3``.
        kind: what it feeds; decides how it is split over members (CPU time, or who holds the device).
        energy_j: joules since the last reading.
        device: id of the GPU; None for what is no GPU.
    """

    name: str
    kind: Kind
    energy_j: float
    device: str | None = None


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
        kind: ``cpu`` or ``gpu``: which half of the node it covers.
        origin: ``measured`` or ``estimated``.
        read: returns the energy of each part since the last call, the first time since the opening. Raises
            `PowerError` where the source cannot be read (any more).
        close: releases what the source holds; it is not read again.
    """

    name: str
    kind: Kind
    origin: Origin
    read: Callable[[], list[Reading]]
    close: Callable[[], None] = lambda: None
