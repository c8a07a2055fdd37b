"""Attributes a node's energy to those who used the node, interval by interval. Pure functions of whole ticks.

    energy of a part = idle + dynamic

*Idle* energy is what the part would have used while nothing ran. It is shared by reservation x time: a member
that reserves a quarter of the cores for the whole interval bears a quarter of the processors' idle energy. What
nobody reserved is left to the owner `IDLE`. *Dynamic* energy is shared by activity, each part by the best that is
known of it (`Method`). Where a part's idle energy is not known, all of its energy counts as dynamic.

See docs/concepts/accounting.md for the equations and their sources.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal, get_args

from ensemble.meter.origin import Origin, to_ticks, weakest
from ensemble.meter.proportional_split import Lag, Owner, split, spread, subtract_claimed
from ensemble.meter.usage_intervals import UNNAMED
from ensemble.meter.usage_records import Device, EnergyPart, NodeRecord, PowerInterval

#: By what energy was shared out: idle energy by `reservation`; dynamic energy of processors and memory by
#: `cpu_time`; of a GPU by `sm_utilization` of each process, else by the `busy_time` that the members counted
#: themselves, else by the `share` of it that they had reserved; of the rest of a node by `dynamic`, the dynamic
#: energy of its other parts.
Method = Literal["reservation", "cpu_time", "sm_utilization", "busy_time", "share", "dynamic"]
METHODS: tuple[Method, ...] = get_args(Method)

OTHER = Owner("other")  # processes that are not the run's
IDLE = Owner("idle")  # idle power that no member reserved

Weights = Mapping[Owner, int]
#: By owner: kind of part and method -> ticks, with their origin.
Energies = dict[Owner, dict[tuple[str, Method], tuple[int, Origin]]]


class IntervalUse:
    """Who used what in one interval, in ticks.

    Attributes:
        cpu: CPU time, with what others used under `OTHER`.
        reserved: by physical GPU, or None for cores.
        busy: by physical GPU.
    """

    def __init__(
        self, cpu: Weights, reserved: Mapping[Device | None, Weights], busy: Mapping[Device, Weights]
    ) -> None:
        self.cpu, self.reserved, self.busy = cpu, reserved, busy


def list_uses(node: NodeRecord, intervals: list[PowerInterval], lag: Lag | None = None) -> list[IntervalUse]:
    """Who used what in each of a node's intervals.

    Args:
        intervals: of the node, in order.
        lag: see `subtract_claimed`, where they are not its first ones; brought up to date.
    """
    times = [(interval.start, interval.end) for interval in intervals]
    by_cpu = spread((each.span for each in node.cpu), times)
    claimed = [sum(used.values()) for used in by_cpu]
    others = subtract_claimed([interval.busy for interval in intervals], claimed, lag)
    reserved = {what: spread(spans, times) for what, spans in node.reserved.items()}
    busy = {gpu: spread(spans, times) for gpu, spans in node.busy.items()}
    return [
        IntervalUse(
            cpu=by_cpu[at] | ({OTHER: others[at]} if others[at] else {}),
            reserved={what: each[at] for what, each in reserved.items()},
            busy={gpu: each[at] for gpu, each in busy.items()},
        )
        for at in range(len(intervals))
    ]


def attribute(interval: PowerInterval, use: IntervalUse, cores: float) -> Energies:
    """The energy of one interval by owner; sums to that of the interval's parts exactly.

    Args:
        cores: of the node; 0 where that is not known: then those that are reserved are taken for all.
    """
    energies: Energies = {}
    length = interval.end - interval.start
    # What the rest of a node feeds (fans, power supplies, boards) follows the parts that are known.
    for part in sorted(interval.parts, key=lambda part: part.kind == "node"):
        idle = part.idle or 0
        if idle:
            capacity = to_ticks(length * (1.0 if part.kind == "gpu" else cores))
            _add(energies, part, "reservation", idle, _share_idle(part, use, capacity))
        if part.ticks > idle or not idle:
            method, weights = _share_dynamic(part, use, energies)
            _add(energies, part, method, part.ticks - idle, weights)
    return energies


def _share_idle(part: EnergyPart, use: IntervalUse, capacity: int) -> Weights:
    weights = dict(use.reserved.get(part.device if part.kind == "gpu" else None, {}))
    free = capacity - sum(weights.values())
    return weights | {IDLE: free} if free > 0 or not weights else weights


def _share_dynamic(part: EnergyPart, use: IntervalUse, energies: Energies) -> tuple[Method, Weights]:
    if part.kind == "gpu":
        gpu = UNNAMED if part.device is None else part.device
        by_process = _sum_owners(part.activity or ())
        options: list[tuple[Method, Weights]] = [
            ("sm_utilization", by_process),
            ("busy_time", use.busy.get(gpu, {})),
            ("share", use.reserved.get(gpu, {})),
        ]
    else:
        options = [("cpu_time", use.cpu)]
        if part.kind == "node":
            options.insert(0, ("dynamic", _sum_dynamic(energies)))
    return next(((method, weights) for method, weights in options if sum(weights.values())), (options[-1][0], {}))


def _sum_owners(amounts: Iterable[tuple[Owner, int]]) -> Weights:
    weights: dict[Owner, int] = {}
    for owner, ticks in amounts:
        if ticks:
            weights[owner] = weights.get(owner, 0) + ticks
    return weights


def _sum_dynamic(energies: Energies) -> Weights:
    return {
        owner: sum(ticks for (_, method), (ticks, _) in kinds.items() if method != "reservation")
        for owner, kinds in energies.items()
    }


def _add(energies: Energies, part: EnergyPart, method: Method, ticks: int, weights: Weights) -> None:
    """Splits ticks of a part by weights and adds each share to its owner's; without weights, they are others'."""
    origin: Origin = "attributed" if part.origin == "measured" else "estimated"
    for owner, share in split(ticks, weights if sum(weights.values()) else {OTHER: 1}).items():
        kinds = energies.setdefault(owner, {})
        before, known = kinds.get((part.kind, method), (0, origin))
        kinds[part.kind, method] = (before + share, weakest((known, origin)))
