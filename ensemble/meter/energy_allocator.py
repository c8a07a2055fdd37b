"""Shares out a node's energy among those who used the node, interval by interval, exactly in whole ticks; no I/O.

Idle energy (what a part would have used while nothing ran) is shared by reservation x time, dynamic energy by
activity (`Method`). A count that is known at two moments has grown evenly between them. See
docs/concepts/accounting.md.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeVar, get_args

from ensemble.meter.origin import Origin, to_ticks
from ensemble.meter.usage_records import UNNAMED, Device, EnergyPart, NodeRecord, Owner, PowerInterval, UsageSpan

#: By what energy was shared out: idle energy by `reservation`; dynamic energy of processors and memory by
#: `cpu_time`; of a GPU by `sm_utilization` of each process, else by the `busy_time` that the members counted
#: themselves, else by the `share` of it that they had reserved; of the rest of a node by `dynamic`, the dynamic
#: energy of its other parts.
Method = Literal["reservation", "cpu_time", "sm_utilization", "busy_time", "share", "dynamic"]
METHODS: tuple[Method, ...] = get_args(Method)

OTHER = Owner("other")  # processes that are not the run's
IDLE = Owner("idle")  # idle power that no member reserved

K = TypeVar("K", bound=tuple[object, ...])
Weights = Mapping[Owner, int]


class EnergyShare(NamedTuple):
    """Ticks of the energy of one kind of part that an owner bears."""

    owner: Owner
    kind: str
    method: Method
    ticks: int
    origin: Origin


class _IntervalUse(NamedTuple):
    """Who used what in one interval, in ticks.

    Attributes:
        cpu: CPU time, with what others used under `OTHER`.
        reserved: by physical GPU, or None for cores.
        busy: by physical GPU.
    """

    cpu: Weights
    reserved: Mapping[Device | None, Weights]
    busy: Mapping[Device, Weights]


@dataclass
class EnergyAllocator:
    """Shares out the energy of one node, whose intervals it is given in order.

    CPU time of the node and of the run's processes is counted at slightly different moments, so in a single
    interval either may be ahead. What others used is therefore what the running totals grow by: a lag that is made
    good in the next interval is not charged to anyone.

    Attributes:
        ahead: busy ticks of the node less those that the run's processes account for, up to now.
        highest: the most that this was.
    """

    ahead: int = 0
    highest: int = 0

    def allocate(self, node: NodeRecord, intervals: Sequence[PowerInterval]) -> Iterator[list[EnergyShare]]:
        """Yields the shares of the energy of each of the node's next intervals, which sum to it exactly."""
        for interval, use in zip(intervals, self._list_uses(node, intervals), strict=True):
            shares: list[EnergyShare] = []
            # What the rest of a node feeds (fans, power supplies, boards) follows the parts that are known.
            for part in sorted(interval.parts, key=lambda part: part.kind == "node"):
                idle = part.idle or 0
                if idle:
                    capacity = to_ticks(interval.length_s * (1.0 if part.kind == "gpu" else node.cores))
                    shares += _split_part(part, "reservation", idle, _weigh_idle(part, use, capacity))
                if part.ticks > idle or not idle:
                    shares += _split_part(part, *_weigh_dynamic(part, use, shares))
            yield shares

    def _list_uses(self, node: NodeRecord, intervals: Sequence[PowerInterval]) -> Iterator[_IntervalUse]:
        times = [(interval.start, interval.end) for interval in intervals]
        cpu = spread((used.span for used in node.cpu), times)
        held: dict[Device | None, list[UsageSpan]] = {what: list(spans) for what, spans in node.reserved.items()}
        for what, span in (hold for spans in node.held.values() for hold in spans):
            held.setdefault(what, []).append(span)
        reserved = {what: spread(spans, times) for what, spans in held.items()}
        busy = {gpu: spread(spans, times) for gpu, spans in node.busy.items()}
        for at, interval in enumerate(intervals):
            others = self.count_others(interval.busy, sum(cpu[at].values()))
            yield _IntervalUse(
                cpu[at] | ({OTHER: others} if others else {}),
                {what: hold[at] for what, hold in reserved.items()},
                {gpu: hold[at] for gpu, hold in busy.items()},
            )

    def count_others(self, busy: int | None, claimed: int) -> int:
        """Returns the busy ticks of the next interval that no process of the run accounts for.

        Args:
            busy: ticks that all processes of the node used; None where that is not known: then there are none.
            claimed: ticks that the run's processes used.
        """
        if busy is not None:
            self.ahead += busy - claimed
        before, self.highest = self.highest, max(self.highest, self.ahead)
        return self.highest - before


def split(total: int, weights: Mapping[K, int]) -> dict[K, int]:
    """Shares of `total` in proportion to `weights`, as whole ticks that add up to it exactly.

    Each share is rounded down, and the ticks left over go one by one to the largest remainders, equal ones in the
    order of their names (Hamilton's method): no share is off by a tick or more, whatever the order of `weights`.

    Raises:
        ValueError: there is nothing to split by, or a number is negative.
    """
    whole = sum(weights.values())
    if whole <= 0 or min(weights.values()) < 0 or total < 0:
        raise ValueError(f"cannot split {total} ticks by weights {dict(weights)!r}")
    shares = {key: total * weight // whole for key, weight in weights.items()}
    remaining = total - sum(shares.values())
    if remaining:
        by_remainder = sorted(
            weights, key=lambda key: (-(total * weights[key] % whole), [str(part) for part in key])
        )
        for key in by_remainder[:remaining]:
            shares[key] += 1
    return shares


def spread(spans: Iterable[UsageSpan], intervals: Sequence[tuple[float, float]]) -> list[dict[Owner, int]]:
    """For each interval (start, end], how many ticks each owner used in it.

    Args:
        spans: in any order; the parts of them outside all intervals are left out.
        intervals: in order of time, not overlapping.
    """
    used: list[dict[Owner, int]] = [{} for _ in intervals]
    ends = [end for _, end in intervals]
    for span in spans:
        # The first interval that ends after the span's start; an empty span falls where its moment does.
        first = bisect_right(ends, span.start) if span.start < span.end else bisect_left(ends, span.end)
        for at in range(first, len(intervals)):
            start, end = intervals[at]
            if start >= span.end:
                break
            ticks = span.until(end) - span.until(start)
            if ticks:
                used[at][span.owner] = used[at].get(span.owner, 0) + ticks
    return used


def _weigh_idle(part: EnergyPart, use: _IntervalUse, capacity: int) -> Weights:
    """By what idle energy is shared out; of a node with no known number of cores, those reserved are all."""
    weights = use.reserved.get(part.device if part.kind == "gpu" else None, {})
    free = capacity - sum(weights.values())
    return {**weights, IDLE: free} if free > 0 or not weights else weights


def _weigh_dynamic(
    part: EnergyPart, use: _IntervalUse, shares: Iterable[EnergyShare]
) -> tuple[Method, int, Weights]:
    """By what the dynamic energy of a part is divided, its ticks, and the weights."""
    options: list[tuple[Method, Weights]] = [("cpu_time", use.cpu)]
    if part.kind == "gpu":
        gpu = UNNAMED if part.device is None else part.device
        by_process = sum_weights(part.activity or ())
        options = [
            ("sm_utilization", by_process),
            ("busy_time", use.busy.get(gpu, {})),
            ("share", use.reserved.get(gpu, {})),
        ]
    elif part.kind == "node":
        dynamic = sum_weights((share.owner, share.ticks) for share in shares if share.method != "reservation")
        options.insert(0, ("dynamic", dynamic))
    method, weights = next((option for option in options if sum(option[1].values())), (options[-1][0], {}))
    return method, part.ticks - (part.idle or 0), weights


def sum_weights(amounts: Iterable[tuple[Owner, int]]) -> dict[Owner, int]:
    """Sums ticks by owner; of none that has none."""
    weights: dict[Owner, int] = {}
    for owner, ticks in amounts:
        if ticks:
            weights[owner] = weights.get(owner, 0) + ticks
    return weights


def _split_part(part: EnergyPart, method: Method, ticks: int, weights: Weights) -> Iterator[EnergyShare]:
    """Splits ticks of a part by weights; without weights, they are others'."""
    origin: Origin = "attributed" if part.origin == "measured" else "estimated"
    for owner, share in split(ticks, weights if sum(weights.values()) else {OTHER: 1}).items():
        yield EnergyShare(owner, part.kind, method, share, origin)
