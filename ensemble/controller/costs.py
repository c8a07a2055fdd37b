"""Decides when to measure what a finished trial has cost, for a search that minimizes it.

The cost is measured once, when the trial's processes are gone and the power of its nodes was sampled after that,
at the latest after `WAIT_S`. It is logged before the search learns of it, so that a resume tells the search the
same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ensemble.controller.actions import EndTrial, MeasureCost
from ensemble.controller.attempt import Attempt
from ensemble.controller.session_state import SessionState

if TYPE_CHECKING:
    from ensemble.spec import Search

#: Seconds after the end of a trial in which the power of each of its nodes is known up to that end.
WAIT_S = 35.0


@dataclass(slots=True)
class _Pending:
    """A finished trial: when it ended (Unix seconds), its nodes without a later sample of power, and when it is
    due anyway.
    """

    ended_t: float
    unmetered: set[str]
    deadline: float
    is_measuring: bool = False

    def is_due(self, now_s: float) -> bool:
        return not self.is_measuring and (not self.unmetered or now_s >= self.deadline)


class TrialCosts:
    """The finished trials whose cost is not known yet; those of an earlier start are measured at once."""

    def __init__(self, session: SessionState, search: Search | None) -> None:
        self._session = session
        costs = [] if search is None else [objective.name for objective in search.objectives if objective.is_cost]
        self._is_needed, self._needs_power = bool(costs), "energy_j" in costs
        members = session.run.members.values() if costs else ()
        unknown = [member.id for member in members if member.state == "finished" and member.cost is None]
        self._pending = {member: _Pending(session.t, set(), session.now) for member in unknown}

    def __len__(self) -> int:
        return len(self._pending)

    def end_trial(self, live: Attempt, outcome: str, metrics: Mapping[str, Any]) -> None:
        """Report how a trial ended; that it finished is reported when its cost is known."""
        if outcome != "finished" or not self._is_needed:
            self._session.actions.append(EndTrial(live.identity.number, outcome, metrics))

    def expect(self, live: Attempt) -> None:
        """All processes of an attempt have exited: measure what its trial has cost, if it finished."""
        if live.outcome == "finished" and self._is_needed:
            nodes = set(live.start.placement.ranks_by_node) if self._needs_power else set()
            self._pending[live.member] = _Pending(self._session.t, nodes, self._session.now + WAIT_S)

    def note_power(self, event: Mapping[str, Any]) -> None:
        """Note that the power of a node was sampled, if the event says so."""
        if event["type"] == "power":
            for pending in self._pending.values():
                if event.get("until", pending.ended_t) >= pending.ended_t:
                    pending.unmetered.discard(event["node"])

    def is_due(self, now_s: float) -> bool:
        """Whether `measure_due` has something to measure, in which what the driver has used until then counts."""
        return any(pending.is_due(now_s) for pending in self._pending.values())

    def measure_due(self) -> None:
        """Measure the trials whose last interval is metered."""
        session = self._session
        for member, pending in self._pending.items():
            if pending.is_due(session.now):
                pending.is_measuring = True
                session.actions.append(MeasureCost(member, session.run.members[member].attempt))

    def handle(self, event: Mapping[str, Any]) -> None:
        """Log a trial's cost, and report that it has finished."""
        session, member = self._session, self._session.run.members[event["member"]]
        self._pending.pop(member.id, None)
        session.log_report("cost", event)
        session.actions.append(EndTrial(member.number, "finished", dict(member.metrics)))
        session.placement_due = True
