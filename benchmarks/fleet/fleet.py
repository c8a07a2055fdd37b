"""Part simulated: a hundred unequal members on a virtual clock, as FLEET had (Guan et al., MLSys 2020).

*Default* is each member alone with a pipeline of its own; *equal widths* are members of one worker in cohorts.
FLEET's members are not public: these are drawn from 500 of chosen, not measured, rates and epochs.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np

from benchmarks.fleet.policies import Flotillas, in_cohorts, one_by_one
from benchmarks.fleet.simulate import Policy, Preparation, Simulated, Trainee, simulate
from benchmarks.results import Report, Spread
from ensemble.schedule.flotilla.model import Capacity
from ensemble.schedule.needs import Node
from ensemble.spec import Identity

DEFAULT, EQUAL, OURS = "default", "equal widths", "ours"
SAMPLES = 30_000  # of an epoch
_MOST_EPOCHS = 90
_CPUS, _MEMORY_GB = 0.01, 1.0  # of a member beside its device: they limit no node


@dataclass(frozen=True, kw_only=True)
class Fleet:
    """Members, nodes and preparation.

    Attributes:
        members, nodes, devices, cores: how many; devices and cores of each node. Those of FLEET's machine,
            SummitDev, are four P100 and twenty POWER8 cores.
        prep_ms: core-milliseconds to prepare a sample.
        streams: most at one time, of ours.
    """

    members: int
    nodes: int
    devices: int = 4
    cores: int = 20
    prep_ms: float = 0.0
    streams: int = 2

    def simulate(self, trainees: Sequence[Trainee], policy: Policy) -> Simulated:
        """Feeders have the cores of their nodes, a member's own pipeline those of its device."""
        gpus = ("gpu",) * self.devices
        nodes = [Node(f"node-{n}", float(self.cores), gpus, 512.0, f"node-{n}") for n in range(self.nodes)]
        preparation = Preparation(cpu_s=self.prep_ms / 1000, workers=self.cores, alone=self.cores // self.devices)
        return simulate(trainees, nodes, policy, preparation, samples=SAMPLES, devices="cuda")

    def capacity(self) -> Capacity:
        """The places that the scheduler plans with."""
        limit = self.nodes * self.cores / self.prep_ms * 1000 if self.prep_ms else float("inf")
        slots = (self.devices,) * self.nodes
        return Capacity(slots=slots, widest=self.devices, streams=self.streams, prep_samples_per_s=limit)


@dataclass(frozen=True, kw_only=True)
class FleetRow(Fleet):
    """One fleet over its seeds.

    Attributes:
        seeds: drawn.
        over_default, over_equal: their makespan over ours, by seed.
        default_h, equal_h, ours_h: makespans in hours, medians.
        plan_s: the longest planning of ours, CPU-seconds.  react_ms: the median, react_worst_ms the longest
            decision about who starts after a member's end, CPU-milliseconds.
    """

    seeds: int
    over_default: Spread
    over_equal: Spread
    default_h: float
    equal_h: float
    ours_h: float
    plan_s: float
    react_ms: float
    react_worst_ms: float


def list_fleets(devices: int, costs: Sequence[float]) -> list[Fleet]:
    """As many members as devices: each cost of preparation (ms) with two streams, the first with one and four."""
    varied = [(cost, 2) for cost in costs] + [(costs[0], 1), (costs[0], 4)]
    sizes = {"members": devices, "nodes": -(-devices // 4)}
    return [Fleet(**sizes, prep_ms=cost, streams=streams) for cost, streams in varied]


@functools.cache
def draw_table() -> tuple[tuple[float, float, int], ...]:
    """500 unequal members: each one's rate on one device in samples a second, log-uniform; the part of its step
    that more workers do not shorten (Amdahl's law), uniform; the epochs after which it has converged, uniform.
    """
    rng = np.random.default_rng(2020)
    rates = np.exp(rng.uniform(math.log(20.0), math.log(180.0), 500)).round(2)
    serial, epochs = rng.uniform(0.02, 0.10, 500).round(4), rng.integers(30, _MOST_EPOCHS + 1, 500)
    return tuple(zip(rates.tolist(), serial.tolist(), epochs.tolist(), strict=True))


def draw_members(seed: int, count: int, widest: int) -> list[Trainee]:
    """Members drawn from the table with replacement; their rates are known up to `widest` workers."""
    chosen = np.random.default_rng(seed).integers(0, len(draw_table()), count)
    return [_make_trainee(number, draw_table()[row], widest) for number, row in enumerate(chosen)]


def _make_trainee(number: int, row: tuple[float, float, int], widest: int) -> Trainee:
    samples_per_s, serial, epochs = row
    identity = Identity(
        member=f"member-{number}",
        number=number,
        params={},
        seed=number,
        workers=1,
        threads=1,
        precision="fp32",
        epochs=_MOST_EPOCHS,  # all that the scheduler knows
        batch_size=64,
        cpus_per_worker=_CPUS,
        gpus_per_worker=1.0,
        memory_gb=_MEMORY_GB,
        auto=["workers"],
    )
    widths = [1 << power for power in range(widest.bit_length())]
    by_width = {width: samples_per_s / (serial + (1 - serial) / width) for width in widths}
    return Trainee(identity=identity, samples_per_s=by_width, epochs=epochs)


def measure(fleet: Fleet, seeds: int, report: Report) -> FleetRow:
    """Simulate a fleet with members of so many seeds."""
    simulated: dict[str, list[Simulated]] = {DEFAULT: [], EQUAL: [], OURS: []}
    plans, reactions = list[float](), list[float]()
    for seed in range(seeds):
        trainees = draw_members(seed, fleet.members, fleet.devices)
        ours = Flotillas(trainees, fleet.capacity(), SAMPLES)
        policies: dict[str, Policy] = {DEFAULT: one_by_one, EQUAL: in_cohorts, OURS: ours.starts}
        for name, policy in policies.items():
            simulated[name].append(fleet.simulate(trainees, policy))
        plans += ours.plans_s
        reactions += ours.starts_s[1:]

    def over(name: str) -> Spread:
        ratios = [a.makespan_s / b.makespan_s for a, b in zip(simulated[name], simulated[OURS], strict=True)]
        return Spread(statistics.median(ratios), min(ratios), max(ratios))

    hours = {name: statistics.median(run.makespan_s for run in runs) / 3600 for name, runs in simulated.items()}
    report(f"{fleet.members} members, {fleet.prep_ms:g} ms a sample, {fleet.streams} streams: {over(DEFAULT)}")
    return FleetRow(
        **asdict(fleet),
        seeds=seeds,
        over_default=over(DEFAULT),
        over_equal=over(EQUAL),
        default_h=hours[DEFAULT],
        equal_h=hours[EQUAL],
        ours_h=hours[OURS],
        plan_s=max(plans),
        react_ms=1000 * statistics.median(reactions or [0.0]),
        react_worst_ms=1000 * max(reactions, default=0.0),
    )
