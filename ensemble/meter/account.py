"""Keeps what a run has used while it grows, event by event; what no later event can change is summed up.

An interval of a node's energy is attributed (`ensemble.meter.attribution`) once no process that was at work in it
has still to report its CPU time. Should one report it after all, it shares in the intervals that are open; sums
are what they were. `ensemble.meter.ledger` presents the account.
"""

from __future__ import annotations

import dataclasses
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ensemble.events import Event, RunStarted, Usage
from ensemble.meter.attribution import IDLE, OTHER, Energies, Method, attribute, list_uses
from ensemble.meter.origin import Origin, from_ticks, weakest
from ensemble.meter.proportional_split import Lag, Owner
from ensemble.meter.usage_intervals import Reader
from ensemble.meter.usage_records import CpuUse, Device, EnergyPart, PowerInterval, Process

ROLES = ("startup", "train", "prepare", "feed", "verify", "profile", "orchestrate", "ray", "idle", "other")
MARGIN_S = 60.0  # figures of the same moment are reported one after another


@dataclass
class Use:
    """What an owner has used on a node, in ticks.

    Attributes:
        sm: SM-seconds, as the driver counts them.
        busy: seconds in which it kept GPUs busy, as its processes count them; filled in by `Account.sum_up`.
        energy: by kind of part and method.
    """

    cpu: int = 0
    cpu_origin: Origin = "measured"
    sm: int = 0
    busy: int = 0
    energy: dict[tuple[str, Method], tuple[int, Origin]] = field(default_factory=dict)

    def add_energy(self, energy: Mapping[tuple[str, Method], tuple[int, Origin]]) -> int:
        """Adds energy by kind and method; returns its ticks."""
        for key, (ticks, origin) in energy.items():
            before, known = self.energy.get(key, (0, origin))
            self.energy[key] = (before + ticks, origin if origin == known else weakest((known, origin)))
        return sum(ticks for ticks, _ in energy.values())

    def add(self, use: Use) -> None:
        """Adds another use."""
        self.cpu, self.sm, self.busy = self.cpu + use.cpu, self.sm + use.sm, self.busy + use.busy
        if self.cpu_origin != use.cpu_origin:
            self.cpu_origin = weakest((self.cpu_origin, use.cpu_origin))
        self.add_energy(use.energy)


@dataclass
class NodeUse:
    """What a node has used while its meter ran, in ticks; None where nothing could be read.

    Attributes:
        idle: of the energy; None where it was not known at any time.
        peak_w: the highest mean power of an interval.
        unread_s: seconds of which its meter has no reading.
    """

    energy: int | None = None
    idle: int | None = None
    origin: Origin = "measured"
    metered_s: float = 0.0
    peak_w: float | None = None
    unread_s: float = 0.0
    sources: list[str] = field(default_factory=list)


@dataclass
class Sums:
    """What has been summed up.

    Attributes:
        uses: by owner and node.
        nodes: by name.
        peaks: highest mean power of an interval in watts, by ("member", name), ("role", name) or ("run", ""), and
            node.
        metered: stretches of time in which some node was metered, in order, not overlapping: [start, end].
    """

    uses: dict[tuple[Owner, str], Use] = field(default_factory=dict)
    nodes: dict[str, NodeUse] = field(default_factory=dict)
    peaks: dict[tuple[str, str, str], float] = field(default_factory=dict)
    metered: list[list[float]] = field(default_factory=list)

    @property
    def metered_s(self) -> float:
        """Seconds in which some node was metered."""
        return sum(end - start for start, end in self.metered)

    def copy(self, member: str | None = None) -> Sums:
        """A copy to which more can be added, of all uses or of those of one member."""
        uses = {
            key: dataclasses.replace(use, energy=dict(use.energy))
            for key, use in self.uses.items()
            if member is None or key[0].member == member
        }
        nodes = {name: dataclasses.replace(node, sources=list(node.sources)) for name, node in self.nodes.items()}
        metered = [list(each) for each in self.metered]
        return dataclasses.replace(self, uses=uses, nodes=nodes, peaks=dict(self.peaks), metered=metered)

    def use(self, owner: Owner, node: str) -> Use:
        """What an owner has used on a node."""
        return self.uses.setdefault((owner, node), Use())

    def add_interval(self, node: str, interval: PowerInterval, energies: Energies) -> None:
        """Adds one interval of a node and its energy by owner."""
        self._add_to_node(node, interval)
        watts: dict[tuple[str, str], int] = {}
        for owner, kinds in energies.items():
            total = self.use(owner, node).add_energy(kinds)
            of_run = [] if owner in (IDLE, OTHER) else [("run", "")]
            of_member = [] if owner.member is None else [("member", owner.member)]
            for key in [("role", owner.role), *of_run, *of_member]:
                watts[key] = watts.get(key, 0) + total
        length = interval.end - interval.start
        for (what, name), ticks in watts.items() if length > 0 else ():
            now_w = from_ticks(ticks) / length
            self.peaks[what, name, node] = max(now_w, self.peaks.get((what, name, node), 0.0))
        for part in interval.parts:
            for owner, ticks in part.activity or ():
                self.use(owner, node).sm += ticks

    def _add_to_node(self, name: str, interval: PowerInterval) -> None:
        node = self.nodes.setdefault(name, NodeUse())
        node.unread_s += interval.end - interval.start if interval.unread else 0.0
        if not interval.parts:
            return
        length = interval.end - interval.start
        energy = sum(part.ticks for part in interval.parts)
        idle = [part.idle for part in interval.parts if part.idle is not None]
        node.energy = (node.energy or 0) + energy
        node.idle = node.idle if not idle else (node.idle or 0) + sum(idle)
        node.origin = weakest((node.origin, *(part.origin for part in interval.parts)))
        node.metered_s += length
        if length > 0:
            node.peak_w = max(from_ticks(energy) / length, node.peak_w or 0.0)
        if interval.source not in node.sources:
            node.sources.append(interval.source)
        _add_stretch(self.metered, interval.start, interval.end)


def _add_stretch(stretches: list[list[float]], start: float, end: float) -> None:
    """Adds a stretch of time to others, joined with those that it meets."""
    first = bisect_left([each[1] for each in stretches], start)
    last = bisect_right([each[0] for each in stretches], end)
    if first < last:
        start, end = min(start, stretches[first][0]), max(end, stretches[last - 1][1])
    stretches[first:last] = [[start, end]]


@dataclass
class Account:
    """What a run has used.

    Attributes:
        reader: what is not summed up yet.
        last_t: time of the last event.
        lags: by node, see `ensemble.meter.proportional_split.subtract_claimed`.
        sums: what has been summed up; CPU time is at once.
        last_seen: when the CPU time of each member at work was last reported.
        rays: ticks that Ray's processes used, which may become the run's own.
    """

    reader: Reader = field(default_factory=Reader)
    last_t: float = 0.0
    lags: dict[str, Lag] = field(default_factory=dict)
    sums: Sums = field(default_factory=Sums)
    last_seen: dict[str, float] = field(default_factory=dict)
    rays: dict[Process, int] = field(default_factory=dict)

    def apply(self, event: Event) -> None:
        """Applies the next event of the log."""
        reader = self.reader
        reader.apply(event)
        self.last_t = max(self.last_t, event.t)
        if isinstance(event, RunStarted):
            self.rays.clear()
        if isinstance(event, Usage) and event.cpu_s is not None:
            self._add_cpu(event.node, reader.node(event.node).cpu[-1])

    def _add_cpu(self, node: str, used: CpuUse) -> None:
        owner = used.span.owner
        uses = self.reader.node(node).cpu
        if owner.role == "ray":
            if any((*used.process, role) in self.reader.last_usage for role in ROLES if role != "ray"):
                uses.pop()  # it became another's, whose own account covers it from its first second
                return
            self.rays[used.process] = self.rays.get(used.process, 0) + used.span.ticks
        elif used.process in self.rays:
            # Its own account covers it from its first second. Energy that was summed up before stays with Ray.
            uses[:] = [each for each in uses if each.process != used.process or each.span.owner.role != "ray"]
            self.sums.use(Owner("ray"), node).cpu -= self.rays.pop(used.process)
        use = self.sums.use(owner, node)
        use.cpu += used.span.ticks
        use.cpu_origin = weakest((use.cpu_origin, used.origin))
        if owner.member is not None:
            self.last_seen[owner.member] = used.span.end

    def sum_up(self, member: str | None = None) -> Sums:
        """What was used up to now: sums, and the intervals that are still open, as they are shared out now.

        Args:
            member: the one that matters, which is quicker: of others it has less than they used.
        """
        sums = self.sums.copy(member)
        for (owner, name), ticks in self.reader.gpu_busy.items():
            sums.use(owner, name).busy = ticks
        for name, node in self.reader.nodes.items():
            self._sum_intervals(sums, name, node.power, dataclasses.replace(self.lags.get(name, Lag())))
        return sums

    def sum_up_recent(self) -> Sums:
        """What was used in the intervals that are still open, about: those of a node are shared out as one."""
        recent = Sums()
        for name, node in self.reader.nodes.items():
            if node.power:
                lag = dataclasses.replace(self.lags.get(name, Lag()))
                self._sum_intervals(recent, name, [_join_intervals(node.power)], lag)
        return recent

    def count_new_ray_cpu(self) -> int:
        """CPU ticks of Ray's processes that were first seen since `settle` left off.

        A process that the run takes over is recognized by then: its CPU time is no longer Ray's.
        """
        recent: dict[Process, int] = {}
        for node in self.reader.nodes.values():
            for used in node.cpu:
                if used.process in self.rays:
                    recent[used.process] = recent.get(used.process, 0) + used.span.ticks
        return sum(ticks for process, ticks in recent.items() if ticks == self.rays[process])

    def settle(self) -> None:
        """Sums up the intervals to which no later event can belong, and drops their details."""
        reader = self.reader
        at_work = [
            max(self.last_seen.get(m, one.start), one.start) for m, hold in reader.holds.items() for one in hold
        ]
        # What was used before the last start of the run has been reported, or never will be.
        until = max(min([self.last_t, *at_work]) - MARGIN_S, reader.started_t)
        self.last_seen = {member: t for member, t in self.last_seen.items() if member in reader.holds}
        for name, node in reader.nodes.items():
            cut = bisect_right([interval.end for interval in node.power], until)
            edge = node.power[cut - 1].end if cut else until if not node.power else float("-inf")
            self._sum_intervals(self.sums, name, node.power[:cut], self.lags.setdefault(name, Lag()))
            del node.power[:cut]
            node.cpu = [used for used in node.cpu if used.span.end > edge]
            for spans in (*node.reserved.values(), *node.busy.values()):
                spans[:] = [span for span in spans if span.end > edge]

    def _sum_intervals(self, sums: Sums, name: str, intervals: list[PowerInterval], lag: Lag) -> None:
        """Adds a node's first open intervals to sums."""
        sums.nodes.setdefault(name, NodeUse())
        if not intervals:
            return
        node = self.reader.node(name)
        reserved = {what: list(spans) for what, spans in node.reserved.items()}
        for what, span in self.reader.list_open_spans(name, self.last_t):
            reserved.setdefault(what, []).append(span)
        uses = list_uses(dataclasses.replace(node, reserved=reserved), intervals, lag)
        for interval, use in zip(intervals, uses, strict=True):
            sums.add_interval(name, interval, attribute(interval, use, node.cores))


def _join_intervals(intervals: Sequence[PowerInterval]) -> PowerInterval:
    """One interval with the energy of these, of which there is at least one: what is between them counts, too."""
    parts: dict[tuple[str, Device | None], EnergyPart] = {}
    for part in (part for interval in intervals for part in interval.parts):
        before = parts.get((part.kind, part.device))
        parts[part.kind, part.device] = part if before is None else _join_parts(before, part)
    busy = [interval.busy for interval in intervals if interval.busy is not None]
    return dataclasses.replace(
        intervals[-1],
        start=intervals[0].start,
        parts=tuple(parts.values()),
        busy=sum(busy) if len(busy) == len(intervals) else None,
    )


def _join_parts(one: EnergyPart, other: EnergyPart) -> EnergyPart:
    idle = None if one.idle is None or other.idle is None else one.idle + other.idle
    activity: dict[Owner, int] = {}
    for owner, ticks in (*(one.activity or ()), *(other.activity or ())):
        activity[owner] = activity.get(owner, 0) + ticks
    both = None if one.activity is None or other.activity is None else tuple(activity.items())
    origin = weakest((one.origin, other.origin))
    return EnergyPart(one.kind, one.device, one.ticks + other.ticks, origin, idle, both)
