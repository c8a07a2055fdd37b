"""Computes what a run used, in CPU-seconds and joules, by role, member and node: a pure function of its events.

Roles of CPU time: ``startup``, ``train`` (members), ``prepare``, ``feed`` (the shared pipeline), ``profile``
(members measured before they are packed), ``orchestrate`` and ``ray``. A row names the member it belongs to;
what belongs to none stays under its role. Energy has one more role, ``other``: what a node used for processes
that are not the run's, and for GPUs that nobody of the run held.

Each node's energy is split interval by interval: processors and memory by CPU time
(`ensemble.meter.proportional_split`),
each GPU by the time that members held it, weighted by the share of it that they asked for. A share of what was
measured is ``attributed``, a share of what was estimated ``estimated``. Rows add up to their totals exactly.

The log may hold several starts of the run (resumes). Counts of one start say nothing about the next.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ensemble.meter.origin import Origin, from_ticks, weakest
from ensemble.meter.proportional_split import Lag, split, spread, subtract_claimed
from ensemble.meter.usage_intervals import Node, UsageRecord, read_intervals

VERSION = 1
ROLES = ("startup", "train", "prepare", "feed", "profile", "orchestrate", "ray", "other")

Owner = tuple[str, str | None]  # role, member


@dataclass(frozen=True)
class Share:
    """Joules and where they come from."""

    energy_j: float
    origin: Origin


@dataclass(frozen=True)
class LedgerRow:
    """What one role, of one member where it has one, used on one node.

    Attributes:
        cpu_s: CPU-seconds of the run's processes (0 for the role ``other``, whose processes are not the run's).
        cpu_origin: of cpu_s.
        energy_j: None where the node's energy was not known while this was used.
        origin: of energy_j: attributed, estimated or unavailable.
        parts: energy_j by kind: cpu, dram, gpu.
    """

    role: str
    member: str | None
    node: str
    cpu_s: float
    cpu_origin: Origin
    energy_j: float | None
    origin: Origin
    parts: Mapping[str, Share] = field(default_factory=dict)


@dataclass(frozen=True)
class Total:
    """A sum over rows; energy_j covers the rows that have one, None where none has."""

    cpu_s: float
    energy_j: float | None
    origin: Origin


@dataclass(frozen=True)
class NodeTotal:
    """What one node used while its meter ran.

    Attributes:
        energy_j, origin: of the whole node: measured, estimated or unavailable.
        metered_s: seconds that were metered.  mean_watts: energy over them.
        sources: names of the power sources.
        power: (unix time, watts, origin) at each sample.
    """

    node: str
    energy_j: float | None
    origin: Origin
    metered_s: float
    mean_watts: float | None
    sources: tuple[str, ...]
    power: tuple[tuple[float, float | None, Origin], ...]


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


@dataclass(frozen=True)
class Ledger:
    """See the module's docstring; made by `ledger`."""

    rows: tuple[LedgerRow, ...]
    nodes: tuple[NodeTotal, ...]
    reuse: Reuse

    @property
    def total(self) -> Total:
        """All rows: what all nodes used. Its origin is that of the nodes' energy: measured or estimated."""
        known = [node for node in self.nodes if node.energy_j is not None]
        return Total(
            sum(row.cpu_s for row in self.rows),
            sum(node.energy_j or 0.0 for node in known) if known else None,
            weakest(node.origin for node in known),
        )

    @property
    def run(self) -> Total:
        """What the run itself used: all rows but those of the role ``other``."""
        return _sum(row for row in self.rows if row.role != "other")

    def cpu_by_role(self) -> dict[str, float]:
        """CPU-seconds of each role that used any."""
        return {role: total.cpu_s for role, total in self.by_role().items() if role != "other"}

    def by_role(self) -> dict[str, Total]:
        """Totals of each role, over members and nodes."""
        return _by_role(self.rows)

    def by_member(self) -> dict[str, Total]:
        """Totals of each member, over its roles and nodes; shared roles are in none of them."""
        return {member: _sum(rows) for member, rows in self._rows_of_members().items()}

    def _rows_of_members(self) -> dict[str, list[LedgerRow]]:
        """The rows of each member, in the order of the members' names."""
        rows: dict[str, list[LedgerRow]] = {}
        for row in self.rows:
            if row.member is not None:
                rows.setdefault(row.member, []).append(row)
        return {member: rows[member] for member in sorted(rows, key=_natural_key)}

    def member(self, member: str) -> Total:
        """What one member used; nothing and ``unavailable`` where the log says nothing of it."""
        return _sum(row for row in self.rows if row.member == member)

    def as_dict(self) -> dict[str, Any]:
        """The ledger as plain JSON values: what ledger.json holds."""
        return {
            "version": VERSION,
            "total": vars(self.total),
            "run": vars(self.run),
            "roles": [{"role": role, **vars(total)} for role, total in self.by_role().items()],
            "members": [
                {
                    "member": member,
                    **vars(_sum(rows)),
                    "cpu_s_by_role": {
                        role: total.cpu_s for role, total in _by_role(rows).items() if role in ROLES
                    },
                }
                for member, rows in self._rows_of_members().items()
            ],
            "nodes": [
                {**vars(node), "sources": list(node.sources), "power": [list(point) for point in node.power]}
                for node in self.nodes
            ],
            "rows": [
                {**vars(row), "parts": {kind: vars(s) for kind, s in row.parts.items()}} for row in self.rows
            ],
            "reuse": vars(self.reuse),
        }


def ledger(events: Iterable[Mapping[str, Any]]) -> Ledger:
    """The ledger of a run, from its events so far; types that say nothing of use are ignored."""
    intake = read_intervals(events)
    rows: list[LedgerRow] = []
    nodes = []
    for name in sorted({*intake.nodes, *(name for _, _, name in intake.cpu)}, key=_natural_key):
        node = intake.nodes.get(name, Node())
        rows += _rows_of(name, node, intake)
        nodes.append(_node_total(name, node))
    known = {role: place for place, role in enumerate(ROLES)}
    rows.sort(
        key=lambda row: (
            known.get(row.role, len(ROLES)),
            _natural_key(row.member or ""),
            _natural_key(row.node),
        )
    )
    prepared, consumed = intake.prepared + intake.private, intake.consumed + intake.private
    factor = consumed / prepared if prepared else None
    return Ledger(tuple(rows), tuple(nodes), Reuse(prepared, consumed, intake.private, intake.skipped, factor))


def _rows_of(name: str, node: Node, intake: UsageRecord) -> list[LedgerRow]:
    energy = attribute_energy(node)
    cpu = {(role, member): account for (role, member, where), account in intake.cpu.items() if where == name}
    rows = []
    for role, member in {**cpu, **energy}:
        ticks, cpu_origin = cpu.get((role, member), (0, "measured"))
        shares = energy.get((role, member), {})
        parts = {kind: Share(from_ticks(part), origin) for kind, (part, origin) in sorted(shares.items())}
        rows.append(
            LedgerRow(
                role=role,
                member=member,
                node=name,
                cpu_s=from_ticks(ticks),
                cpu_origin=cpu_origin,
                energy_j=from_ticks(sum(part for part, _ in shares.values())) if shares else None,
                origin=weakest(origin for _, origin in shares.values()),
                parts=parts,
            )
        )
    return rows


def attribute_energy(node: Node, lag: Lag | None = None) -> dict[Owner, dict[str, tuple[int, Origin]]]:
    """Ticks of energy of each owner by kind, with their origin.

    Args:
        lag: see `subtract_claimed`, where the node's intervals are not its first ones.
    """
    times = [(interval.start, interval.end) for interval in node.power]
    by_cpu = spread(node.cpu_spans, times)
    others = subtract_claimed(
        [interval.busy for interval in node.power], [sum(used.values()) for used in by_cpu], lag
    )
    by_device = {device: spread(spans, times) for device, spans in node.device_spans.items()}
    energy: dict[Owner, dict[str, tuple[int, Origin]]] = {}
    for at, interval in enumerate(node.power):
        for part in interval.parts:
            if part.kind == "gpu":
                holders = by_device.get(part.device)
                weights: dict[Owner, int] = dict(holders[at]) if holders is not None else {}
            else:
                weights = dict(by_cpu[at])
                if others[at]:
                    weights[("other", None)] = others[at]
            if not weights:
                weights[("other", None)] = 1
            origin: Origin = "attributed" if part.origin == "measured" else "estimated"
            for owner, ticks in split(part.ticks, weights).items():
                kinds = energy.setdefault(owner, {})
                before, origin_before = kinds.get(part.kind, (0, origin))
                kinds[part.kind] = (before + ticks, weakest((origin, origin_before)))
    return energy


def _node_total(name: str, node: Node) -> NodeTotal:
    parts = [part for interval in node.power for part in interval.parts]
    energy_j = from_ticks(sum(part.ticks for part in parts)) if parts else None
    metered_s = sum((interval.end - interval.start for interval in node.power if interval.parts), 0.0)
    return NodeTotal(
        node=name,
        energy_j=energy_j,
        origin=weakest(part.origin for part in parts),
        metered_s=metered_s,
        mean_watts=energy_j / metered_s if energy_j is not None and metered_s > 0 else None,
        sources=tuple(dict.fromkeys(interval.source for interval in node.power if interval.parts)),
        power=tuple((interval.end, interval.watts, interval.origin) for interval in node.power),
    )


def _by_role(rows: Sequence[LedgerRow]) -> dict[str, Total]:
    present = {row.role for row in rows}
    order = [role for role in ROLES if role in present] + sorted(present - set(ROLES))
    return {role: _sum(row for row in rows if row.role == role) for role in order}


def _sum(rows: Iterable[LedgerRow]) -> Total:
    rows = list(rows)
    known = [row for row in rows if row.energy_j is not None]
    return Total(
        sum(row.cpu_s for row in rows),
        sum(row.energy_j or 0.0 for row in known) if known else None,
        weakest(row.origin for row in known),
    )


def _natural_key(name: str) -> tuple[str, int, str]:
    """Sorts member-2 before member-10."""
    stem = name.rstrip("0123456789")
    return (stem, int(name[len(stem) :] or -1), name)
