"""Events of what was used: CPU time and energy."""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from ensemble.events.base import Event, Origin


class Usage(Event):
    """CPU time of a process of the run, so far.

    Attributes:
        memory_gb: of the role `verify`.
    """

    node: str
    role: str
    member: str | None = None
    rank: int | None = None
    cohort: int | None = None
    pid: int | None = None
    began: int | None = None
    cpu_s: float | None = None
    origin: Origin
    since: float | None = None
    for_s: float | None = None
    gpu: Any = None
    gpu_busy_s: float | None = None
    memory_gb: float | None = None


class PowerPart(Struct, kw_only=True, omit_defaults=True, gc=False):
    """Energy of a part of a node in an interval."""

    name: str | None = None
    kind: str
    device: Any = None
    energy_j: float = 0.0
    idle_j: float | None = None
    origin: Origin
    activity: list[tuple[str, str | None, float]] | None = None


class Power(Event):
    """Energy of a node in an interval.

    Attributes:
        parts: objects of `name`, `kind`, `device`, `energy_j`, `idle_j`, `origin`, `activity`: `[role,
            member, SM-seconds]`.
    """

    node: str
    interval_s: float | None = None
    energy_j: float | None = None
    watts: float | None = None
    busy_s: float | None = None
    origin: Origin
    source: str | None = None
    parts: list[PowerPart] | None = None
    until: float | None = None
