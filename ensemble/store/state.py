"""A run's state as a pure fold over its events.

    state = fold(read_events(run_dir.events))

`RunState.apply` is one step of the fold; a controller applies each event that it appends, so that what it holds
and what a later reader computes are the same thing. Nothing here touches a file, a clock or a process.

A member's life: waiting -> placed -> running -> finished | pruned | stopped | failed | cancelled. `failed` with
`retry` is waiting again. A run that was stopped or killed has members that were placed, running or stopped; a
later `run_started` makes them wait again, their checkpoints kept, and so it does with those that failed for
another reason than a loss that is not a number. A member that waits, is placed or runs may be `paused`, which
holds no place; `resumed` lets it wait again, and so does a `run_started`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ensemble.meter.ledger import Total, ledger
from ensemble.store.event_handlers import MEMBER_STEPS, RUN_STEPS
from ensemble.store.member import Event, MemberState, NodeState


@dataclass(slots=True)
class RunState:
    """All that is known of a run.

    Attributes:
        header: the last `run_started` event; its fields are also `name`, `run_id` and so on.
        started: Unix seconds of the first start.  updated: of the last event.  starts: how often it was started.
        idle_s: seconds in which nothing ran, from the last event before each further start to that start.
        members: by id, in the order in which they were declared.
        feeders: the last `feeder` event of each (node, cohort), with the last levels that were told (`fullness`).
        unshared: the last `feeder_lost` or `sharing_ended` event of each (node, cohort) whose feeder is gone
            and has no successor yet; of (None, None) where nothing is shared from the start on.
        bad_records: the first `bad_record` event of each (split, index) in this start: records that end or hang
            whoever prepares them.
        usage: the last `usage` event of each (node, pid, role) of the present start.
        cpu_s: CPU-seconds by role over all processes.
        trail: what a search decides from, in the order of the log: member, epoch, finished, pruned, failed (for
            good) and cancelled events.
        profiles: the last `profile` event (`ensemble.schedule.Profile`) of each (shape, device).
        planned: the last plan for members that waited (`ensemble.controller.planner`).
        measuring: members of which a few steps are being measured.
        rooms: all `room` events: what members were granted after they ran out of memory.
        combined: the last `combined` event.  ended: the event that ended the run, None while it has not ended.
    """

    header: Event = field(default_factory=dict)
    name: str = ""
    run_id: str = ""
    executor: str = ""
    mode: str = "list"
    objective: str = "accuracy"
    direction: str = "max"
    epochs: int = 0
    declared: int = 0
    started: float | None = None
    updated: float | None = None
    starts: int = 0
    idle_s: float = 0.0
    nodes: dict[str, NodeState] = field(default_factory=dict)
    members: dict[str, MemberState] = field(default_factory=dict)
    feeders: dict[tuple[str, int], Event] = field(default_factory=dict)
    unshared: dict[tuple[str | None, int | None], Event] = field(default_factory=dict)
    bad_records: dict[tuple[str, int], Event] = field(default_factory=dict)
    usage: dict[tuple[str, int | None, str], Event] = field(default_factory=dict)
    cpu_s: dict[str, float] = field(default_factory=dict)
    trail: list[Event] = field(default_factory=list)
    profiles: dict[tuple[str, str], Event] = field(default_factory=dict)
    planned: Event | None = None
    measuring: set[str] = field(default_factory=set)
    rooms: list[Event] = field(default_factory=list)
    combined: Event | None = None
    ended: Event | None = None

    @property
    def wall_s(self) -> float:
        """Seconds in which the run was at work, over all its starts: each from `run_started` to its last event."""
        if self.started is None or self.updated is None:
            return 0.0
        return self.updated - self.started - self.idle_s

    def apply(self, event: Event) -> None:
        """Take one event into account; an unknown type changes nothing."""
        if event["type"] == "run_started" and self.updated is not None:
            self.idle_s += event["t"] - self.updated  # negative where an older log has the clock set back
        self.updated = event["t"]
        step = RUN_STEPS.get(event["type"])
        if step is not None:
            step(self, event)
        elif (of_member := MEMBER_STEPS.get(event["type"])) is not None:
            member = self.member(event)
            if event.get("attempt", member.attempt) >= member.attempt:  # else: late news of an attempt given up
                of_member(self, member, event)

    def member(self, event: Event) -> MemberState:
        """The member that an event is about, made where it is new."""
        member = self.members.get(event["member"])
        if member is None:
            member = MemberState(event["member"], event.get("number", len(self.members)))
            self.members[member.id] = member
        return member

    def node(self, name: str) -> NodeState:
        """The node of a name, made where it is new."""
        return self.nodes.setdefault(name, NodeState(name, {}))


def fold(events: Iterable[Event]) -> RunState:
    """The state that these events add up to."""
    state = RunState()
    for event in events:
        state.apply(event)
    return state


def status_rows(events: Iterable[Event]) -> list[dict[str, Any]]:
    """One row a member: what `ensemble status` prints and writes, and what a `Result` holds.

    `epoch` counts finished epochs, `metric` is the objective after the last of them, `metrics` all that was
    reported then, `samples_per_s` the
    rate of training over all epochs (`MemberState.training_rate`). `cpu_s` (all roles of the member), `energy_j`
    and its origin are the ledger's. None where not known. A member that failed has its `error` too.
    """
    events = list(events)
    return rows(fold(events), ledger(events).by_member())


def rows(state: RunState, used: Mapping[str, Total]) -> list[dict[str, Any]]:
    """`status_rows` of a state, by what each member used."""
    nothing = Total(0.0, None, "unavailable")
    return [
        {
            "member": member.id,
            "state": member.state,
            "epoch": member.epoch,
            "metric": member.metrics.get(state.objective),
            "node": member.node,
            "attempts": member.attempts,
            "samples_per_s": member.training_rate,
            "cpu_s": used[member.id].cpu_s if member.id in used else None,
            "energy_j": used.get(member.id, nothing).energy_j,
            "energy_origin": used.get(member.id, nothing).origin,
            "metrics": member.metrics,
            **({"error": f"{member.reason}: {member.error}"} if member.state == "failed" else {}),
        }
        for member in state.members.values()
    ]
