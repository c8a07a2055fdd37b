"""Keeps what a run has used while it grows, event by event; what no later event can change is summed up.

An interval of a node's energy is attributed (`ensemble.meter.attribution`) once no process that was at work in it
has still to report its CPU time. Should one report it after all, it shares in the intervals that are open; sums
are what they were. `ensemble.meter.ledger` presents the account.
"""

from __future__ import annotations

import dataclasses
from bisect import bisect_left, bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ensemble.meter.attribution import IDLE, OTHER, Energies, Method, attribute, list_uses
from ensemble.meter.origin import Origin, from_ticks, weakest
from ensemble.meter.proportional_split import Lag, Owner, Span
from ensemble.meter.usage_intervals import (
    CpuUse,
    Event,
    Interval,
    Node,
    Part,
    Process,
    Reader,
    Reservation,
    Samples,
)

ROLES = ("startup", "train", "prepare", "feed", "profile", "orchestrate", "ray", "idle", "other")
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
    """

    energy: int | None = None
    idle: int | None = None
    origin: Origin = "measured"
    metered_s: float = 0.0
    peak_w: float | None = None
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

    def add_interval(self, node: str, interval: Interval, energies: Energies) -> None:
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

    def _add_to_node(self, name: str, interval: Interval) -> None:
        node = self.nodes.setdefault(name, NodeUse())
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


class Account:
    """What a run has used.

    Attributes:
        reader: what is not summed up yet.
        last_t: time of the last event.
        lags: by node, see `ensemble.meter.proportional_split.subtract_claimed`.
    """

    def __init__(self) -> None:
        self.reader = Reader()
        self.last_t = 0.0
        self.lags: dict[str, Lag] = {}
        self._sums = Sums()
        self._last_seen: dict[str, float] = {}  # when a member's CPU time was last reported
        self._rays: dict[Process, int] = {}  # ticks that Ray's processes used, which may become the run's own

    def apply(self, event: Event) -> None:
        """Applies the next event of the log."""
        reader = self.reader
        reader.apply(event)
        self.last_t = max(self.last_t, event["t"])
        if event["type"] == "run_started":
            self._rays.clear()
        if event["type"] == "usage" and event.get("cpu_s") is not None:
            self._add_cpu(event["node"], reader.node(event["node"]).cpu[-1])

    def _add_cpu(self, node: str, used: CpuUse) -> None:
        owner, (_, _, pid) = used.span.owner, used.process
        uses = self.reader.node(node).cpu
        if owner.role == "ray":
            if any((node, pid, role) in self.reader.last_usage for role in ROLES if role != "ray"):
                uses.pop()  # it became another's, whose own account covers it from its first second
                return
            self._rays[used.process] = self._rays.get(used.process, 0) + used.span.ticks
        elif used.process in self._rays:
            # Its own account covers it from its first second. Energy that was summed up before stays with Ray.
            uses[:] = [each for each in uses if each.process != used.process or each.span.owner.role != "ray"]
            self._sums.use(Owner("ray"), node).cpu -= self._rays.pop(used.process)
        use = self._sums.use(owner, node)
        use.cpu += used.span.ticks
        use.cpu_origin = weakest((use.cpu_origin, used.origin))
        if owner.member is not None:
            self._last_seen[owner.member] = used.span.end

    def sum_up(self, member: str | None = None) -> Sums:
        """What was used up to now: sums, and the intervals that are still open, as they are shared out now.

        Args:
            member: the one that matters, which is quicker: of others it has less than they used.
        """
        sums = self._sums.copy(member)
        for (owner, name), ticks in self.reader.gpu_busy.items():
            sums.use(owner, name).busy = ticks
        for name, node in self.reader.nodes.items():
            self._sum_intervals(sums, name, node.power, dataclasses.replace(self.lags.get(name, Lag())))
        return sums

    def settle(self) -> None:
        """Sums up the intervals to which no later event can belong, and drops their details."""
        reader = self.reader
        at_work = [
            max(self._last_seen.get(m, one.start), one.start) for m, hold in reader.holds.items() for one in hold
        ]
        until = min([self.last_t, *at_work]) - MARGIN_S
        self._last_seen = {member: t for member, t in self._last_seen.items() if member in reader.holds}
        for name, node in reader.nodes.items():
            cut = bisect_right([interval.end for interval in node.power], until)
            edge = node.power[cut - 1].end if cut else until if not node.power else float("-inf")
            self._sum_intervals(self._sums, name, node.power[:cut], self.lags.setdefault(name, Lag()))
            del node.power[:cut]
            node.cpu = [used for used in node.cpu if used.span.end > edge]
            for spans in (*node.reserved.values(), *node.busy.values()):
                spans[:] = [span for span in spans if span.end > edge]

    def _sum_intervals(self, sums: Sums, name: str, intervals: list[Interval], lag: Lag) -> None:
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

    # -- as JSON --------------------------------------------------------------------------------------------------

    def as_dict(self) -> dict[str, Any]:
        """Returns the account as JSON values, for `from_dict`."""
        reader, sums = self.reader, self._sums
        return {
            "last_t": self.last_t,
            "last_seen": self._last_seen,
            "rays": [[*key, ticks] for key, ticks in self._rays.items()],
            "lags": {name: [lag.ahead, lag.highest] for name, lag in self.lags.items()},
            "start": reader.start,
            "started_t": reader.started_t,
            "last_usage": [[*key, *last] for key, last in reader.last_usage.items()],
            "last_power": reader.last_power,
            "last_feeder": [[*key, counts] for key, counts in reader.last_feeder.items()],
            "holds": _encode_holds(reader.holds),
            "unheld": _encode_holds(reader.unheld),
            "held": reader.held,
            "ranks": [[*key, ticks] for key, ticks in reader.ranks.items()],
            "declared": reader.declared,
            "devices": {
                m: devices for m, devices in reader.devices.items() if any(d is not None for d in devices)
            },
            "cohorts": reader.cohorts,
            "gpu_busy": [[*owner, node, ticks] for (owner, node), ticks in reader.gpu_busy.items()],
            "samples": {
                **vars(reader.samples),
                "by_member": [[*key, n] for key, n in reader.samples.by_member.items()],
            },
            "nodes": {name: _encode_node(node) for name, node in reader.nodes.items()},
            "sums": {
                "uses": [[*owner, node, *_encode_use(use)] for (owner, node), use in sums.uses.items()],
                "nodes": {name: vars(node) for name, node in sums.nodes.items()},
                "peaks": [[*key, watts] for key, watts in sums.peaks.items()],
                "metered": sums.metered,
            },
        }

    @classmethod
    def from_dict(cls, kept: Mapping[str, Any]) -> Account:
        """Returns the account of which `as_dict` returned these values."""
        account = cls()
        reader, sums = account.reader, account._sums
        account.last_t, account._last_seen = kept["last_t"], dict(kept["last_seen"])
        account._rays = {(a, b, c): ticks for a, b, c, ticks in kept["rays"]}
        account.lags = {name: Lag(*lag) for name, lag in kept["lags"].items()}
        reader.start, reader.started_t = kept["start"], kept["started_t"]
        reader.last_usage = {tuple(key): (t, ticks) for *key, t, ticks in kept["last_usage"]}
        reader.last_power = dict(kept["last_power"])
        reader.last_feeder = {tuple(key): counts for *key, counts in kept["last_feeder"]}
        for name, holds in (("holds", reader.holds), ("unheld", reader.unheld)):
            for member, node, devices, *rest in kept[name]:
                holds.setdefault(member, []).append(Reservation(node, tuple(devices), *rest))
        reader.held = dict(kept["held"])
        reader.ranks = {(member, node): ticks for member, node, ticks in kept["ranks"]}
        reader.declared = {member: (cores, share) for member, (cores, share) in kept["declared"].items()}
        reader.devices, reader.cohorts = dict(kept["devices"]), dict(kept["cohorts"])
        reader.gpu_busy = {(Owner(a, b, c), node): ticks for a, b, c, node, ticks in kept["gpu_busy"]}
        consumed = {(member, cohort): n for member, cohort, n in kept["samples"]["by_member"]}
        reader.samples = Samples(**{**kept["samples"], "by_member": consumed})
        reader.nodes = {name: _decode_node(node) for name, node in kept["nodes"].items()}
        for role, member, cohort, node, *use in kept["sums"]["uses"]:
            sums.uses[Owner(role, member, cohort), node] = _decode_use(*use)
        sums.nodes = {name: NodeUse(**node) for name, node in kept["sums"]["nodes"].items()}
        sums.peaks = {(what, name, node): watts for what, name, node, watts in kept["sums"]["peaks"]}
        sums.metered = [list(each) for each in kept["sums"]["metered"]]
        return account


def _encode_use(use: Use) -> list[Any]:
    return [use.cpu, use.cpu_origin, use.sm, [[*key, *share] for key, share in use.energy.items()]]


def _decode_use(cpu: int, origin: Origin, sm: int, energy: list[Any]) -> Use:
    return Use(cpu, origin, sm, 0, {(kind, method): (ticks, of) for kind, method, ticks, of in energy})


def _encode_span(span: Span) -> list[Any]:
    return [*span.owner, span.start, span.end, span.ticks]


def _decode_span(role: str, member: str | None, cohort: int | None, start: float, end: float, ticks: int) -> Span:
    return Span(Owner(role, member, cohort), start, end, ticks)


def _encode_node(node: Node) -> dict[str, Any]:
    return {
        "cores": node.cores,
        "gpus": [[gpu, *of] for gpu, of in node.gpus.items()],
        "power": [{**vars(each), "parts": [list(part) for part in each.parts]} for each in node.power],
        "cpu": [[*each.process, each.origin, *_encode_span(each.span)] for each in node.cpu],
        "reserved": [
            [what, [_encode_span(span) for span in spans]] for what, spans in node.reserved.items() if spans
        ],
        "busy": [[gpu, [_encode_span(span) for span in spans]] for gpu, spans in node.busy.items() if spans],
    }


def _decode_node(kept: Mapping[str, Any]) -> Node:
    def decode_part(kind: str, device: Any, ticks: int, origin: Origin, idle: int | None, activity: Any) -> Part:
        by_owner = None if activity is None else tuple((Owner(*owner), sm) for owner, sm in activity)
        return Part(kind, device, ticks, origin, idle, by_owner)

    return Node(
        cores=kept["cores"],
        gpus={gpu: (parent, part) for gpu, parent, part in kept["gpus"]},
        power=[
            Interval(**{**each, "parts": tuple(decode_part(*part) for part in each["parts"])})
            for each in kept["power"]
        ],
        cpu=[CpuUse((a, b, c), _decode_span(*span), origin) for a, b, c, origin, *span in kept["cpu"]],
        reserved={what: [_decode_span(*span) for span in spans] for what, spans in kept["reserved"]},
        busy={gpu: [_decode_span(*span) for span in spans] for gpu, spans in kept["busy"]},
    )


def _encode_holds(holds: Mapping[str, list[Reservation]]) -> list[list[Any]]:
    return [[member, *one] for member, hold in holds.items() for one in hold]
