"""What the energy amounts to: electricity, emissions and price, of the run and per unit of what it achieved."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ensemble.events import Epoch
from ensemble.meter.impact import UNITS, Impact, Quantity, Work, assess_impact
from ensemble.reporting import text
from ensemble.reporting.ranking import finite_or_none, metric, rank_members
from ensemble.reporting.sections import Cell, Line, Table

if TYPE_CHECKING:
    from ensemble.meter import Ledger
    from ensemble.store import RunState

METHOD = (
    "Emissions are kWh × PUE × carbon intensity by the location-based method: offsets are never subtracted, the "
    "manufacture of the machines is not included. All is of the whole run, failed and pruned members included."
)


def run_impact(state: RunState, ledger: Ledger) -> Impact:
    """Returns what the energy of a run amounts to, with what its last start was given."""
    return assess_impact(ledger.run, state.header.energy or {}, measure_work(state))


def measure_work(state: RunState) -> Work:
    """Returns what the members have achieved so far."""
    finished = [member for member in rank_members(state) if member.state == "finished"]
    values = (finite_or_none(e.metrics.get(state.objective)) for e in _epochs(state))
    return Work(
        models=len(finished),
        samples=sum(event.samples or 0 for event in _epochs(state)),
        objective=state.objective,
        maximized=state.direction == "max",
        best=next((value for m in finished if (value := metric(m, state.objective)) is not None), None),
        reported=tuple(value for value in values if value is not None),
    )


def summarize(state: RunState, ledger: Ledger) -> list[Line]:
    """Returns joules per unit of work, and emissions and price where they were given; nothing without energy."""
    impact = run_impact(state, ledger)
    if impact.energy.total is None:
        return []
    units = {name: text.joules(value) for name, value in impact.energy.per.items() if value is not None}
    lines = [("", ", ".join(f"{joules} per {_unit(name, state)}" for name, joules in units.items()))]
    for each in (impact.emissions, impact.price):
        if each.total is not None:
            per_model = each.per["per_model"]
            share = "" if per_model is None else f", {_amount(each, per_model)} per {UNITS['per_model']}"
            lines.append(
                (each.name, f"{_amount(each, each.total)} {each.origin}{share} (given: {', '.join(each.given)})")
            )
    return [line for line in lines if line[1]]


def tabulate(state: RunState, ledger: Ledger) -> list[Table]:
    """Returns a table with a row for each quantity; none where no node has told its energy."""
    impact = run_impact(state, ledger)
    if impact.energy.total is None:
        return []
    units = [name for name in UNITS if name not in impact.reasons]
    head = [("", "text"), ("whole run", ""), *((f"per {_unit(name, state)}", "") for name in units)]
    is_given = any(each.given for each in impact.quantities)
    rows = []
    for each in impact.quantities:
        if each.total is not None:
            values = (each.total, *(each.per[name] for name in units))
            cells: list[Cell] = [None if v is None else (_amount(each, v), v) for v in values]
            rows.append(
                [f"{each.name} ({each.unit})", *cells, each.origin, *([", ".join(each.given)] if is_given else [])]
            )
    notes = [f"No {each.name}: {each.reason}." for each in impact.quantities if each.total is None]
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
