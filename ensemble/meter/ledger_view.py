"""Keeps what a run has used while its log grows, event by event: running and finished runs by the same code.

An interval is **settled** once no process that was at work in it has still to report: its shares are added to
sums and its details dropped. When that happens follows from the log alone, so a ledger is a function of the
events up to then.
"""

from __future__ import annotations

import dataclasses
import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from ensemble.events import Event, RunFinished, RunStarted, RunStopped, Usage
from ensemble.meter.energy_allocator import EnergyAllocator
from ensemble.meter.ledger import Ledger
from ensemble.meter.origin import from_ticks
from ensemble.meter.usage_parser import UsageParser
from ensemble.meter.usage_records import CpuUse, Owner, PowerInterval, Process
from ensemble.meter.usage_sums import BUSY, CPU, ROLES, Sums, add

#: How late a process reports what it has used, at most; members that hold a place may be later.
MARGIN_S = 60.0
#: Seconds of the log from one settlement to the next.
SETTLE_S = 10.0


@dataclass
class LedgerView:
    """What a run has used.

    Attributes:
        parser: records that are not settled, and counts.
        last_t: time of the last event.
        settle_t: when intervals are settled next.
        allocators: by node.
        settled: all CPU time, and the energy that is settled.
        last_seen: when the CPU time of each member at work was last reported.
        rays: ticks that Ray's processes used, which may become the run's own.
        power: the settled intervals by node; None: they are not kept.
    """

    parser: UsageParser = field(default_factory=UsageParser)
    last_t: float = float("-inf")
    settle_t: float = float("-inf")
    allocators: dict[str, EnergyAllocator] = field(default_factory=dict)
    settled: Sums = field(default_factory=Sums)
    last_seen: dict[str, float] = field(default_factory=dict)
    rays: dict[Process, int] = field(default_factory=dict)
    power: dict[str, list[PowerInterval]] | None = None

    def apply(self, event: Event) -> None:
        self.parser.apply(event)
        if isinstance(event, RunStarted):
            self.rays.clear()
        elif isinstance(event, Usage) and event.cpu_s is not None:
            self._add_cpu(event.node, self.parser.node(event.node).cpu[-1])
        self.last_t = max(self.last_t, event.t)
        if isinstance(event, RunStopped | RunFinished):
            self._settle(math.inf)  # all figures are logged before
        elif event.t >= self.settle_t:
            holds = self.parser.holds
            at_work = (max(self.last_seen.get(member, hold.start), hold.start) for member, hold in holds.items())
            self._settle(min([self.last_t, *at_work]) - MARGIN_S)

    def _add_cpu(self, node: str, used: CpuUse) -> None:
        owner, uses = used.span.owner, self.parser.node(node).cpu
        if owner.role == "ray":
            if any((*used.process, role) in self.parser.last_usage for role in ROLES if role != "ray"):
                uses.pop()  # it became another's, whose own account covers it from its first second
                return
            self.rays[used.process] = self.rays.get(used.process, 0) + used.span.ticks
        elif used.process in self.rays:
            # Its own account covers it from its first second. Energy that is settled stays with Ray.
            uses[:] = [use for use in uses if use.process != used.process or use.span.owner.role != "ray"]
            add(self.settled.use(Owner("ray"), node), CPU, -self.rays.pop(used.process), used.origin)
        add(self.settled.use(owner, node), CPU, used.span.ticks, used.origin)
        if owner.member is not None:
            self.last_seen[owner.member] = used.span.end

    def _settle(self, until: float) -> None:
        """Adds the intervals up to a time to the sums, and drops their details."""
        self.settle_t = self.last_t + SETTLE_S
        self.last_seen = {member: t for member, t in self.last_seen.items() if member in self.parser.holds}
        for name, node in self.parser.nodes.items():
            cut = bisect_right(node.power, until, key=lambda interval: interval.end)
            edge = until
            if cut:
                settled, edge = node.power[:cut], node.power[cut - 1].end
                self._add(self.settled, name, settled, self.allocators.setdefault(name, EnergyAllocator()))
                if self.power is not None:
                    self.power.setdefault(name, []).extend(settled)
                del node.power[:cut]
            if cut or not node.power:
                node.drop_until(edge)

    def _add(self, sums: Sums, name: str, intervals: Sequence[PowerInterval], allocator: EnergyAllocator) -> None:
        """Adds the first intervals of a node that are not settled to sums."""
        for interval, shares in zip(intervals, allocator.allocate(self.parser.node(name), intervals), strict=True):
            sums.add_interval(name, interval, shares)

    # -- figures --------------------------------------------------------------------------------------------------

    def read(self, member: str | None = None) -> Ledger:
        """The ledger up to now.

        Args:
            member: the one whose own figures matter, which is quicker: of others it has less than they used.
        """
        parser, sums = self.parser, self.settled.copy(member)
        self._add_open(sums)
        held, ranks = parser.count_held(self.last_t)
        for (owner, name), ticks in parser.gpu_busy.items():
            sums.use(owner, name)[BUSY] = (ticks, "measured")
        return Ledger(
            sums=sums,
            samples=dataclasses.replace(parser.samples, by_member=dict(parser.samples.by_member)),
            held_s={name: from_ticks(ticks) for name, ticks in held.items()},
            ranks=ranks,
            power={name: (*(self.power or {}).get(name, ()), *node.power) for name, node in parser.nodes.items()},
        )

    def sum_open(self) -> Sums:
        """The energy of the intervals that are not settled, as they would be shared out now."""
        sums = Sums()
        self._add_open(sums)
        return sums

    def _add_open(self, sums: Sums) -> None:
        for name, node in self.parser.nodes.items():
            sums.node(name)
            allocator = self.allocators.get(name, EnergyAllocator())
            self._add(sums, name, node.power, dataclasses.replace(allocator))

    def count_open_ray_cpu(self) -> int:
        """CPU ticks of Ray's processes all of whose use is after what is settled.

        A process that the run takes over is recognized by then: its CPU time is no longer Ray's.
        """
        open_ticks: dict[Process, int] = {}
        for node in self.parser.nodes.values():
            for used in node.cpu:
                if used.process in self.rays:
                    open_ticks[used.process] = open_ticks.get(used.process, 0) + used.span.ticks
        return sum(ticks for process, ticks in open_ticks.items() if ticks == self.rays[process])


def ledger(events: Iterable[Event]) -> Ledger:
    """The ledger of a run, from its events so far; types that say nothing of use are ignored."""
    view = LedgerView(power={})
    for event in events:
        view.apply(event)
    return view.read()
