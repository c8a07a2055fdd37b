"""The figures of what a run has used at one moment, in CPU-seconds and joules, by role, member and node.

`Ledger.rows` has what serves several members in rows of its own; `Ledger.full_rows` shares that out to members.
Both add up to the totals exactly. The role ``idle`` is what nodes would have used anyway, ``other`` what they
used for others' processes.
"""

from __future__ import annotations

import csv
import dataclasses
import io
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ensemble.meter.energy_allocator import METHODS
from ensemble.meter.ledger_rows import LedgerRow, Reuse, Total, count_ticks, make_rows, natural_key, role_key
from ensemble.meter.origin import Origin, from_ticks, weakest
from ensemble.meter.shared_cost_allocation import share_out
from ensemble.meter.usage_parser import Samples
from ensemble.meter.usage_records import Owner, PowerInterval
from ensemble.meter.usage_sums import BUSY, CPU, SM, NodeTotal, Sums, Use, list_energies

VERSION = 3
NOT_THE_RUNS = ("idle", "other")
#: Parts of a node.
KINDS = ("cpu", "dram", "gpu", "node")

#: What each column of the table holds.
COLUMNS = {
    "view": "direct: work that serves several members has rows of its own; full: it is shared out to them",
    "role": "what it was used for",
    "member": "empty where it belongs to none",
    "node": "where it was used",
    "cohort": "whose stream it served; empty where it served none",
    "cpu_s": "CPU-seconds",
    "cpu_origin": "origin of cpu_s",
    "energy_j": "joules; empty where they could not be had",
    "origin": "origin of energy_j",
    "gpu_s": "seconds in which it kept GPUs busy; empty where that is not known",
    **{f"{kind}_j": f"the part of energy_j that is of the kind {kind}" for kind in KINDS},
    **{f"by_{method}_j": f"the part of energy_j that was split by {method}" for method in METHODS},
}


@dataclass(frozen=True, eq=False)
class Ledger:
    """See the module's docstring; made by `LedgerView.read`, of which it is a copy.

    Attributes:
        sums: in ticks.
        samples: counts.
        held_s: seconds in which each member held a place.
        ranks: ticks of rank-seconds, by (member, node).
        power: by node, the intervals of a ledger that was read from the whole log at once; else those of the last
            minute at least.
    """

    sums: Sums
    samples: Samples
    held_s: Mapping[str, float]
    ranks: Mapping[tuple[str, str], int]
    power: Mapping[str, Sequence[PowerInterval]]

    # -- rows -----------------------------------------------------------------------------------------------------

    @cached_property
    def rows(self) -> tuple[LedgerRow, ...]:
        """The first view."""
        return make_rows(self.sums.uses)

    @cached_property
    def full_rows(self) -> tuple[LedgerRow, ...]:
        """The second view: each row with the member to whom it belongs, as far as there is one."""
        shared = Sums()
        share_out(self.sums.uses, self.samples.by_member, self.ranks, shared.use)
        return make_rows(shared.uses)

    @cached_property
    def nodes(self) -> tuple[NodeTotal, ...]:
        return tuple(self.sums.nodes[name] for name in sorted(self.sums.nodes, key=natural_key))

    @property
    def reuse(self) -> Reuse:
        samples = self.samples
        prepared, consumed = samples.prepared + samples.private, samples.consumed + samples.private
        factor = consumed / prepared if prepared else None
        return Reuse(prepared, consumed, samples.private, samples.skipped, factor)

    # -- totals ---------------------------------------------------------------------------------------------------

    @property
    def metered_s(self) -> float:
        return sum(end - start for start, end in self.sums.metered)

    @property
    def total(self) -> Total:
        """All rows: what all nodes used. Its origin is that of the nodes' energy: measured or estimated."""
        metered = [node for node in self.nodes if node.energy_j is not None]
        whole = self._sum(self.sums.uses.items(), self.metered_s)
        return dataclasses.replace(whole, origin=weakest(node.origin for node in metered))

    @property
    def run(self) -> Total:
        """What the run itself used: all rows but those of the roles ``idle`` and ``other``."""
        uses = ((key, use) for key, use in self.sums.uses.items() if key[0].role not in NOT_THE_RUNS)
        return self._sum(uses, self.metered_s)

    def cpu_by_role(self) -> dict[str, float]:
        """CPU-seconds of each role that used any."""
        return {role: total.cpu_s for role, total in self.by_role().items() if role not in NOT_THE_RUNS}

    def by_role(self) -> dict[str, Total]:
        """Totals of each role, over members and nodes."""
        uses = defaultdict[str, list[_KeyAndUse]](list)
        for key, use in self.sums.uses.items():
            uses[key[0].role].append((key, use))
        order = sorted(uses, key=role_key)
        return {role: self._sum(uses[role], self.metered_s) for role in order}

    def by_member(self, full: bool = False) -> dict[str, Total]:
        """Totals of each member, over its roles and nodes.

        Args:
            full: with its part of what serves several members.
        """
        return self._full_totals_of_members if full else self._totals_of_members

    def member(self, member: str, full: bool = False) -> Total:
        """As `by_member` has it; nothing and ``unavailable`` where the log says nothing of it."""
        uses = (self._full_uses_of_members if full else self._uses_of_members).get(member, [])
        return self._sum(uses, self.held_s.get(member, 0.0))

    @cached_property
    def _totals_of_members(self) -> dict[str, Total]:
        return {member: self.member(member) for member in sorted(self._uses_of_members, key=natural_key)}

    @cached_property
    def _full_totals_of_members(self) -> dict[str, Total]:
        members = sorted(self._full_uses_of_members, key=natural_key)
        return {member: self.member(member, full=True) for member in members}

    @cached_property
    def _uses_of_members(self) -> dict[str, list[_KeyAndUse]]:
        return _group_by_member(self.sums.uses)

    @cached_property
    def _full_uses_of_members(self) -> dict[str, list[_KeyAndUse]]:
        """For each member its roles together, of which there may be many; each node with idle power by itself."""
        shared, named = Sums(), self._nodes_with_idle
        share_out(
            self.sums.uses,
            self.samples.by_member,
            self.ranks,
            lambda owner, node: shared.use(Owner("", owner.member), node if node in named else ""),
        )
        return _group_by_member(shared.uses)

    @cached_property
    def _nodes_with_idle(self) -> frozenset[str]:
        return frozenset(name for name, node in self.sums.nodes.items() if node.idle is not None)

    def _sum(self, uses: Iterable[_KeyAndUse], seconds: float) -> Total:
        cpu = energy = idle = gpu = 0
        origins, has_idle = set[Origin](), False
        for (_, node), use in uses:
            cpu += count_ticks(use, CPU)
            gpu += count_ticks(use, BUSY) or count_ticks(use, SM)
            energies = list_energies(use)
            has_idle |= bool(energies) and node in self._nodes_with_idle
            for _, method, ticks, origin in energies:
                energy += ticks
                idle += ticks if method == "reservation" else 0
                origins.add(origin)
        energy_j = from_ticks(energy) if origins else None
        return Total(
            cpu_s=from_ticks(cpu),
            energy_j=energy_j,
            origin=weakest(origins),
            idle_j=from_ticks(idle) if has_idle else None,
            gpu_s=from_ticks(gpu) if gpu else None,
            mean_w=energy_j / seconds if energy_j is not None and seconds > 0 else None,
        )

    # -- files ----------------------------------------------------------------------------------------------------

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
                    **vars(self.member(member)),
                    "held_s": self.held_s.get(member, 0.0),
                    "cpu_s_by_role": _sum_cpu(self._uses_of_members.get(member, [])),
                    "full": vars(full),
                }
                for member, full in self.by_member(full=True).items()
            ],
            "nodes": [_describe_node(node, self.power.get(node.node, ())) for node in self.nodes],
            "rows": list(map(_describe_row, self.rows)),
            "full_rows": list(map(_describe_row, self.full_rows)),
            "reuse": vars(self.reuse),
        }

    def as_csv(self) -> str:
        """The rows of both views as one table: a line with the names of `COLUMNS`, then a line for each row.

        Each view's rows sum to the same total exactly: numbers are written with all their digits. Use one of the
        views, as in `rows[rows.view == "direct"]`: together they count everything twice.
        """
        text = io.StringIO()
        writer = csv.DictWriter(text, COLUMNS, extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        writer.writerows(self.list_rows())
        return text.getvalue()

    def list_rows(self) -> list[dict[str, Any]]:
        """The rows of both views, each with the fields of `COLUMNS` that it has, and others."""
        return [
            {
                "view": view,
                **vars(row),
                **{f"{kind}_j": share.energy_j for kind, share in row.parts.items()},
                **{f"by_{method}_j": joules for method, joules in row.methods.items()},
            }
            for view, rows in (("direct", self.rows), ("full", self.full_rows))
            for row in rows
        ]


_KeyAndUse = tuple[tuple[Owner, str], Use]


def _group_by_member(uses: Mapping[tuple[Owner, str], Use]) -> dict[str, list[_KeyAndUse]]:
    groups = defaultdict[str, list[_KeyAndUse]](list)
    for key, use in uses.items():
        if (member := key[0].member) is not None:
            groups[member].append((key, use))
    return groups


def _sum_cpu(uses: Iterable[_KeyAndUse]) -> dict[str, float]:
    seconds: dict[str, float] = {}
    for (owner, _), use in sorted(uses, key=lambda item: role_key(item[0][0].role)):
        seconds[owner.role] = seconds.get(owner.role, 0.0) + from_ticks(count_ticks(use, CPU))
    return seconds


def _describe_node(node: NodeTotal, power: Sequence[PowerInterval]) -> dict[str, Any]:
    names = (
        "node",
        "energy_j",
        "origin",
        "metered_s",
        "mean_watts",
        "sources",
        "idle_j",
    )
    samples = [[interval.end, interval.watts, interval.origin, interval.idle_watts] for interval in power]
    figures = {name: getattr(node, name) for name in names}
    return {**figures, "power": samples, "begins": [interval.start for interval in power]}


def _describe_row(row: LedgerRow) -> dict[str, Any]:
    return {**vars(row), "parts": {kind: vars(share) for kind, share in row.parts.items()}}
