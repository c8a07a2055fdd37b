"""Who gets how much of the cores: max-min fair among processes, where many processes belong to one flow.

A *flow* moves at one rate and costs core-seconds on one or several nodes for each unit: a stream with its feeders
and the members that compute on processors. On a node each process gets what it asks for or the node's *level*,
whichever is less; the level is one core where there is enough for all, and else such that all cores are used. A
flow's rate is what its worst-off process allows, so on its other nodes it may ask for less than their levels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

_SAME = 1e-9
_SWEEPS = 50  # of all nodes, until levels no longer change


@dataclass
class Use:
    """What a flow uses of one node.

    Attributes:
        node: its number.
        cost: core-seconds of a unit, of all its processes there.
        per_level: units a second for each core of the node's level: what its slowest process allows.
    """

    node: int
    cost: float = 0.0
    per_level: float = math.inf

    def put(self, cost: float, processes: int) -> None:
        """Add processes that spend so many core-seconds on a unit together."""
        if cost > 0:
            self.cost += cost
            self.per_level = min(self.per_level, max(processes, 1) / cost)


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
        self._levels = [1.0] * len(cores)
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
        """Find levels and rates; yields the flows of which something has changed.

        Args:
            progress: is called with a flow before its rate changes.
        """
        sweeps = 0
        while self._dirty and sweeps < _SWEEPS:
            sweeps += 1
            dirty, self._dirty = self._dirty, {}
            for node in dirty:
                self._level(node)
        self._dirty.clear()
        changed, self._changed = self._changed, {}
        for flow in changed:
            progress(flow)
            flow.rate = self._rate(flow)
            yield flow

    def _rate(self, flow: Flow, but: int = -1) -> float:
        """Its rate as the levels are, without the limit that node `but` sets."""
        if flow.tightest is None:
            first, node, second = math.inf, -1, math.inf
            for use in flow.uses.values():
                allowed = use.per_level * self._levels[use.node]
                if allowed < first:
                    first, node, second = allowed, use.node, first
                elif allowed < second:
                    second = allowed
            flow.tightest = (first, node, second)
        first, node, second = flow.tightest
        return min(flow.cap, second if node == but else first)

    def _level(self, node: int) -> None:
        """The level of one node, the others as they are; where it changes, so do its flows elsewhere."""
        wants = []
        for flow in self._flows[node]:
            use = flow.uses[node]
            if use.cost > 0:
                most = self._rate(flow, but=node)
                wants.append((most / use.per_level, most * use.cost, use.cost * use.per_level, flow))
        level = self._fair(self._cores[node], wants)
        if abs(level - self._levels[node]) <= _SAME * level:
            return
        self._levels[node] = level
        for *_, flow in wants:
            self._changed[flow], flow.tightest = None, None
            if len(flow.uses) > 1:
                self._dirty.update((other, None) for other in flow.uses if other != node)

    @staticmethod
    def _fair(cores: float, wants: list[tuple[float, float, float, Flow]]) -> float:
        """The level at which all cores are used, 1 where that is enough for all.

        Args:
            wants: (level from which on a flow has all it wants, cores that it uses then, cores for each unit of
                the level below that, the flow).
        """
        if sum(slope * min(full, 1.0) for full, _, slope, _ in wants) <= cores:
            return 1.0
        used, slope = 0.0, sum(slope for *_, slope, _ in wants)
        for full, most, each, _ in sorted(wants, key=lambda want: want[0]):
            if used + slope * full >= cores:
                break
            used, slope = used + most, slope - each
        return (cores - used) / slope
