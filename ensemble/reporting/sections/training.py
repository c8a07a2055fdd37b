"""What was trained: the members on a search's Pareto front, and what the search used of its budget."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import TYPE_CHECKING, TypeVar

from ensemble.reporting import text
from ensemble.reporting.ranking import cost_origin, front_members
from ensemble.reporting.sections import Line
from ensemble.search.budget import measure_budget

if TYPE_CHECKING:
    from ensemble.meter import Ledger
    from ensemble.store import RunState

K = TypeVar("K")
C = TypeVar("C", bound=Hashable)

MOST_ON_FRONT = 12  # named in the closing summary
MOST_CAUSES = 3  # of failures, named in the closing summary


def group_causes(failed: Mapping[K, C]) -> list[tuple[C, list[K]]]:
    """Returns each cause with the members that have it, the most frequent first, of causes by member."""
    causes: dict[C, list[K]] = {}
    for member, cause in failed.items():
        causes.setdefault(cause, []).append(member)
    return sorted(causes.items(), key=lambda each: -len(each[1]))


def summarize_failures(state: RunState, ledger: Ledger) -> list[Line]:
    """Returns a line for each cause for which members failed, the most frequent first."""
    failed = [member for member in state.members.values() if member.state == "failed"]
    causes = group_causes({member.id: f"({member.reason}): {member.error}" for member in failed})
    said = []
    for cause, members in causes[:MOST_CAUSES]:
        others = f" and {text.count(len(members) - 1, 'other')}" if len(members) > 1 else ""
        said.append(f"{members[0]}{others} {cause}")
    if len(causes) > MOST_CAUSES:
        rest = sum(len(members) for _, members in causes[MOST_CAUSES:])
        said.append(f"and {text.count(rest, 'other')}, for other causes: see `ensemble status`")
    return [("" if at else "failed", text.visible(" ".join(line.split()))) for at, line in enumerate(said)]


def summarize_budget(state: RunState, ledger: Ledger) -> list[Line]:
    """Returns what a search has used of its budget, if it has one."""
    budget, now = state.header.budget, state.updated
    if not budget or now is None:
        return []
    shares = [str(share) for share in measure_budget(budget, state, ledger.run, now)]
    waited = f" ({(now - state.started) / 3600:.3g} since the run began)" if state.started is not None else ""
    return [("budget", ", ".join(f"{each}{waited if each.endswith(' hours') else ''}" for each in shares))]


def summarize_search(state: RunState, ledger: Ledger) -> list[Line]:
    """Returns the members on the Pareto front of several objectives, the best by the last one first."""
    front, further = front_members(state), state.further_objectives
    if not front:
        return []
    units = {"energy_j": f"joules, {cost_origin(state)}", "cpu_s": "CPU-seconds"}
    words = [state.objective, *(units.get(each.name, each.name) for each in further)]
    names = [
        " ".join((member.id, *(_show_value(each.name, member.value_of(each)) for each in further)))
        for member in front
    ]
    more = [f"and {len(names) - MOST_ON_FRONT} more"] if len(names) > MOST_ON_FRONT else []
    objectives = f"{', '.join(words[:-1])} and {words[-1]}"
    return [("Pareto front", f"{', '.join(names[:MOST_ON_FRONT] + more)} ({objectives})")]


def _show_value(objective: str, value: float | None) -> str:
    if objective in ("energy_j", "cpu_s"):
        return (text.joules if objective == "energy_j" else text.cpu)(value)
    unit = {"latency_ms": " ms", "model_mb": " MB"}.get(objective, "")
    return text.number(value) + unit
