"""Lines on the training: failures, a search's front and budget, exchange of gradients, the plan."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from typing import TYPE_CHECKING, TypeVar

from ensemble.reporting import text
from ensemble.reporting.ranking import add_up, cost_origin, front_members
from ensemble.reporting.sections import Line
from pipelines.providers import import_object

if TYPE_CHECKING:
    from ensemble.meter import Ledger
    from ensemble.store import MemberState, RunState

K = TypeVar("K")
C = TypeVar("C", bound=Hashable)

MOST_ON_FRONT = 12  # named in the closing summary
MOST_CAUSES = 3  # of failures, named there


def group_causes(failed: Mapping[K, C]) -> list[tuple[C, list[K]]]:
    """Returns each cause with the members that have it, the most frequent first, of causes by member."""
    causes: dict[C, list[K]] = {}
    for member, cause in failed.items():
        causes.setdefault(cause, []).append(member)
    return sorted(causes.items(), key=lambda cause: -len(cause[1]))


def list_failures(members: Iterable[MemberState], most: int) -> list[str]:
    """Returns why members failed, a line for each cause, the most frequent first."""
    failed = {member.id: _describe_failure(member) for member in members if member.error or member.unextended}
    causes = group_causes(failed)
    lines = [text.visible(" ".join(f"{text.names(ids)}: {cause}".split())) for cause, ids in causes[:most]]
    return lines + ([f"and {text.count(len(causes) - most, 'other cause')}"] if len(causes) > most else [])


def _describe_failure(member: MemberState) -> str:
    if member.unextended:
        before = f"it stays as it had finished after {member.epoch}"
        return f"its further epochs came to nothing, and {before}: {member.unextended}"
    return f"{'failed' if member.state == 'failed' else 'failed before'} ({member.reason}): {member.error}"


def summarize_failures(state: RunState, ledger: Ledger) -> list[Line]:
    lines = list_failures((m for m in state.members.values() if m.state == "failed" or m.unextended), MOST_CAUSES)
    return [("" if at else "failed", line) for at, line in enumerate(lines)]


def summarize_budget(state: RunState, ledger: Ledger) -> list[Line]:
    """Returns what a search has used of its budget, if it has one."""
    budget, updated = state.header.budget, state.updated
    if not budget or updated is None:
        return []
    measure = import_object("ensemble.search.budget:measure_budget")
    shares = [str(share) for share in measure(budget, state, ledger.run, updated)]
    waited = f" ({(updated - state.started) / 3600:.3g} since the run began)" if state.started is not None else ""
    return [("budget", ", ".join(f"{used}{waited if used.endswith(' hours') else ''}" for used in shares))]


def summarize_search(state: RunState, ledger: Ledger) -> list[Line]:
    """Returns the members on the Pareto front of several objectives, the best by the last one first."""
    front, further = front_members(state), state.further_objectives
    if not front:
        return []
    units = {"energy_j": f"joules, {cost_origin(state)}", "cpu_s": "CPU-seconds"}
    words = [state.objective, *(units.get(objective.name, objective.name) for objective in further)]
    names = [
        " ".join((member.id, *(_show_value(objective.name, member.value_of(objective)) for objective in further)))
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


def summarize_exchange(state: RunState, ledger: Ledger) -> list[Line]:
    """Returns the share of time and the bytes that members of several workers spent on exchanging gradients."""
    wide = [m for m in state.members.values() if m.identity.get("workers", 1) > 1 and add_up(m, "train_s") > 0]
    if not wide:
        return []
    sync_s, train_s, sent = (sum(add_up(m, name) for m in wide) for name in ("sync_s", "train_s", "sent_bytes"))
    line = (
        f"{text.count(len(wide), 'member')} of several workers: {sync_s / train_s:.0%} of the time synchronizing"
    )
    return [("exchange", f"{line}, {text.memory(sent)} sent by each worker in all" if sent else line)]


def summarize_base(state: RunState, ledger: Ledger) -> list[Line]:
    """Returns what the network that members share takes of memory once a node, and what they take beside it."""
    if (base := state.base) is None:
        return []
    members = state.members.values()
    own_gb = max((event.memory_gb or 0.0 for member in members for event in member.history[-1:]), default=0.0)
    line = f"the base of {base.source} takes {text.memory(base.bytes)} once on each node"
    if own_gb:
        own, count = text.memory(own_gb * 2**30), sum(member.state == "running" for member in members)
        line += f", each member at most {own} beside it"
        line += f": now {text.memory(base.bytes)} + {count} x {own}" if count else ""
    return [("memory", line)]


def describe_plan(state: RunState) -> list[str]:
    """Returns what the last plan expected, as a sentence; nothing where there was no plan."""
    plan = state.planned
    if plan is None:
        return []
    if plan.concurrent:
        many = text.count(len(plan.concurrent), "member")
        return [
            f"{many} share the cores and one stream: an epoch takes all of them {text.duration(plan.pace_s)} "
            "if the cores do what they did when each was measured alone. A core that one member does not need "
            "while it waits for its next batch goes to the others."
        ]
    flotillas = plan.flotillas
    least = plan.lower_bound_s or 0.0
    line = (
        f"The last plan for those that waited: {text.count(len(flotillas), 'flotilla')}, all done in "
        f"{text.duration(plan.makespan_s)}"
    )
    return [line + (f"; nothing could be faster than {text.duration(least)}." if least else ".")]
