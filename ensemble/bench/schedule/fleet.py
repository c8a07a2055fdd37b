"""Part simulated: a hundred unequal members as FLEET had, and ten thousand, on a virtual clock.

Three ways, on the same members, nodes and preparation (Guan, Mokadam, Shen, Lim and Patton, MLSys 2020):

- *default*: each member alone on the next free device, with a pipeline of its own;
- *equal widths*: members of one worker in cohorts that share a stream, at the pace of the slowest;
- *ours*: widths and flotillas by `ensemble.schedule.flotilla`, placed by `ensemble.schedule.place`.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ensemble.bench.schedule import members as drawn
from ensemble.bench.schedule.policies import Flotillas, InCohorts, OneByOne, rated
from ensemble.bench.schedule.simulate import Policy, Preparation, Simulated, Trainee, simulate
from ensemble.schedule import Capacity, Node

PAPER_DEFAULT, PAPER_EQUAL = (1.12, 1.92), (1.23, 1.97)
DEFAULT, EQUAL, OURS = "default", "equal widths", "ours"
#: FLEET's machine, SummitDev: nodes with four P100 and twenty POWER8 cores.
DEVICES, CORES = 4, 20
LARGE_DEVICES, LARGE_CORES = 8, 40


@dataclass(frozen=True)
class Spread:
    """A figure over seeds."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.low:.2f} to {self.high:.2f})"


def spread(values: Sequence[float]) -> Spread:
    """Median, least and most."""
    return Spread(statistics.median(values), min(values), max(values))


@dataclass(frozen=True, kw_only=True)
class Row:
    """What one set-up came to over its seeds.

    Attributes:
        members, nodes, devices, cores: how many; devices and cores of each node.
        prep_ms: core-milliseconds to prepare a sample.  streams: most at one time, of ours.  seeds: drawn.
        over_default, over_equal: their makespan over ours, by seed.
        default_h, equal_h, ours_h: makespans in hours, medians.
        default_busy, equal_busy, ours_busy: share of all device-time in which members trained, medians.
        plan_s: the longest planning of ours, CPU-seconds.  react_ms: the median, react_worst_ms the most that it
            took to say who starts after a member's end, CPU-milliseconds.
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
class SetUp:
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
        """Feeders take the cores of their nodes, a pipeline of one's own those of one's device."""
        own = self.cores // self.devices
        return Preparation(cpu_s=self.prep_ms / 1000, workers=self.cores, alone=own, spread=True)

    def room(self) -> Capacity:
        """What the scheduler plans with."""
        limit = self.nodes * self.cores / self.prep_ms * 1000 if self.prep_ms else float("inf")
        slots = (self.devices,) * self.nodes
        return Capacity(slots=slots, widest=self.devices, streams=self.streams, prep_samples_per_s=limit)


def study(set_ups: Sequence[SetUp], seeds: int, say: Callable[[str], None] = lambda _: None) -> list[Row]:
    """Every set-up over so many seeds."""
    return [_row(set_up, seeds, say) for set_up in set_ups]


def _row(set_up: SetUp, seeds: int, say: Callable[[str], None]) -> Row:
    found: dict[str, list[Simulated]] = {DEFAULT: [], EQUAL: [], OURS: []}
    plans, reactions = list[float](), list[float]()
    for seed in range(seeds):
        trainees = drawn.members(seed, set_up.members, set_up.devices)
        ours = Flotillas(rated(trainees), set_up.room(), drawn.SAMPLES)
        ways: dict[str, Policy] = {DEFAULT: OneByOne(), EQUAL: InCohorts(), OURS: ours}
        for name, policy in ways.items():
            began = time.perf_counter()
            found[name].append(_simulated(set_up, trainees, policy))
            if set_up.members > 1000:
                say(f"{set_up.members} members, {name}: simulated in {time.perf_counter() - began:.0f} s")
        plans += ours.plans_s
        reactions += ours.starts_s[1:]
    base = found[OURS]
    over = {
        name: spread([a.makespan_s / b.makespan_s for a, b in zip(found[name], base, strict=True)])
        for name in (DEFAULT, EQUAL)
    }
    say(f"{set_up.members} members, {set_up.prep_ms:g} ms a sample, {set_up.streams} streams: {over[DEFAULT]}")
    hours = {name: statistics.median(one.makespan_s for one in runs) / 3600 for name, runs in found.items()}
    slots = set_up.nodes * set_up.devices
    busy = {name: statistics.median(r.busy_s / slots / r.makespan_s for r in runs) for name, runs in found.items()}
    return Row(
        **dataclasses.asdict(set_up),
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


def _simulated(set_up: SetUp, trainees: Sequence[Trainee], policy: Policy) -> Simulated:
    return simulate(
        trainees, set_up.cluster(), policy, set_up.preparation(), samples=drawn.SAMPLES, devices="cuda"
    )


def as_json(row: Row) -> dict[str, Any]:
    """A row for programs: each spread as NAME, NAME_low and NAME_high."""
    flat: dict[str, Any] = {}
    for name, value in vars(row).items():
        if isinstance(value, Spread):
            flat |= {name: value.median, f"{name}_low": value.low, f"{name}_high": value.high}
        else:
            flat[name] = value
    return flat


def table(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Rows for people."""
    return [
        {name: str(value) if isinstance(value, Spread) else value for name, value in vars(row).items()}
        for row in rows
    ]


def findings(rows: Sequence[Row]) -> Iterator[str]:
    """Speed-ups beside the paper's, and whether planning is quick."""
    for row in rows:
        what = f"{row.members} members on {row.nodes * row.devices} devices, {row.prep_ms:g} ms a sample"
        yield (
            f"{what}, {row.streams} streams: {row.over_default} x over default (FLEET "
            f"{PAPER_DEFAULT[0]} to {PAPER_DEFAULT[1]}), {row.over_equal} x over equal widths (FLEET "
            f"{PAPER_EQUAL[0]} to {PAPER_EQUAL[1]}); planned in {row.plan_s:.2g} s at most"
        )
