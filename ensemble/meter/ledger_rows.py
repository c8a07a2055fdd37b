"""The rows and totals of a ledger."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ensemble.meter.origin import Origin


@dataclass(frozen=True)
class Share:
    """Joules, where they come from, and how many of them were shared out by which method.

    Attributes:
        by: joules by method (`ensemble.meter.attribution.Method`); those by "reservation" are idle energy.
    """

    energy_j: float
    origin: Origin
    by: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class LedgerRow:
    """What one role, of one member where it has one, used on one node.

    Attributes:
        cohort: of a feeder: the members that it serves.
        cpu_s: CPU-seconds of the run's processes (0 for the roles ``idle`` and ``other``).
        cpu_origin: of cpu_s.
        energy_j: None where the node's energy was not known while this was used.
        origin: of energy_j: attributed, estimated or unavailable.
        gpu_s: seconds in which it kept GPUs busy, by its own CUDA events, else SM-seconds by the driver; None
            where neither is known.
        parts: energy_j by kind: cpu, dram, gpu, node (the rest that an external meter sees).
    """

    role: str
    member: str | None
    node: str
    cohort: int | None
    cpu_s: float
    cpu_origin: Origin
    energy_j: float | None
    origin: Origin
    gpu_s: float | None = None
    parts: Mapping[str, Share] = field(default_factory=dict)

    @property
    def idle_j(self) -> float:
        """The idle energy in it."""
        return sum(share.by.get("reservation", 0.0) for share in self.parts.values())


@dataclass(frozen=True)
class Total:
    """A sum over rows.

    Attributes:
        energy_j: of the rows that have one; None where none has.
        idle_j: the idle energy in it; None where it was known on none of their nodes.
        gpu_s: see `LedgerRow`.
        mean_w: of a member: energy over the time in which it held a place; else over the time that was metered.
        peak_w: the highest mean power of a metered interval, added up over nodes.
    """

    cpu_s: float
    energy_j: float | None
    origin: Origin
    idle_j: float | None = None
    gpu_s: float | None = None
    mean_w: float | None = None
    peak_w: float | None = None


@dataclass(frozen=True)
class NodeTotal:
    """What one node used while its meter ran.

    Attributes:
        energy_j, origin: of the whole node: measured, estimated or unavailable.
        idle_j: the idle energy in it; None where idle power was not known.
        metered_s: seconds that were metered.  mean_watts: energy over them.  peak_watts: of an interval.
        unread_s: seconds of which its meter has no reading.
        sources: names of the power sources.
        power: (unix time, watts, origin, idle watts or None) at each sample.
        begins: unix time at which the interval of each sample began.
    """

    node: str
    energy_j: float | None
    origin: Origin
    metered_s: float
    mean_watts: float | None
    sources: tuple[str, ...]
    power: tuple[tuple[float, float | None, Origin, float | None], ...]
    begins: tuple[float, ...]
    idle_j: float | None = None
    peak_watts: float | None = None
    unread_s: float = 0.0


@dataclass(frozen=True)
class Reuse:
    """How often a prepared sample was used.

    Attributes:
        prepared: samples prepared, by feeders and by members for themselves.
        consumed: samples that reached a member.
        private: those of both that a member prepared for itself.
        skipped: records left out on request.
        factor: consumed over prepared; None before anything was prepared.
    """

    prepared: int
    consumed: int
    private: int
    skipped: int
    factor: float | None
