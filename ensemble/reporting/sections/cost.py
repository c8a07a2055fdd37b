"""Cost: CPU time, energy and wall time."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from ensemble.reporting import text
from ensemble.reporting.sections import Line, impact
from ensemble.reporting.sections.notices import describe_unread

if TYPE_CHECKING:
    from ensemble.meter import Ledger
    from ensemble.meter.ledger_rows import LedgerRow
    from ensemble.store import RunState

#: The roles of the ledger in words.
ROLE_WORDS = {
    "startup": "starting up",
    "prepare": "preparing samples",
    "feed": "feeding",
    "verify": "comparing shared samples",
    "train": "training",
    "profile": "measuring members",
    "orchestrate": "orchestrating",
    "ray": "Ray",
    "idle": "idle, reserved by nobody",
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


def summarize(state: RunState, ledger: Ledger) -> list[Line]:
    """Returns CPU time by role, energy with what it amounts to, and wall time, where they are known."""
    lines = []
    roles = ledger.cpu_by_role()
    if roles:
        split = ", ".join(f"{ROLE_WORDS.get(role, role)} {text.cpu(used)}" for role, used in roles.items())
        lines.append(("CPU time", f"{text.cpu(sum(roles.values()))}: {split}"))
    lines.append(("energy", describe_energy(ledger)))
    lines += [("", split)] if (split := _describe_split(ledger)) else []
    lines += [("", FULL)] if knows_full_joules(ledger) else []
    lines += [("", describe_unread(node.node, node.unread_s)) for node in ledger.nodes if node.unread_s]
    lines += impact.summarize(state, ledger)
    if state.started is not None:
        lines.append(("wall time", text.duration(state.wall_s)))
    return lines


def knows_full_joules(ledger: Ledger) -> bool:
    """Whether the tables have the column that `FULL` explains."""
    return any(total.energy_j is not None for total in ledger.by_member(full=True).values())


def sum_methods(rows: Iterable[LedgerRow]) -> dict[str, float]:
    """Returns the joules of rows by the method by which they were shared out."""
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
        line += f", of {text.joules(whole.energy_j)} {whole.origin} for the whole of the nodes"
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
