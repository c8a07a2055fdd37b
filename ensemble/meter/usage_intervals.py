"""Reads from the event log who used what on each node, and when: CPU time, busy GPUs, reserved cores, energy.

Counts in `usage` events (of a process in a role) and `feeder` events grow; the difference of two of them is what
was used in between, by the member that the later one names. A process is named by its id and its start, so that
a count belongs to one process and cannot fall: what comes late is contained in what came before. Those of feeders
begin anew when the run is started again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ensemble.meter.origin import Origin, to_ticks
from ensemble.meter.proportional_split import Owner, UsageSpan

ENDS_ATTEMPT = ("finished", "pruned", "stopped", "paused", "cancelled", "failed")
Event = Mapping[str, Any]

Device = int | str  # id of a GPU
UNNAMED: Device = ""
#: How late a `power` event may be: its energy is since the one before. Later ones were not metered meanwhile.
PAUSE_S = 60.0
#: With these events a node is metered anew, after a time in which nothing may have metered it.
BEGINS_POWER = frozenset(("node", "node_lost", "agent_replaced"))
Process = tuple[str, int | None, int]  # node, pid, and what tells two processes of that id apart


class EnergyPart(NamedTuple):
    """Energy of one part of a node in one interval.

    Attributes:
        ticks: in all.  idle: of them, what it would have used while nothing ran; None where that is not known.
        activity: ticks of SM-seconds by owner; None where no utilization is known by process.
    """

    kind: str
    device: Device | None
    ticks: int
    origin: Origin
    idle: int | None = None
    activity: tuple[tuple[Owner, int], ...] | None = None


@dataclass(frozen=True)
class PowerInterval:
    """One `power` event: what a node used in (start, end].

    Attributes:
        busy: CPU ticks of all its processes, if reported.
        unread: why the meter of the node has no reading of this time; empty where it has, or there is no meter.
    """

    start: float
    end: float
    parts: tuple[EnergyPart, ...]
    busy: int | None
    watts: float | None
    origin: Origin
    source: str
    unread: str = ""


class CpuUse(NamedTuple):
    """A span of CPU time with the process that used it."""

    process: Process
    span: UsageSpan
    origin: Origin


@dataclass
class NodeRecord:
    """What happened on one node.

    Attributes:
        cores: by which its idle power is shared out; 0 where that is not known.
        gpus: the physical GPU of each device, and the part of its compute that the device has.
        power: in order of time.
        cpu: CPU time.
        reserved: ticks of core-seconds (None) and of each physical GPU's seconds that members reserved.
        busy: ticks of seconds in which members kept each physical GPU busy.
    """

    cores: float = 0.0
    gpus: dict[Device, tuple[Device, float]] = field(default_factory=dict)
    power: list[PowerInterval] = field(default_factory=list)
    cpu: list[CpuUse] = field(default_factory=list)
    reserved: dict[Device | None, list[UsageSpan]] = field(default_factory=dict)
    busy: dict[Device, list[UsageSpan]] = field(default_factory=dict)

    def find_gpu(self, device: Device) -> tuple[Device, float]:
        """The physical GPU of a device, and the part of its compute that the device has."""
        return self.gpus.get(device, (device, 1.0))


class Reservation(NamedTuple):
    """What a member holds of one node from a time on: the devices of its ranks, a share of each, and cores."""

    node: str
    devices: tuple[Device | None, ...]
    share: float
    cores: float
    start: float

    def list_spans(self, member: str, node: NodeRecord, until: float) -> Iterator[tuple[Device | None, UsageSpan]]:
        """What it held until a time: of cores (None), and of each physical GPU."""
        held = [(None, self.cores), *(_reserve(node, device, self.share) for device in self.devices)]
        for what, amount in held:
            ticks = to_ticks((until - self.start) * amount)
            if ticks > 0:
                yield what, UsageSpan(Owner("train", member), self.start, until, ticks, amount)


def _reserve(node: NodeRecord, device: Device | None, share: float) -> tuple[Device | None, float]:
    if device is None:
        return None, 0.0
    gpu, part = node.find_gpu(device)
    return gpu, share * part


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


class Reader:
    """Applies events one by one.

    Attributes:
        nodes: by name.
        samples: counts.
        gpu_busy: ticks of seconds in which GPUs were kept busy, by owner and node.
        held: ticks of the seconds in which each member held a place.
        ranks: ticks of rank-seconds, by (member, node).
        waited: ticks of the seconds in which each member waited for data, epochs that were trained again included.
        holds: what members hold now, by member; one for each of its nodes.
    """

    def __init__(self) -> None:
        self.nodes: dict[str, NodeRecord] = {}
        self.samples = Samples()
        self.held: dict[str, int] = {}
        self.ranks: dict[tuple[str, str], int] = {}
        self.waited: dict[str, int] = {}
        self.holds: dict[str, list[Reservation]] = {}
        self.unheld: dict[str, list[Reservation]] = {}  # of members that wait for the cluster; older logs only
        self.declared: dict[str, tuple[float, float]] = {}  # cores and share of a GPU of each rank, by member
        self.devices: dict[str, list[Device | None]] = {}  # of each rank, by member
        self.cohorts: dict[str, int | None] = {}
        self.gpu_busy: dict[tuple[Owner, str], int] = {}
        self.start = 0  # how many times the run was started
        self.started_t = float("-inf")
        self.last_usage: dict[tuple[Any, ...], tuple[float, int]] = {}
        self.last_power: dict[str, float] = {}
        self.last_feeder: dict[tuple[Any, ...], dict[str, int]] = {}

    def node(self, name: str) -> NodeRecord:
        """The node of that name, made when it is first met."""
        return self.nodes.setdefault(name, NodeRecord())

    def apply(self, event: Event) -> None:
        """Applies the next event of the log; its CPU time, if it has some, is the last of its node's `cpu`."""
        if event["type"] in BEGINS_POWER:
            self.last_power.pop(event["node"], None)
        match event["type"]:
            case "usage":
                self._add_usage(event)
            case "power":
                self._add_power(event)
            case "feeder":
                self._add_feeder(event)
            case "epoch":
                self._add_epoch(event)
            case "member":
                cores, share = event.get("cpus_per_worker"), event.get("gpus_per_worker")
                self.declared[event["member"]] = (1.0 if cores is None else cores, share or 1.0)
            case "node":
                self._describe_node(event)
            case "placed":
                self._place(event)
            case "moved":
                self.cohorts[event["member"]] = event.get("cohort")
            case "waiting":  # only in older logs: it came between `placed` and `started`
                hold = self.holds.pop(event["member"], None)
                if hold is not None:  # it was placed, and waits for the cluster: it holds nothing yet
                    self.unheld[event["member"]] = hold
            case "started":
                hold = self.unheld.pop(event["member"], None)
                if hold is not None:
                    self.holds[event["member"]] = [one._replace(start=event["t"]) for one in hold]
            case "run_started" | "run_stopped" | "run_finished":
                self._restart(event)
            case kind if kind in ENDS_ATTEMPT:
                self._release(event["member"], event["t"])

    def list_open_spans(self, name: str, until: float) -> Iterator[tuple[Device | None, UsageSpan]]:
        """What members that still hold something of a node have held until a time."""
        node = self.node(name)
        for member, hold in self.holds.items():
            for one in hold:
                if one.node == name:
                    yield from one.list_spans(member, node, until)

    def count_held(self, until: float) -> tuple[dict[str, int], dict[tuple[str, str], int]]:
        """`held` and `ranks`, with what members hold until a time."""
        held, ranks = dict(self.held), dict(self.ranks)
        for member, hold in self.holds.items():
            _add_held(held, ranks, member, hold, until)
        return held, ranks

    # -- one kind of event each ---------------------------------------------------------------------------------

    def _restart(self, event: Event) -> None:
        """Resets all counts at a start of the run. In a start that ended without an event, members held their
        devices until its last event.
        """
        until = event["t"]
        if event["type"] == "run_started":
            until = max([self.started_t, *self.last_power.values(), *(t for t, _ in self.last_usage.values())])
            self.start += 1
            self.started_t = event["t"]
            self.last_power.clear()
            self.last_feeder.clear()
        self.unheld.clear()
        for member in list(self.holds):
            self._release(member, until)

    def _add_usage(self, event: Event) -> None:
        """Adds what a process has used since its last `usage` event; the event's figures are cumulative."""
        owner = Owner(event["role"], event.get("member"), event.get("cohort"))
        t = min(event["t"], event.get("until") or event["t"])  # before it was logged, where a process was killed
        began = event.get("began")
        process = (event["node"], event.get("pid"), -self.start if began is None else began)
        if event.get("gpu_busy_s") is not None:
            # The process counts it once, in whichever role it reports it.
            busy_s = event["gpu_busy_s"]
            first = min(t, max(self.started_t, t - busy_s))
            self._add_busy(event, owner, self._advance((*process, "gpu"), t, busy_s, first))
        if event.get("cpu_s") is None:
            return
        before, for_s = event.get("since") or t - event["cpu_s"], event.get("for_s")
        # Where nothing is known from before: as reported, or as if one core had been busy all the time. What the
        # driver and Ray used while the run was being started lies before its first event.
        first = max(self.started_t, before) if for_s is None else t - for_s
        # The count is of the process in that role, whoever it works for: one process may train several members.
        since, ticks = self._advance((*process, event["role"]), t, event["cpu_s"], first)
        span = UsageSpan(owner, min(since, t), t, ticks)
        use = CpuUse(process, span, event.get("origin", "measured"))
        self.node(event["node"]).cpu.append(use)

    def _advance(self, key: tuple[Any, ...], t: float, count_s: float, first: float) -> tuple[float, int]:
        """Since when a cumulative count has grown, and by how many ticks; a new one counts from `first` on."""
        since, before = self.last_usage.get(key, (first, 0))
        ticks = max(before, to_ticks(count_s))
        self.last_usage[key] = (t, ticks)
        return since, ticks - before

    def _add_busy(self, event: Event, owner: Owner, grown: tuple[float, int]) -> None:
        devices, rank = self.devices.get(owner.member or "", []), event.get("rank") or 0
        device: Device | None = event.get("gpu")
        if device is None:  # where the member was placed: older logs, and a process that sees all GPUs
            device = devices[rank] if rank < len(devices) else None
        node, (since, ticks) = self.node(event["node"]), grown
        gpu, part = node.find_gpu(UNNAMED if device is None else device)
        if ticks:
            node.busy.setdefault(gpu, []).append(UsageSpan(owner, since, event["t"], round(ticks * part)))
            key = (owner, event["node"])
            self.gpu_busy[key] = self.gpu_busy.get(key, 0) + ticks

    def _add_power(self, event: Event) -> None:
        """Adds the energy of a node since its last `power` event."""
        node, watts, energy_j = event["node"], event.get("watts"), event.get("energy_j")
        earlier = self.node(node).power
        # Intervals stay in order even where the clock was set back.
        ended = min(event["t"], event.get("until", event["t"]))  # before it was reported, where rows come late
        t = max([ended, *(interval.end for interval in earlier[-1:])])
        parts = event.get("parts")
        if parts is None:
            parts = [] if energy_j is None else [{"kind": "cpu", "energy_j": energy_j, "origin": event["origin"]}]
        start, length_s = self.last_power.get(node), event.get("interval_s")
        if start is None or (length_s is not None and t - start > length_s + PAUSE_S):
            if length_s is None:
                length_s = energy_j / watts if energy_j and watts else 0.0
            start = max([t - length_s, *(interval.end for interval in earlier[-1:])])
        self.last_power[node] = t
        busy_s = event.get("busy_s")
        earlier.append(
            PowerInterval(
                start=min(start, t),
                end=t,
                parts=tuple(map(_read_part, parts)),
                busy=None if busy_s is None else to_ticks(busy_s),
                watts=watts,
                origin=event["origin"],
                source=event.get("source") or "unknown",
                unread=event.get("reason") or "",
            )
        )

    def _add_feeder(self, event: Event) -> None:
        """Adds what a feeder has prepared and sent since its last event; the event's figures are cumulative."""
        last = self.last_feeder.setdefault((event["node"], event["cohort"], event.get("pid")), {})
        # A restarted feeder counts from zero: its count then falls, which it never does within a process.
        if event.get("prepared", 0) < last.get("prepared", 0):
            last.clear()
        of_stream = self.samples.by_stream.setdefault((event["node"], event["cohort"]), [0, 0, 0])
        for at, name in enumerate(("prepared", "consumed", "skipped")):
            count = event.get(name) or 0
            grown = max(0, count - last.get(name, 0))
            of_stream[at] += grown
            setattr(self.samples, name, getattr(self.samples, name) + grown)
            last[name] = max(count, last.get(name, 0))

    def _add_epoch(self, event: Event) -> None:
        member, private = event["member"], private_samples(event)
        self.samples.private += private
        self.samples.skipped += event.get("private_skipped") or 0
        key = (member, self.cohorts.get(member))
        shared = max(0, (event.get("samples") or 0) - private)
        self.samples.by_member[key] = self.samples.by_member.get(key, 0) + shared
        self.waited[member] = self.waited.get(member, 0) + to_ticks(event.get("waited_s") or 0.0)

    def _describe_node(self, event: Event) -> None:
        node = self.node(event["node"])
        # A run may hold a part of the node's cores, while idle power is that of all of them.
        node.cores = max(node.cores, (event.get("power") or {}).get("cores") or event.get("cpus") or 0.0)
        ids = event.get("gpu_ids") or []
        parents = event.get("gpu_parents") or ids
        shares = event.get("gpu_shares") or [1.0 / parents.count(parent) for parent in parents]
        for gpu, parent, share in zip(ids, parents, shares, strict=False):
            node.gpus[gpu] = (parent, share)

    def _place(self, event: Event) -> None:
        """Lets a member hold its place from this event on."""
        member = event["member"]
        self._release(member, event["t"])
        self.cohorts[member] = event.get("cohort")
        devices = self.devices[member] = list(event.get("devices") or ())
        nodes = event.get("nodes") or [event["node"]] * len(devices)
        by_node: dict[str, list[Device | None]] = {event["node"]: []}
        for node, device in zip(nodes, devices, strict=True):
            by_node.setdefault(node, []).append(device)
        cores, share = self.declared.get(member, (1.0, 1.0))
        self.holds[member] = [
            Reservation(node, tuple(on), share, cores * len(on), event["t"]) for node, on in by_node.items()
        ]

    def _release(self, member: str, t: float) -> None:
        """Ends a member's hold at time `t`."""
        self.unheld.pop(member, None)
        if member not in self.holds:
            return
        _add_held(self.held, self.ranks, member, self.holds[member], t)
        for hold in self.holds.pop(member):
            node = self.node(hold.node)
            for what, span in hold.list_spans(member, node, t):
                node.reserved.setdefault(what, []).append(span)


def _add_held(
    held: dict[str, int],
    ranks: dict[tuple[str, str], int],
    member: str,
    hold: Iterable[Reservation],
    until: float,
) -> None:
    """Adds how long a member has held its place."""
    for at, one in enumerate(hold):
        ticks = max(0, to_ticks(until - one.start))
        if at == 0:
            held[member] = held.get(member, 0) + ticks
        ranks[member, one.node] = ranks.get((member, one.node), 0) + ticks * len(one.devices)


def _read_part(part: Mapping[str, Any]) -> EnergyPart:
    idle_j, activity, ticks = part.get("idle_j"), part.get("activity"), to_ticks(part["energy_j"])
    return EnergyPart(
        part["kind"],
        part.get("device"),
        ticks,
        part["origin"],
        None if idle_j is None else min(ticks, to_ticks(idle_j)),
        None if activity is None else tuple((Owner(role, m), to_ticks(sm_s)) for role, m, sm_s in activity),
    )


def private_samples(event: Event) -> int:
    """Returns the samples of an epoch that the member prepared itself, as reported or by its private batches."""
    reported = event.get("private_samples")
    if reported is not None:
        return int(reported)
    private, shared = event.get("private_batches") or 0, event.get("shared_batches") or 0
    return round((event.get("samples") or 0) * private / (private + shared)) if private else 0
