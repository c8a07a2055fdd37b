"""What was used on each node of a run, as `UsageParser` finds it in the log. Figures are whole ticks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from ensemble.meter.origin import Origin, from_ticks, to_ticks

Device = int | str  # id of a GPU
UNNAMED: Device = ""
Process = tuple[str, int | None, int]  # node, pid, and what tells two processes of that id apart


class Owner(NamedTuple):
    """Who used something: a role, with the member it belongs to or, of a feeder, the cohort that it serves."""

    role: str
    member: str | None = None
    cohort: int | None = None


@dataclass(frozen=True)
class UsageSpan:
    """`ticks` of something that `owner` used evenly over the time (start, end]; at `end` when they are equal.

    Attributes:
        rate: of a hold, which may have no end yet, how much is held: what is held up to a moment is then the same
            to the tick, whether the hold has ended since or not. None: it follows from `ticks`.
    """

    owner: Owner
    start: float
    end: float
    ticks: int = 0
    rate: float | None = None

    def until(self, t: float) -> int:
        """Ticks used up to the moment `t`."""
        if self.rate is not None:
            return max(0, to_ticks((min(t, self.end) - self.start) * self.rate))
        if t >= self.end:
            return self.ticks
        if t <= self.start:
            return 0
        return min(self.ticks, round(self.ticks * ((t - self.start) / (self.end - self.start))))


class CpuUse(NamedTuple):
    """A span of CPU time with the process that used it."""

    process: Process
    span: UsageSpan
    origin: Origin


class EnergyPart(NamedTuple):
    """Energy of one part of a node in one interval.

    Attributes:
        ticks: in all.  idle: of them, what it would have used while nothing ran; None where that is not known.
        activity: ticks of SM-seconds by owner; None where no utilization is known by process.
    """

    kind: str
    device: Device | None
    ticks: int
    origin: Origin
    idle: int | None = None
    activity: tuple[tuple[Owner, int], ...] | None = None


@dataclass(frozen=True)
class PowerInterval:
    """One `power` event: what a node used in (start, end].

    Attributes:
        busy: CPU ticks of all its processes, if reported.
    """

    start: float
    end: float
    parts: tuple[EnergyPart, ...]
    busy: int | None
    watts: float | None
    origin: Origin
    source: str

    @property
    def length_s(self) -> float:
        return self.end - self.start

    @property
    def idle(self) -> int | None:
        """Idle energy of its parts in ticks; None where it is known of none."""
        idle_ticks = [part.idle for part in self.parts if part.idle is not None]
        return sum(idle_ticks) if idle_ticks else None

    @property
    def idle_watts(self) -> float | None:
        return None if self.idle is None or self.length_s <= 0 else from_ticks(self.idle) / self.length_s


@dataclass
class NodeRecord:
    """What happened on one node.

    Attributes:
        cores: by which its idle power is shared out; 0 where that is not known.
        gpus: the physical GPU of each device, and the part of its compute that the device has.
        power: in order of time.
        cpu: CPU time.
        reserved: core-seconds (None) and seconds of each physical GPU that members had reserved.
        held: what each member has reserved now, with no end.
        busy: ticks of seconds in which members kept each physical GPU busy.
    """

    cores: float = 0.0
    gpus: dict[Device, tuple[Device, float]] = field(default_factory=dict)
    power: list[PowerInterval] = field(default_factory=list)
    cpu: list[CpuUse] = field(default_factory=list)
    reserved: dict[Device | None, list[UsageSpan]] = field(default_factory=dict)
    held: dict[str, list[tuple[Device | None, UsageSpan]]] = field(default_factory=dict)
    busy: dict[Device, list[UsageSpan]] = field(default_factory=dict)

    def find_gpu(self, device: Device) -> tuple[Device, float]:
        """The physical GPU of a device, and the part of its compute that the device has."""
        return self.gpus.get(device, (device, 1.0))

    def drop_until(self, t: float) -> None:
        self.cpu = [used for used in self.cpu if used.span.end > t]
        for spans in (*self.reserved.values(), *self.busy.values()):
            spans[:] = [span for span in spans if span.end > t]
