"""Cost by member and role: what each used itself, and with its part of the work that serves several."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from ensemble.reporting import text
from ensemble.reporting.page import Cell, escape, number_cell, paragraph, table
from ensemble.reporting.sections import Content, ReportData
from ensemble.reporting.sections.cost import METHOD_WORDS, sum_methods
from ensemble.reporting.theme import ROLE_WORDS, ROLES

if TYPE_CHECKING:
    from ensemble.meter.ledger import Ledger, LedgerRow, Total

MEMBERS = (
    "Direct is what a member used itself. Full adds its part of what serves several: of preparing and feeding by "
    "the samples that it consumed, of all else by the time for which its ranks held places. Mean watts are over "
    "the time in which it held a place."
)
ROLE = (
    "Of a role's energy, direct is what members used themselves, full what they bear when the rest is shared out. "
    "Mean watts are over the time that was metered."
)


def compose(data: ReportData) -> Content:
    """Returns a table of members and one of roles; None where nothing was used."""
    ledger = data.ledger
    if not ledger.rows:
        return None
    members = paragraph(MEMBERS) + _tabulate_members(ledger) if ledger.by_member() else ""
    return members + paragraph(ROLE) + _tabulate_roles(ledger)


def _tabulate_members(ledger: Ledger) -> str:
    direct, full = ledger.by_member(), ledger.by_member(full=True)
    origin = text.joules_head(total.origin for total in direct.values())
    head = [("member", "text"), (f"direct {origin}", ""), ("full J", ""), ("idle J", ""), ("CPU-s", "")]
    head += [("full CPU-s", ""), *_power_head(ledger), *_origin_head(origin)]
    rows = []
    for place, (member, total) in enumerate(direct.items()):
        of_member = [row for row in ledger.rows if row.member == member]
        cells = [Cell(escape(member), place), number_cell(total.energy_j), number_cell(full[member].energy_j)]
        cells += [number_cell(total.idle_j), _seconds(total.cpu_s), _seconds(full[member].cpu_s)]
        rows.append([*cells, *_power_cells(ledger, total, of_member), *_origin_cells(origin, total)])
    return table(head, rows)


def _tabulate_roles(ledger: Ledger) -> str:
    roles = ledger.by_role()
    origin = text.joules_head(total.origin for total in roles.values())
    head = [("role", "text"), (origin, ""), ("direct J", ""), ("full J", ""), ("idle J", ""), ("CPU-s", "")]
    head += [*_power_head(ledger), *_origin_head(origin)]
    rows = []
    for place, (role, total) in enumerate(roles.items()):
        of_role = [row for row in ledger.rows if row.role == role]
        dot = f'<span class="dot" style="background:{ROLES.get(role, "#8a94a3")}"></span>'
        cells = [Cell(dot + escape(ROLE_WORDS.get(role, role)), place), number_cell(total.energy_j)]
        cells += [number_cell(_of_members(view, role)) for view in (ledger.rows, ledger.full_rows)]
        cells += [number_cell(total.idle_j), _seconds(total.cpu_s)]
        rows.append([*cells, *_power_cells(ledger, total, of_role), *_origin_cells(origin, total)])
    return table(head, rows)


def _power_head(ledger: Ledger) -> list[tuple[str, str]]:
    on_gpus = [("GPU-s", "")] if ledger.total.gpu_s is not None else []
    return [("mean W", ""), ("peak W", ""), *on_gpus, ("split by", "text")]


def _power_cells(ledger: Ledger, total: Total, rows: list[LedgerRow]) -> list[Cell]:
    on_gpus = [_seconds(total.gpu_s)] if ledger.total.gpu_s is not None else []
    return [number_cell(total.mean_w), number_cell(total.peak_w), *on_gpus, _methods_cell(rows)]


def _methods_cell(rows: list[LedgerRow]) -> Cell:
    methods = sum_methods(rows)
    whole = sum(methods.values())
    words = [f"{METHOD_WORDS.get(method, method)} {joules / whole:.0%}" for method, joules in methods.items()]
    return Cell(escape(", ".join(words)))


def _of_members(rows: Iterable[LedgerRow], role: str) -> float | None:
    joules = [r.energy_j for r in rows if r.role == role and r.member is not None and r.energy_j is not None]
    return sum(joules) if joules else None


def _origin_head(origin: str) -> list[tuple[str, str]]:
    return [("J is", "text")] if origin == "J" else []


def _origin_cells(origin: str, total: Total) -> list[Cell]:
    return [Cell(total.origin, total.origin)] if origin == "J" else []


def _seconds(value: float | None) -> Cell:
    return number_cell(None if not value else round(value, 1))
