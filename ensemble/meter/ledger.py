"""Presents what a run used, in CPU-seconds and joules, by role, member and node: a pure function of its events.

Roles of CPU time: ``startup``, ``train`` (members), ``prepare``, ``feed`` (the shared pipeline), ``verify``
(shared samples that are compared), ``profile`` (members measured before they are packed), ``orchestrate`` and
``ray``. Energy has two more: ``idle``, what a node would have used anyway for cores and GPUs that no member
reserved, and ``other``, what it used for processes that are not the run's.

There are two views. `Ledger.rows` has what serves several members in rows of its own, without a member.
`Ledger.full_rows` shares that out to members (`ensemble.meter.shared_cost_allocation`). Both add up to the totals
exactly. `ensemble.meter.attribution` and docs/concepts/accounting.md say how energy is attributed. A share of what
was measured is ``attributed``, a share of what was estimated ``estimated``.

The log may hold several starts of the run (resumes). Counts of one start say nothing about the next.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

from ensemble.events import Event
from ensemble.meter.account import ROLES, Account, NodeUse, Sums, Use
from ensemble.meter.ledger_rows import LedgerRow, NodeTotal, Reuse, Share, Total
from ensemble.meter.origin import from_ticks, weakest
from ensemble.meter.proportional_split import Owner
from ensemble.meter.shared_cost_allocation import share_out
from ensemble.meter.usage_records import PowerInterval

VERSION = 2
NOT_THE_RUNS = ("idle", "other")
K = TypeVar("K")


@dataclass(frozen=True)
class Ledger:
    """See the module's docstring; made by `ledger`.

    Attributes:
        rows: the first view.
        held_s: seconds in which each member held a place.
        metered_s: seconds in which some node was metered.
        peaks: see `ensemble.meter.account.Sums`.
    """

    rows: tuple[LedgerRow, ...]
    nodes: tuple[NodeTotal, ...]
    reuse: Reuse
    held_s: Mapping[str, float]
    metered_s: float
    peaks: Mapping[tuple[str, str], float]
    _share_out: Callable[[Callable[[Owner, str], Use]], None] = field(repr=False, compare=False)

    @cached_property
    def full_rows(self) -> tuple[LedgerRow, ...]:
        """The second view: each row with the member to whom it belongs, as far as there is one."""
        uses: dict[tuple[Owner, str], Use] = {}
        self._share_out(lambda owner, node: _find(uses, (owner, node)))
        return _make_rows(uses)

    @property
    def total(self) -> Total:
        """All rows: what all nodes used. Its origin is that of the nodes' energy: measured or estimated."""
        known = [node for node in self.nodes if node.energy_j is not None]
        peaks = [node.peak_watts for node in known if node.peak_watts is not None]
        whole = self._sum(self.rows, self.metered_s, sum(peaks) if peaks else None)
        return dataclasses.replace(whole, origin=weakest(node.origin for node in known))

    @property
    def run(self) -> Total:
        """What the run itself used: all rows but those of the roles ``idle`` and ``other``."""
        rows = [row for row in self.rows if row.role not in NOT_THE_RUNS]
        return self._sum(rows, self.metered_s, self.peaks.get(("run", "")))

    def cpu_by_role(self) -> dict[str, float]:
        """CPU-seconds of each role that used any."""
        return {role: total.cpu_s for role, total in self.by_role().items() if role not in NOT_THE_RUNS}

    def by_role(self) -> dict[str, Total]:
        """Totals of each role, over members and nodes."""
        rows = _group(self.rows, lambda row: row.role)
        order = [role for role in ROLES if role in rows] + sorted(set(rows) - set(ROLES))
        return {role: self._sum(rows[role], self.metered_s, self.peaks.get(("role", role))) for role in order}

    def by_member(self, full: bool = False) -> dict[str, Total]:
        """Totals of each member, over its roles and nodes.

        Args:
            full: with its part of what serves several members; without a peak, which only rows of its own have.
        """
        rows = self._full_rows_of_members if full else self._rows_of_members
        return {member: self._sum_member(member, full) for member in sorted(rows, key=_natural_key)}

    def member(self, member: str, full: bool = False) -> Total:
        """As `by_member` has it; nothing and ``unavailable`` where the log says nothing of it."""
        return self._sum_member(member, full)

    def _sum_member(self, member: str, full: bool) -> Total:
        rows = (self._full_rows_of_members if full else self._rows_of_members).get(member, [])
        return self._sum(rows, self.held_s.get(member, 0.0), None if full else self.peaks.get(("member", member)))

    def _sum(self, rows: Iterable[LedgerRow], seconds: float, peak_w: float | None) -> Total:
        return _sum(rows, seconds, peak_w, self._nodes_with_idle)

    @cached_property
    def _nodes_with_idle(self) -> frozenset[str]:
        """Nodes whose idle power was known."""
        return frozenset(node.node for node in self.nodes if node.idle_j is not None)

    @cached_property
    def _rows_of_members(self) -> dict[str, list[LedgerRow]]:
        return _group((row for row in self.rows if row.member is not None), lambda row: row.member or "")

    @cached_property
    def _full_rows_of_members(self) -> dict[str, list[LedgerRow]]:
        """For each member its roles together, of which there may be many; each node with idle power by itself."""
        uses: dict[tuple[Owner, str], Use] = {}
        named = self._nodes_with_idle
        self._share_out(lambda owner, node: _find(uses, (Owner("", owner.member), node if node in named else "")))
        rows = (_make_row(owner, node, use) for (owner, node), use in uses.items() if owner.member is not None)
        return _group(rows, lambda row: row.member or "")

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
                    "cpu_s_by_role": _sum_cpu(self._rows_of_members.get(member, [])),
                    "full": vars(self.member(member, full=True)),
                }
                for member in self.by_member(full=True)
            ],
            "nodes": [{name: _list(value) for name, value in vars(node).items()} for node in self.nodes],
            "rows": list(map(_describe_row, self.rows)),
            "full_rows": list(map(_describe_row, self.full_rows)),
            "reuse": vars(self.reuse),
        }


def ledger(events: Iterable[Event]) -> Ledger:
    """The ledger of a run, from its events so far; types that say nothing of use are ignored.

    So are events that do not fit to those before: the fold of the log notes them.
    """
    account = Account()
    for event in events:
        try:  # faster than contextlib.suppress
            account.apply(event)
        except (ArithmeticError, LookupError, ValueError):
            continue
    return build_ledger(account)


def build_ledger(account: Account, member: str | None = None) -> Ledger:
    """The ledger of an account, up to now.

    Args:
        member: the one whose own rows matter, which is quicker: of others it has less than they used.
    """
    sums, reader = account.sum_up(member), account.reader
    held, ranks = reader.count_held(account.last_t)
    peaks: dict[tuple[str, str], float] = {}
    for (what, name, _), watts in sums.peaks.items():
        peaks[what, name] = peaks.get((what, name), 0.0) + watts
    samples = reader.samples
    prepared, consumed = samples.prepared + samples.private, samples.consumed + samples.private
    return Ledger(
        rows=_make_rows(sums.uses),
        nodes=tuple(
            _make_node_total(name, sums, reader.node(name).power) for name in sorted(sums.nodes, key=_natural_key)
        ),
        reuse=Reuse(
            prepared, consumed, samples.private, samples.skipped, consumed / prepared if prepared else None
        ),
        held_s={name: from_ticks(ticks) for name, ticks in held.items()},
        metered_s=sums.metered_s,
        peaks=peaks,
        _share_out=lambda find: share_out(sums.uses, reader.samples.by_member, ranks, find),
    )


def _make_rows(uses: Mapping[tuple[Owner, str], Use]) -> tuple[LedgerRow, ...]:
    known = {role: place for place, role in enumerate(ROLES)}
    rows = [_make_row(owner, node, use) for (owner, node), use in uses.items()]
    rows.sort(
        key=lambda row: (
            known.get(row.role, len(ROLES)),
            _natural_key(row.member or ""),
            _natural_key(row.node),
            -1 if row.cohort is None else row.cohort,
        )
    )
    return tuple(rows)


def _make_row(owner: Owner, node: str, use: Use) -> LedgerRow:
    parts: dict[str, Share] = {}
    for kind in sorted({kind for kind, _ in use.energy}):
        shares = {method: share for (of, method), share in use.energy.items() if of == kind}
        parts[kind] = Share(
            from_ticks(sum(ticks for ticks, _ in shares.values())),
            weakest(origin for _, origin in shares.values()),
            {method: from_ticks(ticks) for method, (ticks, _) in sorted(shares.items())},
        )
    gpu = use.busy or use.sm
    return LedgerRow(
        role=owner.role,
        member=owner.member,
        node=node,
        cohort=owner.cohort,
        cpu_s=from_ticks(use.cpu),
        cpu_origin=use.cpu_origin,
        energy_j=sum(share.energy_j for share in parts.values()) if parts else None,
        origin=weakest(share.origin for share in parts.values()),
        gpu_s=from_ticks(gpu) if gpu else None,
        parts=parts,
    )


def _make_node_total(name: str, sums: Sums, power: Sequence[PowerInterval]) -> NodeTotal:
    node = sums.nodes.get(name, NodeUse())
    energy_j = None if node.energy is None else from_ticks(node.energy)
    return NodeTotal(
        node=name,
        energy_j=energy_j,
        origin="unavailable" if energy_j is None else node.origin,
        metered_s=node.metered_s,
        mean_watts=energy_j / node.metered_s if energy_j is not None and node.metered_s > 0 else None,
        sources=tuple(node.sources),
        power=tuple((each.end, each.watts, each.origin, _get_idle_watts(each)) for each in power),
        begins=tuple(each.start for each in power),
        idle_j=None if node.idle is None else from_ticks(node.idle),
        peak_watts=node.peak_w,
        unread_s=node.unread_s,
    )


def _get_idle_watts(interval: PowerInterval) -> float | None:
    idle = [part.idle for part in interval.parts if part.idle is not None]
    length = interval.end - interval.start
    return from_ticks(sum(idle)) / length if idle and length > 0 else None


def _sum(rows: Iterable[LedgerRow], seconds: float, peak_w: float | None, with_idle: frozenset[str]) -> Total:
    rows = list(rows)
    known = [row for row in rows if row.energy_j is not None]
    energy_j = sum(row.energy_j or 0.0 for row in known) if known else None
    busy = [row.gpu_s for row in rows if row.gpu_s is not None]
    idle = [row.idle_j for row in known if row.node in with_idle]
    return Total(
        cpu_s=sum(row.cpu_s for row in rows),
        energy_j=energy_j,
        origin=weakest(row.origin for row in known),
        idle_j=sum(idle) if idle else None,
        gpu_s=sum(busy) if busy else None,
        mean_w=energy_j / seconds if energy_j is not None and seconds > 0 else None,
        peak_w=peak_w,
    )


def _sum_cpu(rows: Iterable[LedgerRow]) -> dict[str, float]:
    return {role: sum(row.cpu_s for row in of) for role, of in _group(rows, lambda row: row.role).items()}


def _find(uses: dict[K, Use], key: K) -> Use:
    found = uses.get(key)
    if found is None:
        found = uses[key] = Use()
    return found


def _group(rows: Iterable[LedgerRow], key: Callable[[LedgerRow], str]) -> dict[str, list[LedgerRow]]:
    found: dict[str, list[LedgerRow]] = {}
    for row in rows:
        found.setdefault(key(row), []).append(row)
    return found


def _list(value: Any) -> Any:
    return list(map(_list, value)) if isinstance(value, tuple) else value


def _describe_row(row: LedgerRow) -> dict[str, Any]:
    return {**vars(row), "parts": {kind: vars(share) for kind, share in row.parts.items()}}


def _natural_key(name: str) -> tuple[str, int, str]:
    """Sorts member-2 before member-10."""
    stem = name.rstrip("0123456789")
    return (stem, int(name[len(stem) :] or -1), name)
