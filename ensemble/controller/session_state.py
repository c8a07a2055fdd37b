"""The state that the parts of a session share, and how they log; each list has one owner, which alone changes it.

There is no input or output: an event is logged by folding it into the run's state and appending a `Log` action,
which is performed before all other actions.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ensemble.controller.actions import Action, EndTrial, Log, RemoveCheckpoints
from ensemble.controller.attempt_table import AttemptTable
from ensemble.controller.node_table import NodeTable
from ensemble.controller.retention import is_start_used_up, name_weights, plan_reduction
from ensemble.controller.waitlist import Waitlist
from ensemble.events import TYPES, Feeder, Power, Usage, make_event
from ensemble.spec import Identity
from ensemble.store import RunState, apply_event
from ensemble.store.event_log import encode_line

log = logging.getLogger(__name__)

#: The fields of each type of event, beside its time.
_FIELDS = {kind: frozenset(of.__struct_fields__) - {"v", "t"} for kind, of in TYPES.items()}


@dataclass(slots=True)
class SessionState:
    """The state of one session: of one start of the run until its end.

    Attributes:
        run: the fold of the log.
        nodes: on which members can be placed.
        live: the attempts that have processes or a reserved place.
        waitlist: the members without a place.
        keep_checkpoints: of the ensemble.
        stop_reason: why the run stops before its members have ended; None: it goes on.
        stop_failed: whether it stops by an error; else by its user, or because its budget is used.
        placement_due: whether free places or waiting members have changed since members were last placed.
        began: the time of the session's start, in seconds of a monotonic clock.
        now: the time of the present event, in seconds of a monotonic clock.
        t: the same time in the log's clock, in Unix seconds.
        actions: decided, and not yet drained.
    """

    run: RunState
    nodes: NodeTable
    live: AttemptTable
    waitlist: Waitlist = field(default_factory=Waitlist)
    keep_checkpoints: str = "all"
    stop_reason: str | None = None
    stop_failed: bool = False
    placement_due: bool = True
    began: float = 0.0
    now: float = 0.0
    t: float = 0.0
    actions: list[Action] = field(default_factory=list)
    _reducing: set[tuple[str, str]] = field(default_factory=set)  # members, and names of their checkpoints

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
        event, line = encode_line(make_event(kind, **fields), self.t)
        apply_event(self.run, event)
        self.actions.append(Log(event, line))

    def log_report(self, kind: str, report: Mapping[str, Any]) -> None:
        """Log what an executor reports as an event of a type: the fields that the type has."""
        has = _FIELDS[kind]
        try:
            self.log(kind, **{name: value for name, value in report.items() if name in has})
        except TypeError as error:
            if not issubclass(TYPES[kind], Usage | Power | Feeder):
                raise
            log.warning("figures of %s are left out: %s", report.get("node"), error)

    def cancel(self, identity: Identity) -> None:
        """Log that a user has cancelled a member."""
        member = identity.member
        self.log("cancelled", member=member, attempt=self.run.members[member].attempt)
        self.remove_leftovers(member)
        self.actions.append(EndTrial(identity.number, "cancelled"))

    def remove_leftovers(self, member: str) -> None:
        """Remove what a member that does not run has beside what the log names, or is not to keep of that."""
        state = self.run.members[member]
        made = [name_weights(name) for reduced, name in self._reducing if reduced == member]  # and not logged yet
        kept = [*(name for name, _ in state.list_kept()), *made]
        self.actions.append(RemoveCheckpoints(member, kept, removes_start=is_start_used_up(state)))
        reduction = plan_reduction(state, self.keep_checkpoints)
        awaits_heirs = state.identity.get("population") is not None and self.waitlist.trials_left > 0
        if reduction is not None and not awaits_heirs and (member, reduction.name) not in self._reducing:
            self._reducing.add((member, reduction.name))
            self.actions.append(reduction)

    def end_reduction(self, event: dict[str, Any]) -> None:
        """A checkpoint was reduced: log it, and then remove what was there before."""
        self._reducing.discard((event["member"], event["removed"]))
        if "error" not in event:
            self.log(**{"kind" if name == "type" else name: value for name, value in event.items()})
            self.remove_leftovers(event["member"])
