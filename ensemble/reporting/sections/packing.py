"""Packing: what was measured of each member alone, what it was given, and what the last plan expected."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ensemble.events import Profiled
from ensemble.reporting import text
from ensemble.reporting.sections import Cell, Table

if TYPE_CHECKING:
    from ensemble.meter import Ledger
    from ensemble.store import MemberState, RunState

HEAD = (
    ("member", "text"),
    ("workers", ""),
    ("on", "text"),
    ("cohort", ""),
    ("a step alone, ms", ""),
    ("samples/s alone", ""),
    ("samples/s here", ""),
    ("cores alone", ""),
    ("cores given", ""),
    ("memory, GiB", ""),
)


def tabulate(state: RunState, ledger: Ledger) -> list[Table]:
    """Returns a table with a row for each member; none where nothing was measured."""
    if not state.profiles:
        return []
    known = {member: profile for profile in state.profiles.values() for member in profile.members}
    rows = [_row(member, known.get(member.id)) for member in state.members.values()]
    return [Table("packing", "How they were packed", " ".join(describe_plan(state)), HEAD, rows, of_members=True)]


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


def _row(member: MemberState, profile: Profiled | None) -> list[Cell]:
    width = str(member.identity.get("workers", 1))

    def measured(name: str, scale: float = 1.0) -> float | None:
        by_width = getattr(profile, name, None) or {}
        found = by_width.get(width, by_width.get(int(width)))  # JSON keys are strings
        return None if found is None else float(found) * scale

    devices = sorted({device for device in member.devices if device is not None})
    where = member.place + (f", GPU {', '.join(map(str, devices))}" if devices else "")
    return [
        (member.id, member.number),
        int(width),
        where,
        member.cohort,
        measured("step_s", 1e3),
        measured("samples_per_s"),
        member.training_rate,
        measured("cpus"),
        member.identity.get("cpus_per_worker"),
        None if profile is None else profile.memory_gb,
    ]
