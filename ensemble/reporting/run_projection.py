"""Derives what every view says of a run: how it stands, how far it is, who is best, what was used.

Status, the page, metrics, loggers, results, the list of runs, comparisons and the closing lines are views of a
`RunProjection`. They choose, order and format; a figure that two of them show is computed here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from functools import cached_property
from typing import TYPE_CHECKING

from ensemble.events import NOT_COMBINED, RunStopped
from ensemble.meter import Ledger
from ensemble.meter.ledger_rows import Total
from ensemble.meter.ledger_view import ledger
from ensemble.reporting.ranking import best_member, finite_or_none, metric
from ensemble.reporting.time_left import count_epochs
from ensemble.store.folding import fold

if TYPE_CHECKING:
    from ensemble.events import Event
    from ensemble.store import MemberState, RunState, RunStatus

#: Of a member of which the log says nothing.
NOTHING = Total(0.0, None, "unavailable")


class RunProjection:
    """What is known of a run after some events of its log.

    Args:
        state: the fold of these events.
        used: what was used, by the same events; None: not asked for.
        driver: what is wrong with the process that drives the run, in words (`describe_lost_controller`).
    """

    def __init__(self, state: RunState, used: Ledger | None = None, driver: str | None = None) -> None:
        self.state, self.driver = state, driver
        self._ledger = used

    @classmethod
    def from_events(cls, events: Iterable[Event], driver: str | None = None) -> RunProjection:
        """The projection of all events of a log."""
        events = list(events)
        return cls(fold(events), ledger(events), driver)

    @classmethod
    def from_status(cls, status: RunStatus, driver: str | None = None) -> RunProjection:
        """The projection of a status that was read from a run directory."""
        return cls(status.state, status.used.read(), driver)

    # -- how it stands --------------------------------------------------------------------------------------------

    @property
    def is_lost(self) -> bool:
        """Whether the process that drives a run that has begun, and not ended, is gone."""
        return self.driver is not None and self.state.started is not None and self.state.ended is None

    @property
    def is_driven(self) -> bool:
        return self.state.started is not None and self.state.ended is None and self.driver is None

    @cached_property
    def word(self) -> str:
        """How the run stands: "not started", "running", "paused", "interrupted", "stopped", "finished",
        "finished, with failures", or "failed" where no member finished.
        """
        states = {member.state for member in self.state.members.values()}
        if self.state.ended is None:
            if self.is_lost:
                return "interrupted"
            if "paused" in states and states.isdisjoint(("waiting", "placed", "running")):
                return "paused"
            return "running" if self.state.started is not None else "not started"
        if isinstance(self.state.ended, RunStopped):
            return "stopped"
        if "finished" not in states:
            return "failed"
        is_sound = "failed" not in states and not any(m.unextended for m in self.state.members.values())
        return "finished" if is_sound else "finished, with failures"

    @property
    def reason(self) -> str | None:
        """Why it was stopped; None of a run that was not."""
        ended = self.state.ended
        return ended.reason or "no reason given" if isinstance(ended, RunStopped) else None

    def member_word(self, member: MemberState) -> str:
        """How a member stands: its state, "measuring" before it is packed, or "interrupted" where it trained when
        the run's driver was lost.
        """
        if member.id in self.state.measuring and member.state == "waiting":
            return "measuring"
        return "interrupted" if self.is_lost and member.state in ("placed", "running") else member.state

    @cached_property
    def counts(self) -> Counter[str]:
        """How many members stand how; those that a search will still propose wait."""
        counts = Counter(self.member_word(member) for member in self.state.members.values())
        unborn = max(0, (self.state.declared or 0) - len(self.state.members))
        return counts + Counter({"waiting": unborn})

    @cached_property
    def done(self) -> float:
        """The share of the epochs of all members that are trained, 0 to 1."""
        done, remaining = count_epochs(self.state)
        return done / (done + remaining) if done + remaining else 0.0

    @property
    def samples_per_s(self) -> float:
        """Samples a second that running members reported last, in all."""
        return sum(m.samples_per_s or 0.0 for m in self.state.members.values() if m.state == "running")

    # -- who is best ----------------------------------------------------------------------------------------------

    @cached_property
    def best(self) -> MemberState | None:
        """The best member that has a value of the objective; of finished ones, where there are any."""
        return best_member(self.state)

    @property
    def best_value(self) -> float | None:
        return None if self.best is None else metric(self.best, self.state.objective)

    @property
    def combined_value(self) -> float | None:
        measured = ((self.state.combined or NOT_COMBINED).metrics or {}).get("ensemble") or {}
        return finite_or_none(measured.get(self.state.objective))

    @property
    def combined_split(self) -> str | None:
        """The split of which the combined model's figures are; None where there are none."""
        combined = self.state.combined or NOT_COMBINED
        return combined.split if (combined.metrics or {}).get("ensemble") else None

    # -- what was used --------------------------------------------------------------------------------------------

    @property
    def ledger(self) -> Ledger:
        """What was used, in detail.

        Raises:
            LookupError: it was not asked for.
        """
        if self._ledger is None:
            raise LookupError("the projection was made without a ledger")
        return self._ledger

    @cached_property
    def used(self) -> Total:
        return self.ledger.run

    @cached_property
    def own(self) -> dict[str, Total]:
        """What each member used itself, as far as the log says anything of it."""
        return self.ledger.by_member()

    @cached_property
    def full(self) -> dict[str, Total]:
        """What each member used, with its part of what serves several members."""
        return self.ledger.by_member(full=True)
