"""Cost by member and role: what each used itself, and with its part of the work that serves several."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from ensemble.reporting import text
from ensemble.reporting.sections import Cell, Column, Table
from ensemble.reporting.sections.cost import METHOD_WORDS, ROLE_WORDS, sum_methods

if TYPE_CHECKING:
    from ensemble.meter import Ledger
    from ensemble.meter.ledger_rows import LedgerRow, Total
    from ensemble.meter.origin import Origin
    from ensemble.store import RunState

MEMBERS = (
    "Direct is what a member used itself. Full adds its part of what serves several: of preparing and feeding by "
    "the samples that it consumed, of all else by the time for which its ranks held places. Mean watts are over "
    "the time in which it held a place."
)
ROLE = (
    "Of a role's energy, direct is what members used themselves, full what they bear when the rest is shared out. "
    "Mean watts are over the time that was metered."
)


def tabulate(state: RunState, ledger: Ledger) -> list[Table]:
    """Returns a table of members and one of roles; none where nothing was used."""
    if not ledger.rows:
        return []
    members = [_tabulate_members(ledger)] if ledger.by_member() else []
    return [*members, _tabulate_roles(ledger)]


def _tabulate_members(ledger: Ledger) -> Table:
    whole, full = ledger.total, ledger.by_member(full=True)
    direct = {member: ledger.member(member) for member in full}
    of_member: dict[str | None, list[LedgerRow]] = {}
    for each in ledger.rows:
        of_member.setdefault(each.member, []).append(each)
    known = [total.origin for total in (*direct.values(), *full.values())]
    origin = text.joules_head(known)
    head = [("member", "text"), (f"direct {origin}", ""), ("full J", ""), ("CPU-s", ""), ("full CPU-s", "")]
    rows = []
    for place, (member, total) in enumerate(direct.items()):
        origins = list(dict.fromkeys((total.origin, full[member].origin)))
        cells: list[Cell] = [(member, place), total.energy_j, full[member].energy_j]
        cells += [_seconds(total.cpu_s), _seconds(full[member].cpu_s)]
        mixed = [", full ".join(origins)] if origin == "J" else []
        rows.append([*cells, *_cells(whole, total, of_member.get(member, [])), *mixed])
    text_of_it = MEMBERS + _describe_origin(known)
    return Table("cost_of_members", "Cost by member", text_of_it, [*head, *_head(whole, origin)], rows, True)


def _tabulate_roles(ledger: Ledger) -> Table:
    whole, roles = ledger.total, ledger.by_role()
    known = [total.origin for total in roles.values()]
    origin = text.joules_head(known)
    head = [("role", "text"), (origin, ""), ("direct J", ""), ("full J", ""), ("CPU-s", "")]
    rows = []
    for place, (role, total) in enumerate(roles.items()):
        of_role = [row for row in ledger.rows if row.role == role]
        cells: list[Cell] = [(ROLE_WORDS.get(role, role), place), total.energy_j]
        cells += [_sum_members(view, role) for view in (ledger.rows, ledger.full_rows)]
        cells.append(_seconds(total.cpu_s))
        mixed = [total.origin] if origin == "J" else []
        rows.append([*cells, *_cells(whole, total, of_role), *mixed])
    text_of_it = ROLE + _describe_origin(known)
    return Table("cost_of_roles", "Cost by role", text_of_it, [*head, *_head(whole, origin)], rows)


def _describe_origin(origins: Iterable[Origin]) -> str:
    """Returns the origin of all energy and power of a table; nothing where lines have cells for their own."""
    known = set(origins) - {"unavailable"}
    return f" All joules and watts are {known.pop()}." if len(known) == 1 else ""


def _head(whole: Total, origin: str) -> list[Column]:
    """Columns of both tables; those of which nothing is known in this run are left out."""
    idle = [("idle J", "")] if whole.idle_j else []
    on_gpus = [("GPU-s", "")] if whole.gpu_s is not None else []
    mixed = [("J is", "text")] if origin == "J" else []
    return [*idle, ("mean W", ""), ("peak W", ""), *on_gpus, ("split by", "text"), *mixed]


def _cells(whole: Total, total: Total, rows: list[LedgerRow]) -> list[Cell]:
    idle = [total.idle_j] if whole.idle_j else []
    on_gpus = [_seconds(total.gpu_s)] if whole.gpu_s is not None else []
    return [*idle, total.mean_w, total.peak_w, *on_gpus, _describe_methods(rows)]


def _describe_methods(rows: list[LedgerRow]) -> str:
    methods = sum_methods(rows)
    whole = sum(methods.values())
    words = [f"{METHOD_WORDS.get(method, method)} {joules / whole:.0%}" for method, joules in methods.items()]
    return ", ".join(words)


def _sum_members(rows: Iterable[LedgerRow], role: str) -> float | None:
    """The joules of a role's rows that belong to members."""
    joules = [r.energy_j for r in rows if r.role == role and r.member is not None and r.energy_j is not None]
    return sum(joules) if joules else None


def _seconds(value: float | None) -> float | None:
    return round(value, 1) if value else None
