"""Keeps what each member has used so far while a run grows; events that nothing can change any more are summed up.

The ledger (`ensemble.meter.ledger`) looks at all events of a run at once. This takes them one by one, and comes to
the same figures: an interval of a node's energy is split once no process that was at work in it has still to tell
its CPU time. Should one tell it after all, it shares in the intervals that are open; sums are what they were.
"""

from __future__ import annotations

import dataclasses
from bisect import bisect_right
from collections.abc import Mapping
from typing import Any

from ensemble.meter.ledger import Owner, Total, attribute_energy
from ensemble.meter.origin import Origin, from_ticks, weakest
from ensemble.meter.proportional_split import Lag, Span
from ensemble.meter.usage_intervals import CpuUse, Event, Interval, Node, Part, Reader, Reservation

MARGIN_S = 60.0  # figures of the same moment are reported one after another

Sums = dict[str, tuple[int, Origin]]


class Account:
    """CPU time and energy of the members.

    Attributes:
        cpu: ticks of each member.  energy: settled ticks of each.  last_seen: when its CPU time was last reported.
        lags: by node, see `ensemble.meter.proportional_split.subtract_claimed`.
    """

    def __init__(self) -> None:
        self._reader = Reader()
        self.last_t = 0.0
        self.cpu: dict[str, int] = {}
        self.energy: Sums = {}
        self.last_seen: dict[str, float] = {}
        self.lags: dict[str, Lag] = {}

    def apply(self, event: Event) -> None:
        """Applies the next event of the log."""
        known = len(self._reader.used)
        self._reader.apply(event)
        self.last_t = max(self.last_t, event["t"])
        for used in self._reader.used[known:]:
            member = used.span.owner[1]
            if member is not None:
                self.cpu[member] = self.cpu.get(member, 0) + used.span.ticks
                self.last_seen[member] = used.span.end

    def members(self) -> dict[str, Total]:
        """Returns what each member has used, as `Ledger.by_member` does."""
        energy = dict(self.energy)
        for name, node in self._reader.intake.nodes.items():
            lag = dataclasses.replace(self.lags.get(name, Lag()))
            _add(energy, self._attributed(name, node, len(node.power), lag))
        nothing: tuple[None, Origin] = (None, "unavailable")
        totals = {}
        for member in dict.fromkeys((*self.cpu, *energy)):
            ticks, origin = energy.get(member, nothing)
            energy_j = None if ticks is None else from_ticks(ticks)
            totals[member] = Total(from_ticks(self.cpu.get(member, 0)), energy_j, origin)
        return totals

    def settle(self) -> None:
        """Sums up the intervals to which no later event can belong, and drops their details."""
        reader = self._reader
        at_work = [
            max(self.last_seen.get(m, one.start), one.start) for m, hold in reader.holds.items() for one in hold
        ]
        until = min([self.last_t, *at_work]) - MARGIN_S
        self.last_seen = {member: t for member, t in self.last_seen.items() if member in reader.holds}
        edges = {}
        for name, node in reader.intake.nodes.items():
            cut = bisect_right([interval.end for interval in node.power], until)
            edges[name] = node.power[cut - 1].end if cut else until if not node.power else float("-inf")
            _add(self.energy, self._attributed(name, node, cut, self.lags.setdefault(name, Lag())))
            del node.power[:cut]
            for device, spans in node.device_spans.items():
                node.device_spans[device] = [span for span in spans if span.end > edges[name]]
        reader.used = [used for used in reader.used if used.span.end > edges.get(used.node, until)]

    def _attributed(self, name: str, node: Node, cut: int, lag: Lag) -> dict[Owner, dict[str, tuple[int, Origin]]]:
        """Energy of the first `cut` open intervals of a node."""
        if not cut:
            return {}
        used = [each for each in self._reader.used if each.node == name]
        own = {each.process for each in used if each.span.owner[0] != "ray"}
        cpu = [each.span for each in used if each.span.owner[0] != "ray" or each.process not in own]
        devices = {device: list(spans) for device, spans in node.device_spans.items()}
        for member, hold in self._reader.holds.items():
            for device, span in (
                span for one in hold if one.node == name for span in one.spans(member, self.last_t)
            ):
                devices.setdefault(device, []).append(span)
        return attribute_energy(Node(node.power[:cut], cpu, devices), lag)

    # -- as JSON --------------------------------------------------------------------------------------------------

    def as_dict(self) -> dict[str, Any]:
        """Returns the account as JSON values, for `from_dict`."""
        reader = self._reader
        return {
            "start": reader.start,
            "started_t": reader.started_t,
            "last_t": self.last_t,
            "last_usage": [[*key, *last] for key, last in reader.last_usage.items()],
            "last_power": reader.last_power,
            "holds": _encode_holds(reader.holds),
            "unheld": _encode_holds(reader.unheld),
            "gpu_share": {member: share for member, share in reader.gpu_share.items() if share != 1.0},
            "used": [[*each.process, each.node, each.origin, *_encode_span(each.span)] for each in reader.used],
            "nodes": [[name, *_encode_node(node)] for name, node in reader.intake.nodes.items()],
            "lags": {name: [lag.ahead, lag.highest] for name, lag in self.lags.items()},
            "cpu": self.cpu,
            "energy": self.energy,
            "heard": self.last_seen,
        }

    @classmethod
    def from_dict(cls, kept: Mapping[str, Any]) -> Account:
        """Returns the account of which `as_dict` returned these values."""
        account, reader = cls(), Reader()
        account._reader = reader
        reader.start, reader.started_t = kept["start"], kept["started_t"]
        reader.last_usage = {tuple(key): (t, ticks) for *key, t, ticks in kept["last_usage"]}
        reader.last_power = dict(kept["last_power"])
        for name, holds in (("holds", reader.holds), ("unheld", reader.unheld)):
            for member, node, devices, weight, t in kept.get(name, ()):
                holds.setdefault(member, []).append(Reservation(node, tuple(devices), weight, t))
        reader.gpu_share = dict(kept["gpu_share"])
        reader.used = [
            CpuUse((a, b, c), node, _decode_span(span), origin) for a, b, c, node, origin, *span in kept["used"]
        ]
        reader.intake.nodes = {name: _decode_node(*fields) for name, *fields in kept["nodes"]}
        account.last_t, account.cpu = kept["last_t"], dict(kept["cpu"])
        account.energy = {member: (ticks, origin) for member, (ticks, origin) in kept["energy"].items()}
        account.last_seen = dict(kept["heard"])
        account.lags = {name: Lag(*lag) for name, lag in kept["lags"].items()}
        return account


def _add(sums: Sums, energy: Mapping[Owner, Mapping[str, tuple[int, Origin]]]) -> None:
    """Energy of the members' owners, over roles and kinds."""
    for (_, member), kinds in energy.items():
        if member is not None:
            ticks, origin = sums.get(member, (0, None))
            origins = [each for _, each in kinds.values()] + ([] if origin is None else [origin])
            sums[member] = (ticks + sum(part for part, _ in kinds.values()), weakest(origins))


def _encode_span(span: Span) -> list[Any]:
    return [*span.owner, span.start, span.end, span.ticks]


def _decode_span(fields: list[Any]) -> Span:
    role, member, start, end, ticks = fields
    return Span((role, member), start, end, ticks)


def _encode_node(node: Node) -> list[Any]:
    return [
        [
            [each.start, each.end, [[*vars(part).values()] for part in each.parts], each.busy]
            for each in node.power
        ],
        [[device, [_encode_span(span) for span in spans]] for device, spans in node.device_spans.items()],
    ]


def _decode_node(power: list[Any], devices: list[Any]) -> Node:
    intervals = [
        Interval(start, end, tuple(Part(*part) for part in parts), busy, None, "unavailable", "")
        for start, end, parts, busy in power
    ]
    return Node(intervals, [], {device: [_decode_span(span) for span in spans] for device, spans in devices})


def _encode_holds(holds: Mapping[str, list[Reservation]]) -> list[list[Any]]:
    return [[member, *vars(one).values()] for member, hold in holds.items() for one in hold]
