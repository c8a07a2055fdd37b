"""Simulates a cluster on a virtual clock, with the controller's own decisions.

A *stream* is the batches of one cohort, or of one member that prepares for itself. It is as fast as its slowest
member, and at most as its preparation, whose processes share the cores of their nodes evenly.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from ensemble.schedule.flotilla.model import interpolate_rate
from ensemble.schedule.needs import Node, resolve_devices
from ensemble.schedule.packing import FreeCapacity
from ensemble.schedule.placement import ClusterSnapshot, Start
from ensemble.spec import Identity

_SLACK = 1e-6  # of a sample: what sums of fractions may be off
_TOLERANCE = 1e-9
_MAX_SWEEPS = 50  # over all nodes


@dataclass(frozen=True, kw_only=True)
class Trainee:
    """A member with its real behaviour, of which the scheduler knows a part.

    Attributes:
        identity: as declared; its `epochs` are the most it may take.
        samples_per_s: by width, where batches are ready and cores are free.
        epochs: after which it ends, because it has converged or is pruned.
    """

    identity: Identity
    samples_per_s: Mapping[int, float]
    epochs: int


@dataclass(frozen=True, kw_only=True)
class Preparation:
    """The cost of preparing batches; the feeders of a stream each prepare a part for all nodes.

    Attributes:
        cpu_s: core-seconds of a sample.
        workers: preparation processes of a feeder, on each node.
        alone: preparation processes of a member that prepares for itself, for each of its workers.
    """

    cpu_s: float = 0.0
    workers: int = 1
    alone: int = 1


#: Decides who starts now, at a time in seconds, as the controller does. A start without a cohort prepares for
#: itself; new cohorts are numbered from `cluster.next_cohort`. `cluster.free` is left unchanged.
Policy = Callable[[ClusterSnapshot, float], Sequence[Start]]


@dataclass
class Simulated:
    """The result of a simulation.

    Attributes:
        spans: (placed, ended) of each member, seconds.
        workers: of each member.
        busy_s: worker-seconds of training at the rates of members alone, without waits.
        cpu_s: core-seconds used.
        prepared: samples prepared, wherever.
    """

    spans: dict[str, tuple[float, float]] = field(default_factory=dict)
    workers: dict[str, int] = field(default_factory=dict)
    busy_s: float = 0.0
    cpu_s: float = 0.0
    prepared: float = 0.0

    @property
    def makespan_s(self) -> float:
        """From the first start to the last stop."""
        return max(end for _, end in self.spans.values()) - min(start for start, _ in self.spans.values())


@dataclass(eq=False)
class _Running:
    """A member that has a place; `own_rate` with batches ready, `end` in samples of its stream."""

    trainee: Trainee
    start: Start
    start_s: float
    own_rate: float
    end: float = math.inf

    @property
    def member(self) -> str:
        return self.start.placement.member

    @property
    def workers(self) -> int:
        return self.start.placement.identity.workers


@dataclass(eq=False)
class _Stream:
    """Members at one position.

    Attributes:
        shared: whether feeders prepare for all, on each of their nodes.
        nodes: on which it is prepared: feeders stay until it ends.
        joining: members that wait for the next epoch.  reading: members that train.
        done, rate: samples, and samples a second.
    """

    shared: bool
    nodes: set[int] = field(default_factory=set)
    joining: list[_Running] = field(default_factory=list)
    reading: list[_Running] = field(default_factory=list)
    done: float = 0.0
    rate: float = 0.0

    def epoch_end(self, samples: int) -> float:
        """The end of the epoch that it is in, where it is at an end that one."""
        return math.ceil(self.done / samples - _SLACK) * float(samples)

    def target(self, samples: int) -> float:
        """Samples at which a member ends, or others may join."""
        ends = [member.end for member in self.reading]
        return min([*ends, self.epoch_end(samples)] if self.joining else ends)


def simulate(
    trainees: Sequence[Trainee],
    nodes: Sequence[Node],
    policy: Policy,
    preparation: Preparation,
    *,
    samples: int,
    devices: Literal["auto", "cpu", "cuda"] = "auto",
) -> Simulated:
    """Train all members to their end on a virtual clock.

    Args:
        samples: of an epoch.
        devices: as in an `Ensemble`.

    Raises:
        ValueError: the policy starts nothing while members wait and nothing runs, or starts a member twice.
    """
    chosen = resolve_devices(devices, has_gpus=any(node.gpus for node in nodes))
    return _Simulation(trainees, nodes, policy, preparation, samples, chosen).run()


class _Simulation:
    def __init__(
        self,
        trainees: Sequence[Trainee],
        nodes: Sequence[Node],
        policy: Policy,
        preparation: Preparation,
        samples: int,
        devices: str,
    ) -> None:
        self._nodes, self._policy, self._devices = list(nodes), policy, devices
        self._prep, self._samples = preparation, samples
        self._waiting = {trainee.identity.member: trainee for trainee in trainees}
        self._free = FreeCapacity(self._nodes, devices)
        self._number = {node.name: number for number, node in enumerate(nodes)}
        self._streams: dict[int | str, _Stream] = {}
        self._now = 0.0
        self._cohort = 0
        self._result = Simulated()

    def run(self) -> Simulated:
        freed = True
        while self._waiting or self._streams:
            if freed and self._waiting:
                self._decide()
            self._join()
            self._set_rates()
            freed = self._advance()
        return self._result

    def _decide(self) -> None:
        running = [member for stream in self._streams.values() for member in (*stream.reading, *stream.joining)]
        cluster = ClusterSnapshot(
            nodes=self._nodes,
            devices=self._devices,
            waiting=[trainee.identity for trainee in self._waiting.values()],
            running=[member.start.placement for member in running],
            next_cohort=self._cohort,
            free=self._free,
        )
        starts = list(self._policy(cluster, self._now))
        if not starts and not running:
            raise ValueError(f"{len(self._waiting)} members wait, nothing runs and nothing is started")
        for start in starts:
            self._start(start)
        self._cohort = max([self._cohort, *(start.cohort + 1 for start in starts if start.cohort is not None)])

    def _start(self, start: Start) -> None:
        placement = start.placement
        trainee = self._waiting.pop(placement.member, None)
        if trainee is None:
            raise ValueError(f"{placement.member} is started, but does not wait")
        own_rate = interpolate_rate(trainee.samples_per_s, placement.identity.workers)
        self._free.reserve(placement)
        key = placement.member if start.cohort is None else start.cohort
        stream = self._streams.setdefault(key, _Stream(shared=start.cohort is not None))
        stream.nodes.add(self._number[placement.node])
        stream.joining.append(_Running(trainee, start, self._now, own_rate))

    def _join(self) -> None:
        """Let members join at the end of an epoch."""
        for stream in self._streams.values():
            boundary = stream.epoch_end(self._samples)
            if stream.joining and (not stream.reading or abs(stream.done - boundary) < _SLACK):
                stream.done = boundary
                for member in stream.joining:
                    member.end = boundary + member.trainee.epochs * self._samples
                stream.reading += stream.joining
                stream.joining.clear()

    # -- rates --------------------------------------------------------------------------------------------------

    def _set_rates(self) -> None:
        """Max-min fair: the processes of a node that has too few cores have equal shares of them."""
        streams = list(self._streams.values())
        limits = {stream: min(member.own_rate for member in stream.reading) for stream in streams}
        on_node: dict[int, list[_Stream]] = {}
        for stream in streams if self._prep.cpu_s > 0 else ():
            for node in stream.nodes:
                on_node.setdefault(node, []).append(stream)
        allowed = {(stream, node): math.inf for node, here in on_node.items() for stream in here}
        for _ in range(_MAX_SWEEPS):
            before = dict(allowed)
            for node, here in on_node.items():
                most = [
                    min([limits[stream], *(allowed[stream, other] for other in stream.nodes if other != node)])
                    for stream in here
                ]
                whole = [self._processes(stream) / self._cost(stream) for stream in here]
                wants = list(zip(whole, map(self._cost, here), most, strict=True))
                level = share_cores(self._nodes[node].cpus, wants)
                allowed |= {(stream, node): level * rate for stream, rate in zip(here, whole, strict=True)}
            if all(math.isclose(allowed[key], rate, rel_tol=_TOLERANCE) for key, rate in before.items()):
                break
        for stream in streams:
            own = [allowed[stream, node] for node in stream.nodes if (stream, node) in allowed]
            stream.rate = min([limits[stream], *own])

    def _processes(self, stream: _Stream) -> int:
        """Preparation processes of a stream on each of its nodes."""
        return self._prep.workers if stream.shared else self._prep.alone * stream.reading[0].workers

    def _cost(self, stream: _Stream) -> float:
        """Core-seconds of each of its nodes for a sample."""
        return self._prep.cpu_s / len(stream.nodes)

    # -- the clock ----------------------------------------------------------------------------------------------

    def _advance(self) -> bool:
        """Go on to the next event; returns whether a place became free."""
        remaining = {key: stream.target(self._samples) - stream.done for key, stream in self._streams.items()}
        step_s = min(max(0.0, remaining[key]) / stream.rate for key, stream in self._streams.items())
        self._now += step_s
        freed = False
        for key, stream in list(self._streams.items()):
            gone = min(step_s * stream.rate, max(0.0, remaining[key]))
            stream.done += gone
            self._result.prepared += gone
            self._result.cpu_s += gone * self._prep.cpu_s
            self._result.busy_s += gone * sum(member.workers / member.own_rate for member in stream.reading)
            for member in [member for member in stream.reading if stream.done >= member.end - _SLACK]:
                stream.reading.remove(member)
                self._free.release(member.start.placement)
                self._result.spans[member.member] = (member.start_s, self._now)
                self._result.workers[member.member] = member.workers
                freed = True
            if not stream.reading and not stream.joining:
                del self._streams[key]
        return freed


def share_cores(cores: float, wants: Sequence[tuple[float, float, float]]) -> float:
    """The share of a core for each process at which all cores are used; 1 where there are enough.

    Args:
        wants: each stream's rate with whole cores, its core-seconds of a sample, and its other limit.
    """
    if sum(cost * min(most, whole) for whole, cost, most in wants) <= cores:
        return 1.0
    used, slope = 0.0, sum(whole * cost for whole, cost, _ in wants)
    for whole, cost, most in sorted(wants, key=lambda want: want[2] / want[0]):
        if used + slope * most / whole >= cores:
            break
        used, slope = used + most * cost, slope - whole * cost
    return (cores - used) / slope
