"""Holds what is known of a run: `RunState`, which `ensemble.store.event_handlers` builds from the event log."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import ensemble.events as events
from ensemble.spec.out_of_fold import is_out_of_fold
from ensemble.store.member import MemberState, NodeState


@dataclass(slots=True)
class RunState:
    """All that is known of a run.

    Attributes:
        header: the last `run_started` event; its fields are also `name`, `run_id` and so on.
        files: the digests that a file of the declaration and the code may have, by its path in the run directory.
        base: the frozen network that its members share; None where they have none.
        started: Unix seconds of the first start, or of the first event that is known of it.  updated: of the last
            event.  starts: how often it was started, as far as that is known.
        idle_s: seconds in which nothing ran, from the last event before each further start to that start.
        members: by id, in the order in which they were declared.
        has_gpus: whether a node of it, in any of its starts, has had a GPU.
        feeders: the last `feeder` event of each (node, cohort), with the last reported levels (`fullness`).
        unshared: the last `feeder_lost` or `sharing_ended` event of each (node, cohort) whose feeder is gone
            and has no successor yet; of (None, None) where nothing is shared from the start on.
        bad_records: the first `bad_record` event of each (split, index) in this start: records that end or hang
            whoever prepares them.
        differences: the last `sample_difference` event of each (member, split); member None: of a cache.
        quarantined: the `gpu_quarantined` event of each GPU that has broken in this start, by its id.
        unusable: the last `node_unusable` event of each node, by its name, until it can be used.
        finished: the `finished` event of each member that has; not in what a snapshot keeps.
        profiles: the last `profile` event (`ensemble.schedule.profiles.Profile`) of each (shape, device).
        planned: the last plan for members that waited (`ensemble.controller.planner`).
        missing: what the cluster has not given yet of what the run asked for, in words; empty if nothing.
        awaited_memory: which member would start if others held no memory, in words; empty if none.
        measuring: members of which a few steps are being measured.
        rehearsing: the member that is being rehearsed; None: none is.
        rehearsed: what rehearsals have shown, the last one last.
        combining: how many members are being combined now; 0 where none are.
        failures_in_row: attempts that have failed since a member last ended an epoch or finished.
        memory_increases: all `memory_increase` events: what members were granted after they ran out of memory.
        combined: the last `combined` event.  ended: the event that ended the run, None while it has not ended.
        has_newer_results: whether a member has finished further epochs since it was combined.
    """

    header: events.RunStarted = field(default_factory=events.RunStarted)
    files: dict[str, list[str]] = field(default_factory=dict)
    base: events.BaseMade | None = None
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
    has_gpus: bool = False
    members: dict[str, MemberState] = field(default_factory=dict)
    feeders: dict[tuple[str, int], events.Feeder] = field(default_factory=dict)
    unshared: dict[tuple[str | None, int | None], events.FeederLost | events.SharingEnded] = field(
        default_factory=dict
    )
    bad_records: dict[tuple[str, int], events.BadRecord] = field(default_factory=dict)
    differences: dict[tuple[str | None, str], events.SampleDifference] = field(default_factory=dict)
    quarantined: dict[str, events.GpuQuarantined] = field(default_factory=dict)
    unusable: dict[str, events.NodeUnusable] = field(default_factory=dict)
    finished: dict[str, events.Finished] = field(default_factory=dict)
    profiles: dict[tuple[str, str], events.Profiled] = field(default_factory=dict)
    planned: events.Planned | None = None
    missing: str = ""
    awaited_memory: str = ""
    measuring: set[str] = field(default_factory=set)
    rehearsing: str | None = None
    rehearsed: list[events.Rehearsed] = field(default_factory=list)
    combining: int = 0
    failures_in_row: int = 0
    memory_increases: list[events.MemoryIncrease] = field(default_factory=list)
    combined: events.Combined | None = None
    has_newer_results: bool = False
    ended: events.RunFinished | events.RunStopped | None = None

    @property
    def further_objectives(self) -> list[events.Objective]:
        """What a search optimizes beside its objective; empty where that is all."""
        old = self.header.second_objective
        return self.header.further_objectives or ([] if old is None else [events.Objective(old, "min")])

    @property
    def objectives(self) -> list[events.Objective]:
        """All objectives, that which ranks the members first."""
        return [events.Objective(self.objective, self.direction), *self.further_objectives]

    def values_of(self, member: MemberState) -> list[float | None]:
        """A member's value of each objective; None where it is not known."""
        return [
            member.metrics.get(self.objective),
            *(member.value_of(objective) for objective in self.further_objectives),
        ]

    def as_finished(self) -> RunState:
        """The run as its models are used: members that are trained further are as they had finished.

        Of results that are newer than the combination there is none.
        """
        members = {name: member.result or member for name, member in self.members.items()}
        return replace(self, members=members, combined=None if self.has_newer_results else self.combined)

    @property
    def is_cross_validated(self) -> bool:
        """Whether members are evaluated on different samples, each on the fold that it leaves out."""
        return any(is_out_of_fold(member.identity.get("weights")) for member in self.members.values())

    def list_infeasible(self) -> dict[str, str]:
        """Return the members that do not keep the constraints of the search: name -> why."""
        members = {name: member.result or member for name, member in self.members.items()}
        is_constrained = any(member.constraints is not None for member in members.values())
        if not is_constrained and (self.header.search or {}).get("constraints") is None:
            return {}
        explained = {name: member.explain_infeasible() for name, member in members.items()}
        return {name: why for name, why in explained.items() if why is not None}

    @property
    def has_data(self) -> bool:
        return (self.header.data or {}).get("samples") != 0

    @property
    def waits_for(self) -> str | None:
        """What the run waits for that it has not got yet, in words."""
        parts = [f"Ray: {self.missing}"] * bool(self.missing)
        parts += [f"memory: {self.awaited_memory}"] * bool(self.awaited_memory)
        parts += [f"the rehearsal of {self.rehearsing}"] * bool(self.rehearsing)
        return "; ".join(parts) if parts and self.ended is None else None

    @property
    def wall_s(self) -> float:
        """Seconds in which the run was at work, over all its starts: each from `run_started` to its last event."""
        if self.started is None or self.updated is None:
            return 0.0
        return self.updated - self.started - self.idle_s

    def member(self, name: str, number: int | None = None) -> MemberState:
        """The member of a name, made where it is new.

        Args:
            number: its number, if it is new; None: that of its name.
        """
        member = self.members.get(name)
        if member is None:
            ending = name.rpartition("-")[2]
            guess = int(ending) if ending.isdecimal() else len(self.members)
            member = self.members[name] = MemberState(name, guess if number is None else number)
        return member

    def list_ancestors(self, member: MemberState) -> list[str]:
        """The members from whose whole state a member goes on, its parent first."""
        ancestors: list[str] = []
        lineage = member.identity.get("lineage") or {}
        while lineage.get("whole") and lineage["from"] in self.members:
            ancestors.append(lineage["from"])
            lineage = self.members[lineage["from"]].identity.get("lineage") or {}
        return ancestors

    def node(self, name: str) -> NodeState:
        """The node of a name, made where it is new."""
        return self.nodes.setdefault(name, NodeState(name))
