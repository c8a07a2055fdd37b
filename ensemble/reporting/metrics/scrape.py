"""What the families of a run read: its state, what it has used, and which members have series of their own.

A counter never falls, whoever reads the log: of the energy of a run in progress only what is settled counts
(`ensemble.meter.LedgerView.settled`), once it has ended all does.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from ensemble.meter import LedgerView
from ensemble.meter.origin import Origin, from_ticks, weakest
from ensemble.meter.usage_sums import CPU, Sums, list_energies
from ensemble.reporting.run_projection import RunProjection
from ensemble.reporting.sections.nodes import list_nodes
from ensemble.store import MemberState, RunState
from ensemble.store.member import ENDED

KEPT_S = 300.0  # that a member has series after its end: until its last interval is settled and scraped


@dataclass(slots=True)
class Used:
    """CPU time and energy in ticks; the origins of the energy's parts, none where no energy is known."""

    cpu: int = 0
    energy: int = 0
    origins: set[Origin] = field(default_factory=set)


class Scrape:
    """What the families of a run read.

    Args:
        view: of the same events as the state.
        most_members: how many members may have series of their own.

    Attributes:
        members: those that have.
        left_out: how many more should have.
    """

    def __init__(self, state: RunState, view: LedgerView, most_members: int) -> None:
        self.state, self.view, self.run = state, view, RunProjection(state)
        self.members, self.left_out = select_members(state, most_members)
        self.is_open = state.ended is None

    @cached_property
    def used(self) -> dict[tuple[str, str], Used]:
        """What is settled, by ("role", name) and ("member", name)."""
        return _sum_up(self.view.settled)

    @property
    def roles(self) -> dict[str, Used]:
        """What is settled, by role."""
        return {name: use for (what, name), use in self.used.items() if what == "role"}

    def used_by(self, member: MemberState) -> Used:
        """What is settled of a member."""
        return self.used.get(("member", member.id)) or Used()

    @cached_property
    def streams(self) -> dict[tuple[str, str], tuple[int, int, int]]:
        """Samples prepared, consumed and skipped, by node and cohort, of members that have series."""
        cohorts = {member.cohort for member in self.members}
        by_stream = self.view.parser.samples.by_stream
        return {
            (node, str(cohort)): (prepared, consumed, skipped)
            for (node, cohort), (prepared, consumed, skipped) in by_stream.items()
            if cohort in cohorts
        }

    @property
    def feeders(self) -> Iterator[tuple[str, str, Any]]:
        """Node, cohort and last report of the feeders of these streams, while the run goes on."""
        for (node, cohort), last in self.state.feeders.items() if self.is_open else ():
            if (node, str(cohort)) in self.streams:
                yield node, str(cohort), last

    @property
    def samples(self) -> tuple[int, int]:
        """Samples prepared and consumed, with those of members that prepare for themselves."""
        samples = self.view.parser.samples
        return samples.prepared + samples.private, samples.consumed + samples.private

    @cached_property
    def nodes(self) -> list[dict[str, Any]]:
        """Rows of the nodes, while the run goes on."""
        return list_nodes(self.state) if self.is_open else []

    @cached_property
    def power(self) -> dict[str, tuple[float, Origin]]:
        """The mean power of each member that holds a place, in intervals that are still open, and its origin."""
        nodes = self.view.parser.nodes.items() if self.is_open else ()
        spans = {name: (node.power[0].start, node.power[-1].end) for name, node in nodes if node.power}
        recent, watts = _sum_up(self.view.sum_open()) if spans else {}, {}
        for member in self.members:
            use, window = recent.get(("member", member.id)), spans.get(member.node or "")
            if use is None or not use.origins or window is None or member.state not in ("placed", "running"):
                continue
            ends = ((span.placed, span.ended or math.inf) for span in member.spans)
            held_s = sum(max(0.0, min(end, window[1]) - max(begin, window[0])) for begin, end in ends)
            if held_s > 0:
                watts[member.id] = (from_ticks(use.energy) / held_s, weakest(use.origins))
        return watts


def select_members(state: RunState, most: int) -> tuple[list[MemberState], int]:
    """The members that have series of their own, in their order, and how many more should have.

    A member has them from its first place until `KEPT_S` after its end. Of too many, those that train come first,
    those that have just ended follow.
    """
    updated, ranks = state.updated or 0.0, {"running": 0, "placed": 0, **dict.fromkeys(ENDED, 1)}
    candidates = [
        member
        for member in state.members.values()
        if member.attempts and (member.state not in ENDED or updated - _find_end(member) <= KEPT_S)
    ]
    chosen = sorted(candidates, key=lambda member: (ranks.get(member.state, 2), member.number))[:most]
    return sorted(chosen, key=lambda member: member.number), len(candidates) - len(chosen)


def _find_end(member: MemberState) -> float:
    last = member.spans[-1] if member.spans else None
    return -math.inf if last is None else last.ended or last.placed


def _sum_up(sums: Sums) -> dict[tuple[str, str], Used]:
    totals: dict[tuple[str, str], Used] = {}
    for (owner, _), use in sums.uses.items():
        for what, name in (("role", owner.role), ("member", owner.member)):
            if name is None:
                continue
            total = totals.get((what, name)) or totals.setdefault((what, name), Used())
            total.cpu += use.get(CPU, (0, ""))[0]
            for *_, ticks, origin in list_energies(use):
                total.energy += ticks
                total.origins.add(origin)
    return totals
