"""The rows and totals of a ledger, in seconds, joules and watts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ensemble.meter.origin import Origin, from_ticks, weakest
from ensemble.meter.usage_records import Owner
from ensemble.meter.usage_sums import BUSY, CPU, ROLES, SM, Use, list_energies


@dataclass(frozen=True)
class Share:
    """Joules, where they come from, and how many of them were shared out by which method.

    Attributes:
        by: joules by method (`ensemble.meter.energy_allocator.Method`); those by "reservation" are idle energy.
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
        parts: energy_j by kind: cpu, dram, gpu, node (the rest where the whole node is measured).
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
    def methods(self) -> dict[str, float]:
        """Its joules by the method by which they were shared out."""
        joules: dict[str, float] = {}
        for share in self.parts.values():
            for method, by in share.by.items():
                joules[method] = joules.get(method, 0.0) + by
        return joules

    @property
    def idle_j(self) -> float:
        return self.methods.get("reservation", 0.0)


@dataclass(frozen=True)
class Total:
    """A sum over rows.

    Attributes:
        energy_j: of the rows that have one; None where none has.
        idle_j: the idle energy in it; None where it was known on none of their nodes.
        gpu_s: see `LedgerRow`.
        mean_w: of a member: energy over the time in which it held a place; else over the time that was metered.
    """

    cpu_s: float
    energy_j: float | None
    origin: Origin
    idle_j: float | None = None
    gpu_s: float | None = None
    mean_w: float | None = None


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


def make_rows(uses: Mapping[tuple[Owner, str], Use]) -> tuple[LedgerRow, ...]:
    rows = [_make_row(owner, node, use) for (owner, node), use in uses.items()]
    rows.sort(
        key=lambda row: (
            role_key(row.role),
            natural_key(row.member or ""),
            natural_key(row.node),
            -1 if row.cohort is None else row.cohort,
        )
    )
    return tuple(rows)


def _make_row(owner: Owner, node: str, use: Use) -> LedgerRow:
    energies = list_energies(use)
    parts: dict[str, Share] = {}
    for kind in sorted({kind for kind, *_ in energies}):
        shares = [(method, ticks, origin) for of, method, ticks, origin in sorted(energies) if of == kind]
        parts[kind] = Share(
            from_ticks(sum(ticks for _, ticks, _ in shares)),
            weakest(origin for *_, origin in shares),
            {method: from_ticks(ticks) for method, ticks, _ in shares},
        )
    gpu = count_ticks(use, BUSY) or count_ticks(use, SM)
    return LedgerRow(
        role=owner.role,
        member=owner.member,
        node=node,
        cohort=owner.cohort,
        cpu_s=from_ticks(count_ticks(use, CPU)),
        cpu_origin=use.get(CPU, (0, "measured"))[1],
        energy_j=sum(share.energy_j for share in parts.values()) if parts else None,
        origin=weakest(share.origin for share in parts.values()),
        gpu_s=from_ticks(gpu) if gpu else None,
        parts=parts,
    )


def count_ticks(use: Use, what: tuple[str, str]) -> int:
    """The ticks of something in a use; 0 where there are none of it."""
    return use[what][0] if what in use else 0


def role_key(role: str) -> tuple[int, str]:
    """Sorts roles in their order, others behind them."""
    return (ROLES.index(role), "") if role in ROLES else (len(ROLES), role)


def natural_key(name: str) -> tuple[str, int, str]:
    """Sorts member-2 before member-10."""
    stem = name.rstrip("0123456789")
    return (stem, int(name[len(stem) :] or -1), name)
