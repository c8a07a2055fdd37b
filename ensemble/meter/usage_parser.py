"""Makes records of who used what on each node from the events of a log: CPU time, GPUs, reserved cores, energy.

Counts in `usage` and `feeder` events grow; the difference of two is what was used in between. A process is named
by its id and its start, so its count never falls; those of feeders begin anew when the run is started again.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import ensemble.events as events
from ensemble.events import Event
from ensemble.meter.origin import to_ticks
from ensemble.meter.usage_records import (
    UNNAMED,
    CpuUse,
    Device,
    EnergyPart,
    NodeRecord,
    Owner,
    PowerInterval,
    UsageSpan,
)

#: Events that end an attempt of a member.
ENDS_ATTEMPT = (events.Finished, events.Pruned, events.Stopped, events.Paused, events.Cancelled, events.Failed)
#: How late a `power` event may be: its energy is since the one before. Later ones were not metered meanwhile.
PAUSE_S = 60.0


class Hold(NamedTuple):
    """Since when a member holds its place, and how many ranks it has on each node."""

    start: float
    ranks: dict[str, int]


@dataclass
class Samples:
    """Counts of samples.

    Attributes:
        prepared, consumed: of all feeders.  private: prepared by members for themselves.  skipped: by either.
        by_member: consumed from a shared stream, by (member, cohort).
        by_stream: prepared, consumed and skipped of all feeders that a stream has had, by (node, cohort).
    """

    prepared: int = 0
    consumed: int = 0
    skipped: int = 0
    private: int = 0
    by_member: dict[tuple[str, int | None], int] = field(default_factory=dict)
    by_stream: dict[tuple[str, int], list[int]] = field(default_factory=dict)


@dataclass
class UsageParser:
    """Applies events one by one.

    Attributes:
        nodes: by name.
        samples: counts.
        gpu_busy: ticks of seconds in which GPUs were kept busy, by owner and node.
        held: ticks of the seconds in which each member held a place.
        ranks: ticks of rank-seconds, by (member, node).
        waited: ticks of the seconds in which each member waited for data, epochs that were trained again included.
        holds: what members hold now.
        declared: cores and share of a GPU of each rank, by member.
        devices: of each rank, by member.
        cohorts: whose stream each member reads.
        start: how often the run was started, the last time at `started_t`.
        last_usage, last_power, last_feeder: what was counted last.
        last_interval: of the last `power` event, also where it is settled already; None before the first.
    """

    nodes: dict[str, NodeRecord] = field(default_factory=dict)
    samples: Samples = field(default_factory=Samples)
    held: dict[str, int] = field(default_factory=dict)
    ranks: dict[tuple[str, str], int] = field(default_factory=dict)
    waited: dict[str, int] = field(default_factory=dict)
    holds: dict[str, Hold] = field(default_factory=dict)
    declared: dict[str, tuple[float, float]] = field(default_factory=dict)
    devices: dict[str, list[Device | None]] = field(default_factory=dict)
    cohorts: dict[str, int | None] = field(default_factory=dict)
    gpu_busy: dict[tuple[Owner, str], int] = field(default_factory=dict)
    start: int = 0
    started_t: float = float("-inf")
    last_usage: dict[tuple[Any, ...], tuple[float, int]] = field(default_factory=dict)
    last_power: dict[str, float] = field(default_factory=dict)
    last_interval: PowerInterval | None = None
    last_feeder: dict[tuple[str, int, int | None], dict[str, int]] = field(default_factory=dict)

    def node(self, name: str) -> NodeRecord:
        """The node of that name, made when it is first met."""
        record = self.nodes.get(name)
        if record is None:  # asked for at each event: no record is made in vain
            record = self.nodes[name] = NodeRecord()
        return record

    def apply(self, event: Event) -> None:
        """Applies the next event of the log; its CPU time, if it has some, is the last of its node's `cpu`."""
        match event:
            case events.Usage():
                self._add_usage(event)
            case events.Power():
                self._add_power(event)
            case events.Feeder():
                self._add_feeder(event)
            case events.Epoch():
                self._add_epoch(event)
            case events.MemberDeclared():
                cores = 1.0 if event.cpus_per_worker is None else event.cpus_per_worker
                self.declared[event.member] = (cores, event.gpus_per_worker or 1.0)
            case events.NodeChanged():
                self.last_power.pop(event.node, None)
                self._describe_node(event)
            case events.NodeLost() | events.AgentReplaced():
                self.last_power.pop(event.node, None)
            case events.Placed():
                self._place(event)
            case events.Moved():
                self.cohorts[event.member] = event.cohort
            case events.RunStarted() | events.RunStopped() | events.RunFinished():
                self._restart(event)
            case _ if isinstance(event, ENDS_ATTEMPT):
                self._release(event.member, event.t)

    def count_held(self, until: float) -> tuple[dict[str, int], dict[tuple[str, str], int]]:
        """`held` and `ranks`, with what members hold until a time."""
        held, ranks = dict(self.held), dict(self.ranks)
        for member, hold in self.holds.items():
            _add_held(held, ranks, member, hold, until)
        return held, ranks

    # -- one kind of event each ---------------------------------------------------------------------------------

    def _restart(self, event: events.RunStarted | events.RunStopped | events.RunFinished) -> None:
        """Reset all counts; members of a start without an end held their devices until its last event."""
        until = event.t
        if isinstance(event, events.RunStarted):
            until = max([self.started_t, *self.last_power.values(), *(t for t, _ in self.last_usage.values())])
            self.start += 1
            self.started_t = event.t
            self.last_power.clear()
            self.last_feeder.clear()
        for member in list(self.holds):
            self._release(member, until)

    def _add_usage(self, event: events.Usage) -> None:
        """Adds what a process has used since its last `usage` event; the event's figures are cumulative."""
        owner = Owner(event.role, event.member, event.cohort)
        t = event.t
        process = (event.node, event.pid, -self.start if event.began is None else event.began)
        if event.gpu_busy_s is not None:
            # The process counts it once, in whichever role it reports it.
            first = min(t, max(self.started_t, t - event.gpu_busy_s))
            self._add_busy(event, owner, self._advance((*process, "gpu"), t, event.gpu_busy_s, first))
        if event.cpu_s is None:
            return
        before = event.since or t - event.cpu_s
        # Where nothing is known from before: as reported, or as if one core had been busy all the time. What the
        # driver and Ray used while the run was being started lies before its first event.
        first = max(self.started_t, before) if event.for_s is None else t - event.for_s
        # The count is of the process in that role, whoever it works for: one process may train several members.
        since, ticks = self._advance((*process, event.role), t, event.cpu_s, first)
        span = UsageSpan(owner, min(since, t), t, ticks)
        self.node(event.node).cpu.append(CpuUse(process, span, event.origin))

    def _advance(self, key: tuple[Any, ...], t: float, count_s: float, first: float) -> tuple[float, int]:
        """Since when a cumulative count has grown, and by how many ticks; a new one counts from `first` on."""
        since, before = self.last_usage.get(key, (first, 0))
        ticks = max(before, to_ticks(count_s))
        self.last_usage[key] = (t, ticks)
        return since, ticks - before

    def _add_busy(self, event: events.Usage, owner: Owner, grown: tuple[float, int]) -> None:
        devices, rank = self.devices.get(owner.member or "", []), event.rank or 0
        device: Device | None = event.gpu
        if device is None:  # where the member was placed: of a process that sees all GPUs
            device = devices[rank] if rank < len(devices) else None
        node, (since, ticks) = self.node(event.node), grown
        gpu, part = node.find_gpu(UNNAMED if device is None else device)
        if ticks:
            node.busy.setdefault(gpu, []).append(UsageSpan(owner, since, event.t, round(ticks * part)))
            key = (owner, event.node)
            self.gpu_busy[key] = self.gpu_busy.get(key, 0) + ticks

    def _add_power(self, event: events.Power) -> None:
        """Adds the energy of a node since its last `power` event."""
        node = event.node
        earlier = self.node(node).power
        # Intervals stay in order even where the clock was set back.
        ended = event.t if event.until is None else min(event.t, event.until)
        t = max([ended, *(interval.end for interval in earlier[-1:])])
        start, length_s = self.last_power.get(node), event.interval_s
        if start is None or (length_s is not None and t - start > length_s + PAUSE_S):
            start = max([t - (length_s or 0.0), *(interval.end for interval in earlier[-1:])])
        self.last_power[node] = t
        interval = PowerInterval(
            start=min(start, t),
            end=t,
            parts=tuple(map(_read_part, event.parts or ())),
            busy=None if event.busy_s is None else to_ticks(event.busy_s),
            watts=event.watts,
            origin=event.origin,
            source=event.source or "unknown",
        )
        self.last_interval = interval
        earlier.append(interval)

    def _add_feeder(self, event: events.Feeder) -> None:
        """Adds what a feeder has prepared and sent since its last event; the event's figures are cumulative."""
        last = self.last_feeder.setdefault((event.node, event.cohort, event.pid), {})
        # A restarted feeder counts from zero: its count then falls, which it never does within a process.
        if event.prepared < last.get("prepared", 0):
            last.clear()
        of_stream = self.samples.by_stream.setdefault((event.node, event.cohort), [0, 0, 0])
        for at, name in enumerate(("prepared", "consumed", "skipped")):
            count = getattr(event, name)
            grown = max(0, count - last.get(name, 0))
            of_stream[at] += grown
            setattr(self.samples, name, getattr(self.samples, name) + grown)
            last[name] = max(count, last.get(name, 0))

    def _add_epoch(self, event: events.Epoch) -> None:
        """Adds the samples of an epoch; by its batches, those that the member prepared itself."""
        member, batches = event.member, (event.private_batches or 0) + (event.shared_batches or 0)
        private = round((event.samples or 0) * (event.private_batches or 0) / (batches or 1))
        self.samples.private += private
        self.samples.skipped += event.private_skipped or 0
        key = (member, self.cohorts.get(member))
        shared = max(0, (event.samples or 0) - private)
        self.samples.by_member[key] = self.samples.by_member.get(key, 0) + shared
        self.waited[member] = self.waited.get(member, 0) + to_ticks(event.waited_s or 0.0)

    def _describe_node(self, event: events.NodeChanged) -> None:
        node = self.node(event.node)
        # A run may hold a part of the node's cores, while idle power is that of all of them.
        node.cores = max(node.cores, (event.power or {}).get("cores") or event.cpus)
        ids = event.gpu_ids
        parents = event.gpu_parents or ids
        shares = event.gpu_shares or [1.0 / parents.count(parent) for parent in parents]
        for gpu, parent, share in zip(ids, parents, shares, strict=False):
            node.gpus[gpu] = (parent, share)

    def _place(self, event: events.Placed) -> None:
        """Lets a member hold its place from this event on."""
        member = event.member
        self._release(member, event.t)
        self.cohorts[member] = event.cohort
        devices = self.devices[member] = event.devices
        by_node: dict[str, list[Device | None]] = {event.node: []}
        for name, device in zip(event.nodes or [event.node] * len(devices), devices, strict=True):
            by_node.setdefault(name, []).append(device)
        cores, share = self.declared.get(member, (1.0, 1.0))
        self.holds[member] = Hold(event.t, {node: len(on) for node, on in by_node.items()})
        for name, on in by_node.items():
            node = self.node(name)
            physical = [node.find_gpu(device) for device in on if device is not None]
            reserved = [(None, cores * len(on)), *((gpu, share * part) for gpu, part in physical)]
            owner = Owner("train", member)
            node.held[member] = [
                (what, UsageSpan(owner, event.t, math.inf, rate=amount)) for what, amount in reserved if amount > 0
            ]

    def _release(self, member: str, t: float) -> None:
        hold = self.holds.pop(member, None)
        if hold is None:
            return
        _add_held(self.held, self.ranks, member, hold, t)
        for name in hold.ranks:
            node = self.node(name)
            for what, span in node.held.pop(member):
                node.reserved.setdefault(what, []).append(replace(span, end=t))


def _add_held(
    held: dict[str, int], ranks: dict[tuple[str, str], int], member: str, hold: Hold, until: float
) -> None:
    ticks = max(0, to_ticks(until - hold.start))
    held[member] = held.get(member, 0) + ticks
    for node, count in hold.ranks.items():
        ranks[member, node] = ranks.get((member, node), 0) + ticks * count


def _read_part(part: events.PowerPart) -> EnergyPart:
    ticks = to_ticks(part.energy_j)
    return EnergyPart(
        part.kind,
        part.device,
        ticks,
        part.origin,
        None if part.idle_j is None else min(ticks, to_ticks(part.idle_j)),
        None
        if part.activity is None
        else tuple((Owner(role, m), to_ticks(sm_s)) for role, m, sm_s in part.activity),
    )
