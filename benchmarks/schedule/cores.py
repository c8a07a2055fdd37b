"""Shares cores fairly among processes, of which several belong to one flow.

A *flow* has one rate and costs core-seconds on one or several nodes for each unit: a stream with its feeders
and the members that compute on processors. A node limits a flow by the flow's slowest process there:

- processes that always compute: max-min fair, each at most one core;
- where some alternate between computing and waiting (for an accelerator): each is in its computing phase for some
  part of the time, independently of the others, and those that compute share the cores evenly. So a node that is
  partly idle may still slow its processes, as real ones do.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

_TOLERANCE = 1e-9
_MAX_SWEEPS = 50  # over all nodes
_NEGLIGIBLE = 1e-12  # core-seconds of a unit
_MAX_ROUNDS, _CONVERGED = 60, 1e-7  # of one node, where processes alternate


@dataclass(frozen=True)
class Process:
    """One or several equal processes: each one's seconds of computing and of waiting for a unit."""

    cpu_s: float
    wait_s: float
    count: int

    def rate(self, level: float) -> float:
        """Units a second with this share of a core while computing."""
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

    def add_processes(self, cost: float, count: int, wait_s: float = 0.0) -> None:
        """Add processes that spend so many core-seconds on a unit together, and wait in between."""
        if cost > _NEGLIGIBLE:
            self.cost += cost
            self.processes.append(Process(cost / max(count, 1), wait_s, max(count, 1)))

    def rate(self, level: float) -> float:
        """The rate of its slowest process, with this share of a core for each."""
        return min(process.rate(level) for process in self.processes)


@dataclass(eq=False)
class Flow:
    """Work that progresses at one rate.

    Attributes:
        uses: by node.  cap: its rate where cores are plenty.
        done: units, as of the time `at`.  rate: since then.  target: units at which an event is due.
        event: number of its next event; -1: there is none.
        tightest: the lowest node limit, that node, and the second lowest limit; None where not known.
    """

    uses: dict[int, Use] = field(default_factory=dict)
    cap: float = 0.0
    done: float = 0.0
    target: float = math.inf
    rate: float = 0.0
    at: float = 0.0
    event: int = -1
    tightest: tuple[float, int, float] | None = None


class SharedCores:
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
        """Add a flow."""
        for node in flow.uses:
            self._flows[node][flow] = None
        flow.tightest = None

    def remove(self, flow: Flow) -> None:
        """Remove a flow, which then uses no cores."""
        for node in flow.uses:
            if self._flows[node].pop(flow, False) is None:
                self._dirty[node] = None
        flow.event = -1
        self._changed.pop(flow, None)

    def mark(self, flow: Flow) -> None:
        """Note that a flow's cap, uses or target have changed."""
        self._changed[flow], flow.tightest = None, None
        self._dirty.update(dict.fromkeys(flow.uses))

    def update_rates(self, progress: Callable[[Flow], None]) -> Iterator[Flow]:
        """Compute all rates; yields the flows that have changed.

        Args:
            progress: is called with a flow before its rate changes.
        """
        for _ in range(_MAX_SWEEPS):
            if not self._dirty:
                break
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
        """A flow's rate by the limits of all nodes but one."""
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
        """Update one node's limits, with the other nodes' limits unchanged."""
        flows = [flow for flow in self._flows[node] if flow.uses[node].processes]
        uses, most = [flow.uses[node] for flow in flows], [self._rate(flow, but=node) for flow in flows]
        for flow, use, allowed in zip(flows, uses, _allowed_rates(self._cores[node], uses, most), strict=True):
            if allowed == use.allowed or abs(allowed - use.allowed) <= _TOLERANCE * allowed:
                continue
            use.allowed, flow.tightest = allowed, None
            self._changed[flow] = None
            if len(flow.uses) > 1:
                self._dirty.update((other, None) for other in flow.uses if other != node)


def _allowed_rates(cores: float, uses: Sequence[Use], most: Sequence[float]) -> list[float]:
    """A node's limit for each flow, whose rate is otherwise limited by `most`."""
    if sum(process.count for use in uses for process in use.processes) <= cores:
        return [use.rate(1.0) for use in uses]
    if any(process.wait_s > 0 for use in uses for process in use.processes):
        return _alternating_rates(cores, uses, most)
    level = _core_share(cores, [(use.rate(1.0), use.cost, limit) for use, limit in zip(uses, most, strict=True)])
    return [use.rate(level) for use in uses]


def _core_share(cores: float, wants: Sequence[tuple[float, float, float]]) -> float:
    """The share of a core for each process at which all cores are used; 1 where there are enough.

    Args:
        wants: each flow's rate with whole cores, its core-seconds of a unit, and its other limit.
    """
    if sum(cost * min(most, whole) for whole, cost, most in wants) <= cores:
        return 1.0
    used, slope = 0.0, sum(whole * cost for whole, cost, _ in wants)
    for whole, cost, most in sorted(wants, key=lambda want: want[2] / want[0]):
        if used + slope * most / whole >= cores:
            break
        used, slope = used + most * cost, slope - whole * cost
    return (cores - used) / slope


def _alternating_rates(cores: float, uses: Sequence[Use], most: Sequence[float]) -> list[float]:
    """The limits where processes wait in between: a fixed point of computing probabilities and speeds.

    A process's speed while it computes is the mean of min(1, cores / n) over the number n of computing processes,
    which compute independently. So at most all cores are used, and all where enough processes compute.
    """
    each = [
        (number, process)
        for number, use in enumerate(uses)
        for process in use.processes
        for _ in range(process.count)
    ]
    speeds = np.minimum(1.0, cores / np.arange(1.0, len(each) + 1))
    levels, allowed = [1.0] * len(each), [use.rate(1.0) for use in uses]
    for _ in range(_MAX_ROUNDS):
        rates = [min(limit, own) for limit, own in zip(most, allowed, strict=True)]
        computing = [
            min(1.0, rates[n] * process.cpu_s / level) for (n, process), level in zip(each, levels, strict=True)
        ]
        new = [float(others @ speeds[: len(others)]) for others in _count_distributions(computing)]
        moved = max(abs(a - b) for a, b in zip(new, levels, strict=True))
        levels = [(a + b) / 2 for a, b in zip(new, levels, strict=True)]
        allowed = [math.inf] * len(uses)
        for (number, process), level in zip(each, levels, strict=True):
            allowed[number] = min(allowed[number], process.rate(level))
        if moved < _CONVERGED:
            break
    return allowed


def _count_distributions(probabilities: Sequence[float]) -> Iterator[np.ndarray[tuple[int], np.dtype[np.float64]]]:
    """For each of several independent events, the distribution of the number of the others that happen."""
    before = [np.ones(1)]
    for chance in probabilities[:-1]:
        before.append(np.convolve(before[-1], (1 - chance, chance)))
    after, found = np.ones(1), []
    for number in range(len(probabilities) - 1, -1, -1):
        found.append(np.convolve(before[number], after))
        after = np.convolve(after, (1 - probabilities[number], probabilities[number]))
    return reversed(found)
