"""The state that the parts of a session share, and how they log.

There is no input or output: an event is logged by folding it into the run's state and appending a `Log` action,
which is performed before all other actions.
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ensemble.controller.actions import Action, EndTrial, Log, RemoveLeftovers
from ensemble.controller.attempt import Attempt
from ensemble.controller.retention import name_weights, plan_reduction
from ensemble.controller.thinning import FIGURES, Thinning
from ensemble.events import TYPES, Event, make_event, settle
from ensemble.schedule import Node, Placement
from ensemble.schedule.needs import resolve_devices
from ensemble.spec import Identity
from ensemble.store import RunState, apply_event
from ensemble.store.event_log import encode_line

log = logging.getLogger(__name__)

#: The fields of each type of event, beside its time.
_FIELDS = {kind: frozenset(of.__struct_fields__) - {"v", "t"} for kind, of in TYPES.items()}

_AMOUNT = re.compile(r"[\d.]+ of [\d.]+ GiB")  # in what `Node.no_gpus` says of others

#: A member to be placed again, and its cohort; None: it prepares its own batches.
PendingRetry = tuple[Identity, int | None]


@dataclass(slots=True)
class SessionState:
    """The state of one session: of one start of the run until its end.

    Attributes:
        run: the fold of the log.
        declared_devices: "auto", "cpu" or "cuda".
        keep_checkpoints: of the ensemble.
        nodes: on which members can be placed.
        list_cluster: returns the nodes with all that they could ever offer; None: the run holds all of its nodes.
        live: member -> its attempt, if that has processes or a reserved place.
        waiting: members to be placed in a new cohort, in order.
        returning: members to be placed again, each in its cohort.
        paused: members that a user has paused.
        limits: node -> most members at one time, learnt from members that ran out of memory.
        trials_left: members that can still be proposed.
        stop_reason: why the run stops before its members have ended; None: it goes on.
        placement_due: whether free places or waiting members have changed since members were last placed.
        now: the time of the present event, in seconds of a monotonic clock.
        t: the same time in the log's clock, in Unix seconds.
        actions: decided, and not yet drained.
    """

    run: RunState
    declared_devices: str = "auto"
    keep_checkpoints: str = "all"
    nodes: list[Node] = field(default_factory=list)
    list_cluster: Callable[[], Sequence[Node] | None] = lambda: None
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
    _reducing: set[tuple[str, str]] = field(default_factory=set)  # members, and names of their checkpoints
    _said_of_gpus: set[tuple[str, str]] = field(default_factory=set)

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
        """Log an event; figures that arrive every second may be logged later, or merged with later ones."""
        event = make_event(kind, **fields)  # figures are settled, as those are that they are merged with
        for each in self._figures().add(settle(event) if isinstance(event, FIGURES) else event, self.now):
            self._append(each)

    def log_report(self, kind: str, report: Mapping[str, Any]) -> None:
        """Log what an executor reports as an event of a type: the fields that the type has."""
        has = _FIELDS[kind]
        try:
            self.log(kind, **{name: value for name, value in report.items() if name in has})
        except TypeError as error:
            if not issubclass(TYPES[kind], FIGURES):
                raise
            log.warning("figures of %s are left out: %s", report.get("node"), error)

    def log_due(self) -> None:
        """Log the figures that were held back for long enough."""
        for event in self._figures().pop_due(self.now):
            self._append(event)

    def log_cost_figures(self) -> None:
        """Log the figures that were held back and from which the cost of a member is computed."""
        for event in self._figures().pop_cost(self.now):
            self._append(event)

    def log_held(self) -> None:
        """Log all figures that were held back."""
        for event in self._figures().pop_all():
            self._append(event)

    def _figures(self) -> Thinning:
        if self._thinning is None:
            self._thinning = Thinning(self.now)
        return self._thinning

    def _append(self, event: Event) -> None:
        event, line = encode_line(event, self.t)
        apply_event(self.run, event)
        self.actions.append(Log(event, line))

    def cancel(self, identity: Identity) -> None:
        """Log that a user has cancelled a member."""
        member = identity.member
        self.log("cancelled", member=member, attempt=self.run.members[member].attempt)
        self.remove_leftovers(member)
        self.actions.append(EndTrial(identity.number, "cancelled"))

    def remove_leftovers(self, member: str) -> None:
        """Remove what a member that does not run has beside what the log names, or is not to keep of that."""
        known = self.run.members[member]
        made = [name_weights(name) for reduced, name in self._reducing if reduced == member]  # and not logged yet
        self.actions.append(RemoveLeftovers(member, [*(name for name, _ in known.list_checkpoints()), *made]))
        reduction = plan_reduction(known, self.keep_checkpoints)
        if reduction is not None and (member, reduction.name) not in self._reducing:
            self._reducing.add((member, reduction.name))
            self.actions.append(reduction)

    def end_reduction(self, event: dict[str, Any]) -> None:
        """A checkpoint was reduced: log it, and then remove what was there before."""
        self._reducing.discard((event["member"], event["removed"]))
        if "error" not in event:
            self.log(**{"kind" if name == "type" else name: value for name, value in event.items()})
            self.remove_leftovers(event["member"])

    def list_potential(self) -> Sequence[Node]:
        """The nodes with all that they could ever offer, also what processes of others hold now."""
        cluster = self.list_cluster()
        return [node.without_others() for node in (self.nodes if cluster is None else cluster)]

    @property
    def devices(self) -> str:
        """How members are packed; see `ensemble.schedule.needs.resolve_devices`."""
        has_gpus = self.run.has_gpus or any(node.gpus for node in self.list_cluster() or ())
        return resolve_devices(self.declared_devices, has_gpus=has_gpus)

    def without_quarantined(self, node: Node) -> Node:
        """The node without its GPUs that have broken."""
        broken = self.run.quarantined
        return node.select_gpus(lambda i: node.gpu_parents[i] not in broken) if broken else node

    def warn_of_gpus(self, node: str, no_gpus: str) -> None:
        """Warn that a node offers less than its GPUs: once of each GPU and cause, whatever the amounts."""
        causes = {(node, _AMOUNT.sub("", reason)): reason for reason in no_gpus.split("; ") if reason}
        new = [reason for cause, reason in causes.items() if cause not in self._said_of_gpus]
        self._said_of_gpus.update(causes)
        if new:
            log.warning("node %s: %s", node, "; ".join(new))

    def can_get_cores(self, cpus: float) -> bool:
        """Whether some node has that many cores that the run does not hold."""
        held = {node.name: node.cpus for node in self.nodes}
        return any(node.cpus - held.get(node.name, 0.0) >= cpus for node in self.list_potential())

    # -- attempts -----------------------------------------------------------------------------------------------

    def list_placements(self) -> list[Placement]:
        """The placements of all attempts."""
        return [live.start.placement for live in self.live.values()]

    def list_feeders_read(self) -> list[tuple[str, int]]:
        """(node, cohort) of the feeder of each attempt; of both feeders where an attempt is to move."""
        return [key for live in self.live.values() for key in live.feeder_keys]

    def count_readers(self) -> Counter[tuple[str, int]]:
        """(node, cohort) -> attempts that read that feeder, or will, and whose outcome is not known."""
        return Counter(key for live in self.live.values() if not live.is_exiting for key in live.feeder_keys)

    def list_training(self) -> list[tuple[Identity, str, int | None]]:
        """(member, node, cohort) of each attempt on one node that is not asked to move or end.

        The cohort is None where the member prepares its own batches, also because its cohort has no feeder.
        """
        return [
            (
                live.identity,
                live.start.placement.node,
                live.cohort if self.run.members[live.member].feeder else None,
            )
            for live in self.live.values()
            if live.is_active and live.intent is None and not live.is_moving and not live.start.placement.nodes
        ]

    def list_waiting(self) -> Sequence[Identity]:
        """The members to be placed, returning ones included."""
        return [*self.waiting, *(identity for identity, _ in self.returning)]
