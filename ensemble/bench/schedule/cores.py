"""Who gets how much of the cores: fair among processes, where many processes belong to one flow.

A *flow* moves at one rate and costs core-seconds on one or several nodes for each unit: a stream with its feeders
and the members that compute on processors. What a node allows a flow is decided by its slowest process there:

- processes that have always something to do: max-min fair, each at most one core;
- where some alternate between computing and waiting (for an accelerator): each is in its computing phase for some
  part of the time, independently of the others, and those that are there share the cores evenly. So a node that is
  idle for a part of the time may slow its processes all the same, as real ones do.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

_SAME = 1e-9
_SWEEPS = 50  # of all nodes, until what they allow no longer changes
_NOTHING = 1e-12  # core-seconds of a unit
_ROUNDS, _CLOSE = 60, 1e-7  # of one node, where processes alternate


@dataclass(frozen=True)
class Process:
    """One or several alike: seconds of a unit in which each computes, and in which it waits for something else."""

    cpu_s: float
    wait_s: float
    count: int

    def rate(self, level: float) -> float:
        """Units a second where it gets this share of a core while it computes."""
        return 1.0 / (self.wait_s + self.cpu_s / level)


@dataclass
class Use:
    """What a flow uses of one node.

    Attributes:
        node: its number.
        cost: core-seconds of a unit, of all its processes there.
        processes: those.
        allowed: the rate that the node allows the flow.
    """

    node: int
    cost: float = 0.0
    processes: list[Process] = field(default_factory=list)
    allowed: float = math.inf

    def put(self, cost: float, count: int, wait_s: float = 0.0) -> None:
        """Add processes that spend so many core-seconds on a unit together, and wait in between."""
        if cost > _NOTHING:
            self.cost += cost
            self.processes.append(Process(cost / max(count, 1), wait_s, max(count, 1)))

    def rate(self, level: float) -> float:
        """What its slowest process allows where each gets this share of a core."""
        return min(process.rate(level) for process in self.processes)


@dataclass(eq=False)
class Flow:
    """Something that moves.

    Attributes:
        uses: by node.  cap: its rate where cores are plenty.
        done: units, as of the time `at`.  rate: since then.  target: where it is to be looked at.
        version: counts announcements of when it will be there.  ended: whether it moves no more.
        tightest: what its worst-off node allows, that node, and what the second allows; None where not known.
    """

    uses: dict[int, Use] = field(default_factory=dict)
    cap: float = 0.0
    done: float = 0.0
    target: float = math.inf
    rate: float = 0.0
    at: float = 0.0
    version: int = 0
    ended: bool = False
    tightest: tuple[float, int, float] | None = None


class Cores:
    """The cores of all nodes and the flows that use them.

    Args:
        cores: of each node.
    """

    def __init__(self, cores: Sequence[float]) -> None:
        self._cores = list(cores)
        self._flows: list[dict[Flow, None]] = [{} for _ in cores]
        self._dirty: dict[int, None] = {}
        self._changed: dict[Flow, None] = {}

    def add(self, flow: Flow) -> None:
        """Let it take part."""
        for node in flow.uses:
            self._flows[node][flow] = None
        flow.ended, flow.tightest = False, None

    def remove(self, flow: Flow) -> None:
        """It uses nothing any more."""
        for node in flow.uses:
            if self._flows[node].pop(flow, False) is None:
                self._dirty[node] = None
        flow.ended = True
        self._changed.pop(flow, None)

    def mark(self, flow: Flow) -> None:
        """Its cap, its uses or its target have changed."""
        self._changed[flow], flow.tightest = None, None
        self._dirty.update(dict.fromkeys(flow.uses))

    def settle(self, progress: Callable[[Flow], None]) -> Iterator[Flow]:
        """Find all rates; yields the flows of which something has changed.

        Args:
            progress: is called with a flow before its rate changes.
        """
        sweeps = 0
        while self._dirty and sweeps < _SWEEPS:
            sweeps += 1
            dirty, self._dirty = self._dirty, {}
            for node in dirty:
                self._share(node)
        self._dirty.clear()
        changed, self._changed = self._changed, {}
        for flow in changed:
            progress(flow)
            flow.rate = self._rate(flow)
            yield flow

    def _rate(self, flow: Flow, but: int = -1) -> float:
        """Its rate as the nodes allow it now, without the limit that node `but` sets."""
        if flow.tightest is None:
            first, node, second = math.inf, -1, math.inf
            for use in flow.uses.values():
                if use.allowed < first:
                    first, node, second = use.allowed, use.node, first
                elif use.allowed < second:
                    second = use.allowed
            flow.tightest = (first, node, second)
        first, node, second = flow.tightest
        return min(flow.cap, second if node == but else first)

    def _share(self, node: int) -> None:
        """What one node allows its flows, with what the other nodes allow them as it is."""
        flows = [flow for flow in self._flows[node] if flow.uses[node].processes]
        uses, most = [flow.uses[node] for flow in flows], [self._rate(flow, but=node) for flow in flows]
        for flow, use, allowed in zip(flows, uses, _allowed(self._cores[node], uses, most), strict=True):
            if allowed == use.allowed or abs(allowed - use.allowed) <= _SAME * allowed:
                continue
            use.allowed, flow.tightest = allowed, None
            self._changed[flow] = None
            if len(flow.uses) > 1:
                self._dirty.update((other, None) for other in flow.uses if other != node)


def _allowed(cores: float, uses: Sequence[Use], most: Sequence[float]) -> list[float]:
    """The rate that a node allows each flow, if each would move at its `most` otherwise."""
    if sum(process.count for use in uses for process in use.processes) <= cores:
        return [use.rate(1.0) for use in uses]
    if any(process.wait_s > 0 for use in uses for process in use.processes):
        return _alternating(cores, uses, most)
    level = _level(cores, [(use.rate(1.0), use.cost, limit) for use, limit in zip(uses, most, strict=True)])
    return [use.rate(level) for use in uses]


def _level(cores: float, wants: Sequence[tuple[float, float, float]]) -> float:
    """The share of a core at which all cores are used, 1 where that is enough for all.

    Args:
        wants: of each flow its rate for a whole core, its core-seconds of a unit, the most that it would move.
    """
    if sum(cost * min(most, whole) for whole, cost, most in wants) <= cores:
        return 1.0
    used, slope = 0.0, sum(whole * cost for whole, cost, _ in wants)
    for whole, cost, most in sorted(wants, key=lambda want: want[2] / want[0]):
        if used + slope * most / whole >= cores:
            break
        used, slope = used + most * cost, slope - whole * cost
    return (cores - used) / slope


def _alternating(cores: float, uses: Sequence[Use], most: Sequence[float]) -> list[float]:
    """The same where processes wait in between: a fixed point of who is computing and how fast that makes it.

    A process's speed while it computes is the mean of min(1, cores / n) over the number n that compute then, the
    others being there independently: so no more cores are used than there are, and all when there are always
    enough to do.
    """
    each = [
        (number, process)
        for number, use in enumerate(uses)
        for process in use.processes
        for _ in range(process.count)
    ]
    speeds = np.minimum(1.0, cores / np.arange(1.0, len(each) + 1))
    levels, allowed = [1.0] * len(each), [use.rate(1.0) for use in uses]
    for _ in range(_ROUNDS):
        rates = [min(limit, own) for limit, own in zip(most, allowed, strict=True)]
        there = [
            min(1.0, rates[n] * process.cpu_s / level) for (n, process), level in zip(each, levels, strict=True)
        ]
        new = [float(others @ speeds[: len(others)]) for others in _others(there)]
        moved = max(abs(a - b) for a, b in zip(new, levels, strict=True))
        levels = [(a + b) / 2 for a, b in zip(new, levels, strict=True)]
        allowed = [math.inf] * len(uses)
        for (number, process), level in zip(each, levels, strict=True):
            allowed[number] = min(allowed[number], process.rate(level))
        if moved < _CLOSE:
            break
    return allowed


def _others(there: Sequence[float]) -> Iterator[np.ndarray[tuple[int], np.dtype[np.float64]]]:
    """For each of some independent events, the distribution of how many of the others happen."""
    before = [np.ones(1)]
    for chance in there[:-1]:
        before.append(np.convolve(before[-1], (1 - chance, chance)))
    after, found = np.ones(1), []
    for number in range(len(there) - 1, -1, -1):
        found.append(np.convolve(before[number], after))
        after = np.convolve(after, (1 - there[number], there[number]))
    return reversed(found)
