"""Part simulated: a hundred unequal members as FLEET had, and ten thousand, on a virtual clock.

Three policies on the same members, nodes and preparation (Guan, Mokadam, Shen, Lim and Patton, MLSys 2020):

- *default*: each member alone on the next free device, with a pipeline of its own;
- *equal widths*: members of one worker in cohorts that share a stream, at the pace of the slowest;
- *ours*: widths and flotillas by `ensemble.schedule.flotilla`, placed by `ensemble.schedule.place`.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from benchmarks.schedule import members
from benchmarks.schedule.policies import Flotillas, InCohorts, OneByOne, rated_members
from benchmarks.schedule.simulate import Policy, Preparation, Simulated, Trainee, simulate
from ensemble.bench.results import Report, Spread
from ensemble.schedule import Capacity, Node

_PAPER_DEFAULT, _PAPER_EQUAL = (1.12, 1.92), (1.23, 1.97)
DEFAULT, EQUAL, OURS = "default", "equal widths", "ours"
#: FLEET's machine, SummitDev: nodes with four P100 and twenty POWER8 cores.
DEVICES, CORES = 4, 20
LARGE_DEVICES, LARGE_CORES = 8, 40


def spread(values: Sequence[float]) -> Spread:
    """Median, least and most."""
    return Spread(statistics.median(values), min(values), max(values))


@dataclass(frozen=True, kw_only=True)
class FleetRow:
    """One fleet over its seeds.

    Attributes:
        members, nodes, devices, cores: how many; devices and cores of each node.
        prep_ms: core-milliseconds to prepare a sample.  streams: most at one time, of ours.  seeds: drawn.
        over_default, over_equal: their makespan over ours, by seed.
        default_h, equal_h, ours_h: makespans in hours, medians.
        default_busy, equal_busy, ours_busy: share of all device-time in which members trained, medians.
        plan_s: the longest planning of ours, CPU-seconds.  react_ms: the median, react_worst_ms the longest
            decision about who starts after a member's end, CPU-milliseconds.
    """

    members: int
    nodes: int
    devices: int
    cores: int
    prep_ms: float
    streams: int
    seeds: int
    over_default: Spread
    over_equal: Spread
    default_h: float
    equal_h: float
    ours_h: float
    default_busy: float
    equal_busy: float
    ours_busy: float
    plan_s: float
    react_ms: float
    react_worst_ms: float


@dataclass(frozen=True, kw_only=True)
class Fleet:
    """Nodes, members and preparation."""

    members: int
    nodes: int
    devices: int
    cores: int
    prep_ms: float
    streams: int

    def cluster(self) -> list[Node]:
        """The nodes."""
        gpus = ("gpu",) * self.devices
        return [Node(f"node-{n}", float(self.cores), gpus, 512.0, f"node-{n}") for n in range(self.nodes)]

    def preparation(self) -> Preparation:
        """Feeders have the cores of their nodes, a member's own pipeline those of its device."""
        own = self.cores // self.devices
        return Preparation(cpu_s=self.prep_ms / 1000, workers=self.cores, alone=own, spread=True)

    def room(self) -> Capacity:
        """The places that the scheduler plans with."""
        limit = self.nodes * self.cores / self.prep_ms * 1000 if self.prep_ms else float("inf")
        slots = (self.devices,) * self.nodes
        return Capacity(slots=slots, widest=self.devices, streams=self.streams, prep_samples_per_s=limit)


def study(fleets: Sequence[Fleet], seeds: int, report: Report) -> list[FleetRow]:
    """Simulate every fleet over so many seeds."""
    return [_simulate_fleet(fleet, seeds, report) for fleet in fleets]


def _simulate_fleet(fleet: Fleet, seeds: int, report: Report) -> FleetRow:
    found: dict[str, list[Simulated]] = {DEFAULT: [], EQUAL: [], OURS: []}
    plans, reactions = list[float](), list[float]()
    for seed in range(seeds):
        trainees = members.draw_members(seed, fleet.members, fleet.devices)
        ours = Flotillas(rated_members(trainees), fleet.room(), members.SAMPLES)
        policies: dict[str, Policy] = {DEFAULT: OneByOne(), EQUAL: InCohorts(), OURS: ours}
        for name, policy in policies.items():
            start = time.perf_counter()
            found[name].append(_simulate_policy(fleet, trainees, policy))
            if fleet.members > 1000:
                report(f"{fleet.members} members, {name}: simulated in {time.perf_counter() - start:.0f} s")
        plans += ours.plans_s
        reactions += ours.starts_s[1:]
    base = found[OURS]
    over = {
        name: spread([a.makespan_s / b.makespan_s for a, b in zip(found[name], base, strict=True)])
        for name in (DEFAULT, EQUAL)
    }
    report(f"{fleet.members} members, {fleet.prep_ms:g} ms a sample, {fleet.streams} streams: {over[DEFAULT]}")
    hours = {name: statistics.median(one.makespan_s for one in runs) / 3600 for name, runs in found.items()}
    slots = fleet.nodes * fleet.devices
    busy = {name: statistics.median(r.busy_s / slots / r.makespan_s for r in runs) for name, runs in found.items()}
    return FleetRow(
        **dataclasses.asdict(fleet),
        seeds=seeds,
        over_default=over[DEFAULT],
        over_equal=over[EQUAL],
        default_h=hours[DEFAULT],
        equal_h=hours[EQUAL],
        ours_h=hours[OURS],
        default_busy=busy[DEFAULT],
        equal_busy=busy[EQUAL],
        ours_busy=busy[OURS],
        plan_s=max(plans),
        react_ms=1000 * statistics.median(reactions or [0.0]),
        react_worst_ms=1000 * max(reactions, default=0.0),
    )


def _simulate_policy(fleet: Fleet, trainees: Sequence[Trainee], policy: Policy) -> Simulated:
    return simulate(
        trainees, fleet.cluster(), policy, fleet.preparation(), samples=members.SAMPLES, devices="cuda"
    )


def findings(rows: Sequence[FleetRow]) -> Iterator[str]:
    """Speed-ups beside the paper's, and whether planning is quick."""
    for row in rows:
        what = f"{row.members} members on {row.nodes * row.devices} devices, {row.prep_ms:g} ms a sample"
        yield (
            f"{what}, {row.streams} streams: {row.over_default} x over default (FLEET "
            f"{_PAPER_DEFAULT[0]} to {_PAPER_DEFAULT[1]}), {row.over_equal} x over equal widths (FLEET "
            f"{_PAPER_EQUAL[0]} to {_PAPER_EQUAL[1]}); planned in {row.plan_s:.2g} s at most"
        )
