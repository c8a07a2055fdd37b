"""Decides when to measure what a finished trial has cost, for a search that minimizes it.

The ledger of a run (`ensemble.meter.LedgerView`) has the energy of an interval only after it has ended. A trial's
cost is measured when its processes are gone and the power of each of its nodes was sampled after that, at the
latest after `WAIT_S`, and all power and usage that was reported until then is logged before. It is measured once
and logged before the search learns of it: a resume tells the search the same, although the account goes on to
change. Members that run beside the trial report what they used some time later (`report_interval_s` of
`ensemble.meter.cpu`, and at least the seconds between two reports of a rank); until then, the energy of these last
seconds is shared out as if they had used nothing in them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ensemble.controller.actions import EndTrial, MeasureCost
from ensemble.controller.attempt import Attempt
from ensemble.controller.session_state import SessionState
from ensemble.spec import Search

#: Seconds after the end of a trial in which the power of each of its nodes is known up to that end, also where
#: rows of an external meter are waited for, which is given up when it has not written one for 30 s.
WAIT_S = 35.0


@dataclass(slots=True)
class _Pending:
    """A finished trial whose cost is not known.

    Attributes:
        ended_t: when it ended, in Unix seconds.
        unmetered: its nodes whose power was not sampled since its end.
        deadline: when the cost is measured all the same, in seconds of a monotonic clock.
        is_measuring: whether it was asked for.
    """

    ended_t: float
    unmetered: set[str]
    deadline: float
    is_measuring: bool = False

    def is_due(self, now: float) -> bool:
        """Whether it is to be measured now."""
        return not self.is_measuring and (not self.unmetered or now >= self.deadline)


class TrialCosts:
    """The finished trials whose cost is not known yet.

    Args:
        search: None, or without a cost among its objectives: nothing is measured. A trial that finished in an
            earlier start of the run, which ended before it had logged the cost, is measured at once.
    """

    def __init__(self, session: SessionState, search: Search | None) -> None:
        self._session = session
        costs = [] if search is None else [each.name for each in search.objectives if each.is_cost]
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
            for each in self._pending.values():
                if event.get("until", each.ended_t) >= each.ended_t:
                    each.unmetered.discard(event["node"])

    def is_due(self, now: float) -> bool:
        """Whether `measure_due` has something to measure, in which what the driver has used until then counts."""
        return any(each.is_due(now) for each in self._pending.values())

    def measure_due(self) -> None:
        """Measure the trials whose last interval is metered."""
        session = self._session
        for member, each in self._pending.items():
            if each.is_due(session.now):
                each.is_measuring = True
                session.actions.append(MeasureCost(member, session.run.members[member].attempt))

    def handle(self, event: Mapping[str, Any]) -> None:
        """Log a trial's cost, and report that it has finished."""
        session, member = self._session, self._session.run.members[event["member"]]
        self._pending.pop(member.id, None)
        session.log_report("cost", event)
        session.actions.append(EndTrial(member.number, "finished", dict(member.metrics)))
        session.placement_due = True
