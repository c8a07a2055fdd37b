"""What is known of the power, the CPU time and the samples of a run's nodes, as `Reader` finds it in the log."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from ensemble.meter.origin import Origin, to_ticks
from ensemble.meter.proportional_split import Owner, UsageSpan

Device = int | str  # id of a GPU


Process = tuple[str, int | None, int]  # node, pid, and what tells two processes of that id apart


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
        unread: why the meter of the node has no reading of this time; empty where it has, or there is no meter.
    """

    start: float
    end: float
    parts: tuple[EnergyPart, ...]
    busy: int | None
    watts: float | None
    origin: Origin
    source: str
    unread: str = ""


class CpuUse(NamedTuple):
    """A span of CPU time with the process that used it."""

    process: Process
    span: UsageSpan
    origin: Origin


@dataclass
class NodeRecord:
    """What happened on one node.

    Attributes:
        cores: by which its idle power is shared out; 0 where that is not known.
        gpus: the physical GPU of each device, and the part of its compute that the device has.
        power: in order of time.
        cpu: CPU time.
        reserved: ticks of core-seconds (None) and of each physical GPU's seconds that members reserved.
        busy: ticks of seconds in which members kept each physical GPU busy.
    """

    cores: float = 0.0
    gpus: dict[Device, tuple[Device, float]] = field(default_factory=dict)
    power: list[PowerInterval] = field(default_factory=list)
    cpu: list[CpuUse] = field(default_factory=list)
    reserved: dict[Device | None, list[UsageSpan]] = field(default_factory=dict)
    busy: dict[Device, list[UsageSpan]] = field(default_factory=dict)

    def find_gpu(self, device: Device) -> tuple[Device, float]:
        """The physical GPU of a device, and the part of its compute that the device has."""
        return self.gpus.get(device, (device, 1.0))


class Reservation(NamedTuple):
    """What a member holds of one node from a time on: the devices of its ranks, a share of each, and cores."""

    node: str
    devices: tuple[Device | None, ...]
    share: float
    cores: float
    start: float

    def list_spans(self, member: str, node: NodeRecord, until: float) -> Iterator[tuple[Device | None, UsageSpan]]:
        """What it held until a time: of cores (None), and of each physical GPU."""
        held = [(None, self.cores), *(_reserve(node, device, self.share) for device in self.devices)]
        for what, amount in held:
            ticks = to_ticks((until - self.start) * amount)
            if ticks > 0:
                yield what, UsageSpan(Owner("train", member), self.start, until, ticks, amount)


def _reserve(node: NodeRecord, device: Device | None, share: float) -> tuple[Device | None, float]:
    if device is None:
        return None, 0.0
    gpu, part = node.find_gpu(device)
    return gpu, share * part


@dataclass
class Samples:
    """Counts of samples.

    Attributes:
        prepared, consumed: of all feeders.  private: prepared by members for themselves.  skipped: by either.
        by_member: consumed from a shared stream, by (member, cohort).
        by_stream: prepared, consumed and skipped of all feeders that a stream has had, by (node, cohort).
    """

    prepared: int = 0
    consumed: int = 0
    skipped: int = 0
    private: int = 0
    by_member: dict[tuple[str, int | None], int] = field(default_factory=dict)
    by_stream: dict[tuple[str, int], list[int]] = field(default_factory=dict)
