"""Cost: CPU time, energy and wall time."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ensemble.reporting import text
from ensemble.reporting.page import Panel
from ensemble.reporting.sections import Content, Line, ReportData, draw, impact
from ensemble.reporting.sections.notices import start_time
from ensemble.reporting.theme import ROLE_WORDS

if TYPE_CHECKING:
    from ensemble.meter import Ledger
    from ensemble.store import RunState

CPU = (
    "CPU time",
    "What processor time went into. Work that serves all members alike is a row of its own, not divided.",
)


def compose(data: ReportData) -> Content:
    """Returns CPU time by what it went into, and power over time."""
    from ensemble.reporting import figures

    power = draw(figures.power_over_time, data.ledger, start_time(data.events))
    origin = data.ledger.total.origin
    reading = f"Of whole nodes, {origin}."
    if origin == "estimated":
        reading = (
            "Estimated from how busy the processors were, not measured: good for seeing when work was done, "
            "not as evidence of a saving."
        )
    return [
        Panel("cpu", *CPU, draw(figures.cpu_seconds, data.ledger)),
        Panel("power", f"Power over time ({origin})", reading, power),
    ]


def summarize(state: RunState, ledger: Ledger) -> list[Line]:
    """Returns CPU time by role, energy with what it amounts to, and wall time, where they are known."""
    lines = []
    roles = ledger.cpu_by_role()
    if roles:
        split = ", ".join(f"{ROLE_WORDS.get(role, role)} {text.cpu(used)}" for role, used in roles.items())
        lines.append(("CPU time", f"{text.cpu(sum(roles.values()))}: {split}"))
    lines.append(("energy", _describe_energy(ledger)))
    lines += impact.summarize(state, ledger)
    if state.started is not None:
        lines.append(("wall time", text.duration(state.wall_s)))
    return lines


def _describe_energy(ledger: Ledger) -> str:
    """Returns the joules of the run with their origin, or that there are none."""
    total = ledger.run
    if total.energy_j is None:
        return "unavailable: no node has a power source that could be read"
    sources = sorted({source for node in ledger.nodes for source in node.sources})
    line = f"{text.joules(total.energy_j)} {total.origin}"
    whole = ledger.total
    if whole.energy_j is not None and whole.energy_j > total.energy_j * 1.001:
        line += f", of {text.joules(whole.energy_j)} {whole.origin} for the whole of the nodes"
    return line + (f" (source: {', '.join(sources)})" if sources else "")
