"""Reads from the event log who used CPU time when, what power each node drew, and which member held which GPU.

Counts in `usage` events (of a process in a role) and `feeder` events grow; the difference of two of them is what
was used in between, by the member that the later one names. A count that went down belongs to a new process with
an old name, and counts from zero. All of them begin anew when the run is started again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ensemble.meter.origin import Origin, to_ticks, weakest
from ensemble.meter.proportional_split import Span

ENDS_ATTEMPT = ("finished", "pruned", "stopped", "paused", "cancelled", "failed")
Event = Mapping[str, Any]


Device = int | str  # id of a GPU; its number in the logs of older versions


@dataclass(frozen=True)
class Part:
    """Energy of one part of a node in one interval."""

    kind: str
    device: Device | None
    ticks: int
    origin: Origin


@dataclass(frozen=True)
class Interval:
    """One `power` event: what a node used in (start, end]; `busy`: CPU ticks of all its processes, if reported."""

    start: float
    end: float
    parts: tuple[Part, ...]
    busy: int | None
    watts: float | None
    origin: Origin
    source: str


@dataclass
class Node:
    """What happened on one node."""

    power: list[Interval] = field(default_factory=list)
    cpu_spans: list[Span] = field(default_factory=list)
    device_spans: dict[Device | None, list[Span]] = field(default_factory=dict)


@dataclass
class UsageRecord:
    """What the ledger is made from: `cpu` is (role, member, node) -> (CPU ticks, origin), counts of samples."""

    nodes: dict[str, Node] = field(default_factory=dict)
    cpu: dict[tuple[str, str | None, str], tuple[int, Origin]] = field(default_factory=dict)
    prepared: int = 0
    consumed: int = 0
    skipped: int = 0
    private: int = 0

    def node(self, name: str) -> Node:
        """The node of that name, made when it is first met."""
        return self.nodes.setdefault(name, Node())


@dataclass(frozen=True)
class CpuUse:
    """A span of CPU time with the process it belongs to."""

    process: tuple[int, str, int | None]  # start of the run, node, pid
    node: str
    span: Span
    origin: Origin


@dataclass(frozen=True)
class Reservation:
    """A member's hold on devices of one node."""

    node: str
    devices: tuple[Device, ...]
    weight: float
    start: float

    def spans(self, member: str, until: float) -> list[tuple[Device, Span]]:
        """(device, span) of each that it held for some time."""
        ticks = to_ticks((until - self.start) * self.weight)
        return [(each, Span(("train", member), self.start, until, ticks)) for each in self.devices if ticks > 0]


def read_intervals(events: Iterable[Event]) -> UsageRecord:
    """Returns the usage that a log records."""
    reader = Reader()
    last_t = 0.0
    for event in events:
        reader.apply(event)
        last_t = max(last_t, event["t"])
    return reader.finish(last_t)


class Reader:
    """Applies events one by one; `finish` returns the usage that they record."""

    def __init__(self) -> None:
        self.intake = UsageRecord()
        self.start = 0  # how many times the run was started
        self.started_t = float("-inf")
        self.last_usage: dict[tuple[Any, ...], tuple[float, int]] = {}
        self.last_power: dict[str, float] = {}
        self.last_feeder: dict[tuple[Any, ...], dict[str, int]] = {}
        self.used: list[CpuUse] = []
        self.holds: dict[str, list[Reservation]] = {}  # by member, one for each of its nodes
        self.gpu_share: dict[str, float] = {}
        self.unheld: dict[str, list[Reservation]] = {}  # of members that wait for their place from the cluster

    def apply(self, event: Event) -> None:
        """Applies the next event of the log."""
        kind = event["type"]
        if kind == "usage":
            self.usage(event)
        elif kind == "power":
            self.power(event)
        elif kind == "feeder":
            self.feeder(event)
        elif kind == "epoch":
            self.intake.private += private_samples(event)
        elif kind == "member":
            self.gpu_share[event["member"]] = event.get("gpus_per_worker") or 1.0
        elif kind == "node":
            self.intake.node(event["node"])
        elif kind == "placed":
            self.place(event)
        elif kind == "waiting":
            hold = self.holds.pop(event["member"], None)
            if hold is not None:  # it was placed, and waits for the cluster: it holds no device yet
                self.unheld[event["member"]] = hold
        elif kind == "started":
            hold = self.unheld.pop(event["member"], None)
            if hold is not None:
                self.holds[event["member"]] = [dataclasses.replace(one, start=event["t"]) for one in hold]
        elif kind in ENDS_ATTEMPT:
            self.release(event["member"], event["t"])
        elif kind in ("run_started", "run_stopped", "run_finished"):
            self.restart(event)

    def restart(self, event: Event) -> None:
        """Resets all counts at a start of the run. In a start that ended without an event, members held their
        devices until its last event.
        """
        until = event["t"]
        if event["type"] == "run_started":
            until = max([self.started_t, *self.last_power.values(), *(t for t, _ in self.last_usage.values())])
            self.start += 1
            self.started_t = event["t"]
            self.last_usage.clear()
            self.last_power.clear()
            self.last_feeder.clear()
        self.unheld.clear()
        for member in list(self.holds):
            self.release(member, until)

    def usage(self, event: Event) -> None:
        """Adds the CPU time of a process since its last `usage` event; the event's figure is cumulative."""
        if event.get("cpu_s") is None:
            return
        t, ticks, node = event["t"], to_ticks(event["cpu_s"]), event["node"]
        owner = (event["role"], event.get("member"))
        # The count is of the process in that role, whoever it works for: one process may train several members.
        key = (node, event.get("pid"), event["role"])
        last = self.last_usage.get(key)
        if last is not None and last[1] <= ticks:
            since, ticks_used = last[0], ticks - last[1]
        else:
            # Nothing is known from before: as reported, or as if one core had been busy all the time.
            for_s, before = event.get("for_s"), event.get("since") or t - event["cpu_s"]
            # What the driver and Ray used while the run was being started lies before its first event.
            since, ticks_used = max(self.started_t, before) if for_s is None else t - for_s, ticks
        self.last_usage[key] = (t, ticks)
        origin: Origin = event.get("origin", "measured")
        process = (self.start, node, event.get("pid"))
        self.used.append(CpuUse(process, node, Span(owner, min(since, t), t, ticks_used), origin))

    def power(self, event: Event) -> None:
        """Adds the energy of a node since its last `power` event."""
        node, watts, energy_j = event["node"], event.get("watts"), event.get("energy_j")
        earlier = self.intake.node(node).power
        # Intervals stay in order even where the clock was set back.
        t = max([event["t"], *(interval.end for interval in earlier[-1:])])
        parts = event.get("parts")
        if parts is None:
            parts = [] if energy_j is None else [{"kind": "cpu", "energy_j": energy_j, "origin": event["origin"]}]
        start = self.last_power.get(node)
        if start is None:
            length_s = event.get("interval_s")
            if length_s is None:
                length_s = energy_j / watts if energy_j and watts else 0.0
            start = max([t - length_s, *(interval.end for interval in earlier[-1:])])
        self.last_power[node] = t
        busy_s = event.get("busy_s")
        earlier.append(
            Interval(
                start=min(start, t),
                end=t,
                parts=tuple(
                    Part(part["kind"], part.get("device"), to_ticks(part["energy_j"]), part["origin"])
                    for part in parts
                ),
                busy=None if busy_s is None else to_ticks(busy_s),
                watts=watts,
                origin=event["origin"],
                source=event.get("source") or "unknown",
            )
        )

    def feeder(self, event: Event) -> None:
        """Adds what a feeder has prepared and sent since its last event; the event's figures are cumulative."""
        last = self.last_feeder.setdefault((event["node"], event["cohort"], event.get("pid")), {})
        # A restarted feeder counts from zero: its count then falls, which it never does within a process.
        if event.get("prepared", 0) < last.get("prepared", 0):
            last.clear()
        for name in ("prepared", "consumed", "skipped"):
            count = event.get(name) or 0
            grown = max(0, count - last.get(name, 0))
            setattr(self.intake, name, getattr(self.intake, name) + grown)
            last[name] = max(count, last.get(name, 0))

    def place(self, event: Event) -> None:
        """Lets a member hold its devices from this event on."""
        member = event["member"]
        self.release(member, event["t"])
        devices = event.get("devices") or ()
        nodes = event.get("nodes") or [event["node"]] * len(devices)
        by_node: dict[str, list[Any]] = {event["node"]: []}
        for node, device in zip(nodes, devices, strict=True):
            by_node.setdefault(node, []).extend([] if device is None else [device])
        share = self.gpu_share.get(member, 1.0)
        self.holds[member] = [Reservation(node, tuple(on), share, event["t"]) for node, on in by_node.items()]

    def release(self, member: str, t: float) -> None:
        """Ends a member's hold on its devices at time `t`."""
        self.unheld.pop(member, None)
        for hold in self.holds.pop(member, ()):
            for device, span in hold.spans(member, t):
                self.intake.node(hold.node).device_spans.setdefault(device, []).append(span)

    def finish(self, last_t: float) -> UsageRecord:
        """Returns the usage of all events; devices that are still held count until `last_t`."""
        for member in list(self.holds):
            self.release(member, last_t)
        # A worker of Ray's that was idle first and a member's (or the run's own) later accounts for itself.
        own = {used.process for used in self.used if used.span.owner[0] != "ray"}
        for used in self.used:
            if used.span.owner[0] == "ray" and used.process in own:
                continue
            self.intake.node(used.node).cpu_spans.append(used.span)
            key = (*used.span.owner, used.node)
            ticks, origin = self.intake.cpu.get(key, (0, used.origin))
            self.intake.cpu[key] = (ticks + used.span.ticks, weakest((origin, used.origin)))
        return self.intake


def private_samples(event: Event) -> int:
    """Returns the samples of an epoch that the member prepared itself, as reported or by its private batches."""
    reported = event.get("private_samples")
    if reported is not None:
        return int(reported)
    private, shared = event.get("private_batches") or 0, event.get("shared_batches") or 0
    return round((event.get("samples") or 0) * private / (private + shared)) if private else 0
