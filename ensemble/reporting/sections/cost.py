"""Cost: CPU time, joules and wall time of the run and its roles; what the joules amount to."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from ensemble.events import Epoch
from ensemble.meter.impact import UNITS, Impact, Quantity, Work, assess_impact
from ensemble.reporting import text
from ensemble.reporting.ranking import finite_or_none, metric, rank_members
from ensemble.reporting.sections import Cell, Line, Table

if TYPE_CHECKING:
    from ensemble.meter import Ledger
    from ensemble.meter.ledger_rows import LedgerRow
    from ensemble.store import RunState

METHOD = (
    "Emissions are kWh × PUE × carbon intensity by the location-based method: offsets are never subtracted, the "
    "manufacture of the machines is not included. All is of the whole run, failed and pruned members included."
)


def run_impact(state: RunState, ledger: Ledger) -> Impact:
    """Returns what the energy of a run amounts to, with what its last start was given."""
    return assess_impact(ledger.run, state.header.energy or {}, measure_work(state))


def measure_work(state: RunState) -> Work:
    finished = [member for member in rank_members(state) if member.has_result]
    values = (finite_or_none(e.metrics.get(state.objective)) for e in _epochs(state))
    return Work(
        models=len(finished),
        samples=sum(event.samples or 0 for event in _epochs(state)),
        objective=state.objective,
        maximized=state.direction == "max",
        best=next((value for m in finished if (value := metric(m, state.objective)) is not None), None),
        reported=tuple(value for value in values if value is not None),
    )


def summarize_impact(state: RunState, ledger: Ledger) -> list[Line]:
    """Returns joules per unit of work, and emissions and price where they were given; nothing without energy."""
    impact = run_impact(state, ledger)
    if impact.energy.total is None:
        return []
    units = {name: text.joules(value) for name, value in impact.energy.per.items() if value is not None}
    lines = [("", ", ".join(f"{joules} per {_unit(name, state)}" for name, joules in units.items()))]
    for quantity in (impact.emissions, impact.price):
        if quantity.total is not None:
            per_model = quantity.per["per_model"]
            share = "" if per_model is None else f", {_amount(quantity, per_model)} per {UNITS['per_model']}"
            lines.append(
                (
                    quantity.name,
                    f"{_amount(quantity, quantity.total)} {quantity.origin}{share} "
                    f"(given: {', '.join(quantity.given)})",
                )
            )
    return [line for line in lines if line[1]]


def tabulate_impact(state: RunState, ledger: Ledger) -> list[Table]:
    """Returns a table with a row for each quantity; none where no node has told its energy."""
    impact = run_impact(state, ledger)
    if impact.energy.total is None:
        return []
    units = [name for name in UNITS if name not in impact.reasons]
    head = [("", "text"), ("whole run", ""), *((f"per {_unit(name, state)}", "") for name in units)]
    is_given = any(quantity.given for quantity in impact.quantities)
    rows = []
    for quantity in impact.quantities:
        if quantity.total is not None:
            values = (quantity.total, *(quantity.per[name] for name in units))
            cells: list[Cell] = [None if v is None else (_amount(quantity, v), v) for v in values]
            rows.append(
                [
                    f"{quantity.name} ({quantity.unit})",
                    *cells,
                    quantity.origin,
                    *([", ".join(quantity.given)] if is_given else []),
                ]
            )
    notes = [f"No {quantity.name}: {quantity.reason}." for quantity in impact.quantities if quantity.total is None]
    notes += [f"Nothing per {UNITS[name]}: {reason}." for name, reason in impact.reasons.items()]
    head = [*head, ("energy", "text"), *([("given", "text")] if is_given else [])]
    return [Table("impact", "What the energy amounts to", " ".join([METHOD, *notes]), head, rows)]


def _epochs(state: RunState) -> list[Epoch]:
    return [event for member in state.members.values() for event in member.history]


def _unit(name: str, state: RunState) -> str:
    return f"{UNITS[name]} of {state.objective}" if name == "per_point" else UNITS[name]


def _amount(quantity: Quantity, value: float) -> str:
    if quantity.name == "energy":
        return text.joules(value)
    if quantity.name == "emissions":
        return text.emissions(value)
    return f"{text.amount(value)} {quantity.unit}"


#: The roles of the ledger in words.
ROLE_WORDS = {
    "startup": "starting up",
    "prepare": "preparing samples",
    "batch": "batch stages",
    "feed": "feeding",
    "verify": "comparing shared samples",
    "train": "training",
    "profile": "measuring members",
    "base": "making the base",
    "orchestrate": "orchestrating",
    "ray": "Ray",
    "idle": "idle, not reserved",
    "other": "other processes",
}
IDLE = "reservation"
#: Explains a column of the tables.
FULL = "full J: a member's own joules and its part of what was spent for all members"
#: What energy was shared out by.
METHOD_WORDS = {
    IDLE: "reservation",
    "cpu_time": "CPU time",
    "sm_utilization": "SM utilization",
    "busy_time": "busy time of the GPU",
    "share": "declared share of the GPU",
    "dynamic": "dynamic energy of the parts",
}


#: What origins of joules mean.
ORIGIN_WORDS = {
    "measured": "measured",
    "attributed": "its part of what was measured",
    "estimated": "estimated, not measured",
}


def summarize(state: RunState, ledger: Ledger) -> list[Line]:
    """Returns the cost in short, then CPU time by role, and energy with what it amounts to."""
    roles, run = ledger.cpu_by_role(), ledger.run
    used = [f"{sum(roles.values()):,.1f} CPU-seconds"] if roles else []
    if run.energy_j is not None:
        used.append(f"{text.joules(run.energy_j)} ({ORIGIN_WORDS[run.origin]})")
    lines = [("cost", ", ".join([text.duration(state.wall_s), *used]))]
    if roles:
        split = ", ".join(f"{ROLE_WORDS.get(role, role)} {text.cpu(used)}" for role, used in roles.items())
        lines.append(("CPU time", f"{text.cpu(sum(roles.values()))}: {split}"))
    lines.append(("energy", describe_energy(ledger)))
    lines += [("", split)] if (split := _describe_split(ledger)) else []
    lines += [("", FULL)] if knows_full_joules(ledger) else []
    return lines + summarize_impact(state, ledger)


def knows_full_joules(ledger: Ledger) -> bool:
    """Whether the tables have the column that `FULL` explains."""
    return any(total.energy_j is not None for total in ledger.by_member(full=True).values())


def sum_methods(rows: Iterable[LedgerRow]) -> dict[str, float]:
    joules: dict[str, float] = {}
    for row in rows:
        for share in row.parts.values():
            for method, energy_j in share.by.items():
                joules[method] = joules.get(method, 0.0) + energy_j
    return {method: energy_j for method, energy_j in joules.items() if energy_j}


def describe_energy(ledger: Ledger) -> str:
    """Returns the joules of the run with their origin and sources, or that there are none, as one line."""
    total = ledger.run
    if total.energy_j is None:
        return "unavailable: no node has a power source that could be read"
    sources = sorted({source for node in ledger.nodes for source in node.sources})
    line = f"{text.joules(total.energy_j)} {total.origin}"
    whole = ledger.total
    if whole.energy_j is not None and whole.energy_j > total.energy_j * 1.001:
        line += f", of {text.joules(whole.energy_j)} {whole.origin} for all nodes, other programs included"
    return line + (f" (source: {', '.join(sources)})" if sources else "")


def _describe_split(ledger: Ledger) -> str:
    """Returns how much of the run's energy is idle, and by what it was shared out."""
    methods = sum_methods(row for row in ledger.rows if row.role not in ("idle", "other"))
    idle_j = methods.pop(IDLE, 0.0)
    if idle_j:
        parts = [f"{text.joules(energy_j)} by {METHOD_WORDS[by]}" for by, energy_j in methods.items()]
        return f"idle {text.joules(idle_j)} by reservation" + (f", dynamic {_join(parts)}" if parts else "")
    if not methods:
        return ""
    split = f"split by {_join(METHOD_WORDS[by] for by in methods)}"
    if {node.origin for node in ledger.nodes if node.energy_j is not None} == {"estimated"}:
        return f"{split}; the estimate does not include idle power"
    return split if ledger.run.idle_j is not None else f"idle and dynamic energy together, {split}"


def _join(words: Iterable[str]) -> str:
    *most, last = words
    return f"{', '.join(most)} and {last}" if most else last


ROLE = (
    "Of a role's energy, direct is what members used themselves, full adds their shares of all other use. Mean "
    "watts are over the time that was metered."
)


def tabulate(state: RunState, ledger: Ledger) -> list[Table]:
    """Returns a table of roles; none where nothing was used."""
    whole, roles = ledger.total, ledger.by_role()
    strangers = roles.pop("other", None)
    if not roles:
        return []
    origins = {total.origin for total in roles.values()} - {"unavailable"}
    rows = []
    for place, (role, total) in enumerate(roles.items()):
        cells: dict[str, Cell] = {
            "role": (ROLE_WORDS.get(role, role), place),
            text.joules_head(origins): total.energy_j,
            "direct J": _sum_members(ledger.rows, role),
            "full J": _sum_members(ledger.full_rows, role),
            "CPU-s": round(total.cpu_s, 1) or None,
            **({"idle J": total.idle_j} if whole.idle_j else {}),
            "mean W": total.mean_w,
            **({"GPU-s": total.gpu_s and round(total.gpu_s, 1)} if whole.gpu_s is not None else {}),
            "split by": describe_methods(row for row in ledger.rows if row.role == role),
            **({"J is": total.origin} if len(origins) != 1 else {}),
        }
        rows.append(cells)
    head = [(name, "text" if name in ("role", "split by", "J is") else "") for name in rows[0]]
    about = ROLE + (f" All joules and watts are {next(iter(origins))}." if len(origins) == 1 else "")
    if strangers is not None and strangers.energy_j:
        about += f" Other programs on the nodes used {text.joules(strangers.energy_j)}, which are in no row."
    return [Table("cost_of_roles", "Cost by role", about, head, [list(row.values()) for row in rows])]


def describe_methods(rows: Iterable[LedgerRow]) -> str:
    """By what the joules of rows were shared out, with shares."""
    methods = sum_methods(rows)
    whole = sum(methods.values())
    words = (f"{METHOD_WORDS.get(method, method)} {joules / whole:.0%}" for method, joules in methods.items())
    return ", ".join(words)


def _sum_members(rows: Iterable[LedgerRow], role: str) -> float | None:
    joules = [r.energy_j for r in rows if r.role == role and r.member is not None and r.energy_j is not None]
    return sum(joules) if joules else None
