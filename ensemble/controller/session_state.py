"""What the parts of a session decide from and change, and how they log.

One object holds it, so that each fact has one owner and a test can look at all of them. It does no input and no
output: an event is logged by folding it into the run's state and appending a `Log` action, which is performed
before all other actions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ensemble.controller.actions import Action, EndTrial, Log
from ensemble.controller.attempt import Attempt
from ensemble.controller.thinning import Thinning
from ensemble.schedule import Node, Placement
from ensemble.spec import Identity
from ensemble.store import RunState, apply_event
from ensemble.store.events import encode_event

#: A member that is to be placed again, and its cohort; None: it prepares its own batches.
PendingRetry = tuple[Identity, int | None]


@dataclass(slots=True)
class SessionState:
    """The state of one session: of one start of the run until its end.

    Attributes:
        run: the fold of the log.
        nodes: where members can be placed.
        live: attempts that have processes, or will have them, by member.
        waiting: members that hold no place and belong to no cohort that is under way, in order.
        returning: members to be placed again.
        paused: members that wait until they are asked to go on.
        limits: most members at one time, by node, learnt from members that ran out of memory.
        trials_left: members that can still be proposed.
        stop_reason: why the run ends before its members have; None: it does not.
        placement_due: whether places or members to be placed have changed since members were last placed.
        now: the time of the present event: seconds of a clock that nobody sets.
        t: the same time as the log gives it, in Unix seconds.
        actions: decided, and not handed to the caller yet.
    """

    run: RunState
    nodes: list[Node] = field(default_factory=list)
    live: dict[str, Attempt] = field(default_factory=dict)
    waiting: list[Identity] = field(default_factory=list)
    returning: list[PendingRetry] = field(default_factory=list)
    paused: list[PendingRetry] = field(default_factory=list)
    limits: dict[str, int] = field(default_factory=dict)
    trials_left: int = 0
    stop_reason: str | None = None
    placement_due: bool = True
    now: float = 0.0
    t: float = 0.0
    actions: list[Action] = field(default_factory=list)
    _thinning: Thinning | None = None

    def set_time(self, now: float, t: float) -> None:
        """Set the time of what is handled next."""
        self.now, self.t = now, t

    def drain_actions(self) -> list[Action]:
        """The actions that were decided since the last call."""
        decided = self.actions.copy()
        self.actions.clear()
        return decided

    # -- the log ------------------------------------------------------------------------------------------------

    def log(self, kind: str, **fields: Any) -> None:
        """Log an event; figures that arrive every second may be logged later, or within a later one."""
        for event in self._thin.take({"type": kind, **fields}, self.now):
            self._append(event)

    def log_due(self) -> None:
        """Log figures that were held back for long enough."""
        for event in self._thin.due(self.now):
            self._append(event)

    def log_held(self) -> None:
        """Log all figures that were held back."""
        for event in self._thin.rest():
            self._append(event)

    @property
    def _thin(self) -> Thinning:
        if self._thinning is None:
            self._thinning = Thinning(self.now)
        return self._thinning

    def _append(self, fields: dict[str, Any]) -> None:
        event, line = encode_event(self.t, fields)
        apply_event(self.run, event)
        self.actions.append(Log(event, line))

    def cancel(self, identity: Identity) -> None:
        """Log that a member has ended for good because a user asked for it."""
        member = identity.member
        self.log("cancelled", member=member, attempt=self.run.members[member].attempt)
        self.actions.append(EndTrial(identity.number, "cancelled"))

    # -- the attempts under way ---------------------------------------------------------------------------------

    def placements(self) -> list[Placement]:
        """Where members hold a place."""
        return [live.start.placement for live in self.live.values()]

    def feeders_read(self) -> list[tuple[str, int]]:
        """(node, cohort) of each attempt; two for one that is to move from the one to the other."""
        return [key for live in self.live.values() for key in live.feeder_keys]

    def count_readers(self) -> Counter[tuple[str, int]]:
        """(node, cohort) -> attempts that have not come to their end, and read there or will."""
        return Counter(key for live in self.live.values() if not live.is_exiting for key in live.feeder_keys)

    def training(self) -> list[tuple[Identity, str, int | None]]:
        """(member, node, cohort) of each attempt that goes on; cohort None: it prepares its own batches.

        So does one whose cohort has no feeder, or that was not given it: nobody waits for another there.
        """
        return [
            (
                live.identity,
                live.start.placement.node,
                live.cohort if self.run.members[live.member].feeder else None,
            )
            for live in self.live.values()
            if live.is_active and live.intent is None and not live.is_moving
        ]

    def waiting_or_returning(self) -> Sequence[Identity]:
        """The members that are to be placed."""
        return [*self.waiting, *(identity for identity, _ in self.returning)]
