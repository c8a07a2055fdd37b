"""What owners and nodes have used, summed up in whole ticks."""

from __future__ import annotations

import dataclasses
from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, field

from ensemble.meter.energy_allocator import EnergyShare
from ensemble.meter.origin import Origin, from_ticks, weakest
from ensemble.meter.usage_records import Owner, PowerInterval

#: In the order in which they are shown.
ROLES = (
    *("startup", "train", "prepare", "batch", "feed", "verify", "profile", "base", "orchestrate", "ray"),
    *("idle", "other"),
)

#: What an owner has used on a node: ticks and their origin, of CPU time, of SM-seconds as the driver counts them,
#: of seconds in which its processes kept GPUs busy, and of energy by kind of part and `Method`.
Use = dict[tuple[str, str], tuple[int, Origin]]
CPU, SM, BUSY = ("cpu_s", ""), ("sm_s", ""), ("busy_s", "")


def add(use: Use, what: tuple[str, str], ticks: int, origin: Origin) -> None:
    before, before_origin = use.get(what, (0, origin))
    use[what] = (before + ticks, origin if origin == before_origin else weakest((before_origin, origin)))


def list_energies(use: Use) -> list[tuple[str, str, int, Origin]]:
    """The energy of a use: kind, method, ticks, origin."""
    return [(kind, method, ticks, origin) for (kind, method), (ticks, origin) in use.items() if method]


@dataclass
class NodeTotal:
    """What one node used while its meter ran.

    Attributes:
        energy, idle: ticks of all its energy, and of the idle energy in it; None where that was never known.
        origin: of the energy: measured, estimated or unavailable.
        metered_s: seconds that were metered.
        sources: names of the power sources.
    """

    node: str
    energy: int | None = None
    idle: int | None = None
    origin: Origin = "unavailable"
    metered_s: float = 0.0
    sources: list[str] = field(default_factory=list)

    @property
    def energy_j(self) -> float | None:
        return None if self.energy is None else from_ticks(self.energy)

    @property
    def idle_j(self) -> float | None:
        return None if self.idle is None else from_ticks(self.idle)

    @property
    def mean_watts(self) -> float | None:
        return self.energy_j / self.metered_s if self.energy_j is not None and self.metered_s > 0 else None

    def add(self, interval: PowerInterval) -> None:
        if not interval.parts:
            return
        origins = () if self.energy is None else (self.origin,)
        self.origin = weakest((*origins, *(part.origin for part in interval.parts)))
        self.energy = (self.energy or 0) + sum(part.ticks for part in interval.parts)
        if interval.idle is not None:
            self.idle = (self.idle or 0) + interval.idle
        self.metered_s += interval.length_s
        if interval.source not in self.sources:
            self.sources.append(interval.source)


@dataclass
class Sums:
    """What was used in some time.

    Attributes:
        uses: by owner and node.
        nodes: by name.
        metered: stretches of time in which some node was metered, in order, not overlapping: [start, end].
    """

    uses: dict[tuple[Owner, str], Use] = field(default_factory=dict)
    nodes: dict[str, NodeTotal] = field(default_factory=dict)
    metered: list[list[float]] = field(default_factory=list)

    def copy(self, member: str | None = None) -> Sums:
        """A copy to which more can be added, of all uses or of those of one member."""
        uses = {key: dict(use) for key, use in self.uses.items() if member is None or key[0].member == member}
        nodes = {name: dataclasses.replace(node, sources=list(node.sources)) for name, node in self.nodes.items()}
        return Sums(uses, nodes, [list(stretch) for stretch in self.metered])

    def use(self, owner: Owner, node: str) -> Use:
        return self.uses.setdefault((owner, node), {})

    def node(self, name: str) -> NodeTotal:
        return self.nodes.setdefault(name, NodeTotal(name))

    def add_interval(self, node: str, interval: PowerInterval, shares: Iterable[EnergyShare]) -> None:
        """Adds one interval of a node and the shares of its energy."""
        self.node(node).add(interval)
        if interval.parts:
            _add_stretch(self.metered, interval.start, interval.end)
        for owner, kind, method, ticks, origin in shares:
            add(self.use(owner, node), (kind, method), ticks, origin)
        for part in interval.parts:
            for owner, ticks in part.activity or ():
                add(self.use(owner, node), SM, ticks, part.origin)


def _add_stretch(stretches: list[list[float]], start: float, end: float) -> None:
    first = bisect_left(stretches, start, key=lambda stretch: stretch[1])
    last = bisect_right(stretches, end, key=lambda stretch: stretch[0])
    if first < last:
        start, end = min(start, stretches[first][0]), max(end, stretches[last - 1][1])
    stretches[first:last] = [[start, end]]
