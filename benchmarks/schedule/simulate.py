"""Simulates a cluster on a virtual clock, with the controller's own decisions.

A discrete-event simulator in which rates are constant between two events. A *stream* is the batches of one
cohort, or of one member that prepares for itself. Its members are at the same position, so its rate is that of the
slowest of them, and at most that of its preparation. Preparation and the members' computing on processors share
the cores of their node as the kernel's scheduler shares them (`benchmarks.schedule.cores`). A member's worker
holds a device, or a share of the cores, from its placement to its end.

A `Policy` decides who starts when, where, how wide and in which cohort. It calls the pure functions of
`ensemble.schedule` and knows no more than the controller does: not when a member will have converged (`epochs`).
The simulation leaves out the network, the ring (a member is never ahead of another), failures, and combining.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from benchmarks.schedule.cores import Flow, SharedCores, Use
from ensemble.schedule.flotilla.model import interpolate_rate
from ensemble.schedule.needs import Node, resolve_devices
from ensemble.schedule.packing import FreeCapacity
from ensemble.schedule.placement import ClusterSnapshot, Start
from ensemble.spec import Identity

_SLACK = 1e-6  # of a sample: what sums of fractions may be off


@dataclass(frozen=True, kw_only=True)
class Trainee:
    """A member with its real behaviour, of which the scheduler knows a part.

    Attributes:
        identity: as declared; its `epochs` are the most it may take.
        samples_per_s: by width, where batches are ready and cores are free.
        epochs: after which it ends, because it has converged or is pruned.
        cpu_s: core-seconds of a sample on its node, of all its workers; contained in `samples_per_s`.
        startup_s: core-seconds before its first batch.
    """

    identity: Identity
    samples_per_s: Mapping[int, float]
    epochs: int
    cpu_s: float = 0.0
    startup_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Preparation:
    """The cost of preparing batches; the feeders of a stream each prepare a part for all nodes.

    Attributes:
        cpu_s: core-seconds of a sample.
        workers: preparation processes of a feeder, on each node.
        alone: preparation processes of a member that prepares for itself, for each of its workers; 0: its own
            process prepares, before each step.
        startup_s: core-seconds before a feeder's first batch.
    """

    cpu_s: float = 0.0
    workers: int = 1
    alone: int = 0
    startup_s: float = 0.0


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
    """A member that has a place; `own_rate` with batches ready and cores free, `end` in samples of its stream."""

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


@dataclass(eq=False, kw_only=True)
class _Stream(Flow):
    """Members at one position; `done` counts samples of the stream.

    Attributes:
        coming: members that start up; all wait for them before the first batch.
        joining: members that wait for the next epoch.
        reading: members that train.
    """

    shared: bool
    flowing: bool = False
    feeders: int = 0
    coming: dict[str, _Running] = field(default_factory=dict)
    joining: list[_Running] = field(default_factory=list)
    reading: dict[str, _Running] = field(default_factory=dict)


@dataclass(eq=False, kw_only=True)
class _StartUp(Flow):
    """Core-seconds before a member's first batch, or a feeder's."""

    stream: _Stream
    of: _Running | None


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
        self._waiting = {each.identity.member: each for each in trainees}
        self._cores = SharedCores([node.cpus for node in nodes])
        self._free = FreeCapacity(self._nodes, devices)
        self._number = {node.name: number for number, node in enumerate(nodes)}
        self._running: dict[str, _Running] = {}
        self._streams: dict[int | str, _Stream] = {}
        self._due: list[tuple[float, int, Flow]] = []
        self._events: Iterator[int] = itertools.count()
        self._now = 0.0
        self._cohort = 0
        self._found = Simulated()

    def run(self) -> Simulated:
        freed = True
        while self._waiting or self._running:
            if freed and self._waiting:
                self._decide()
            self._update_rates()
            freed = self._advance()
        return self._found

    # -- deciding -----------------------------------------------------------------------------------------------

    def _decide(self) -> None:
        cluster = ClusterSnapshot(
            nodes=self._nodes,
            devices=self._devices,
            waiting=[each.identity for each in self._waiting.values()],
            running=[each.start.placement for each in self._running.values()],
            next_cohort=self._cohort,
            free=self._free,
        )
        starts = list(self._policy(cluster, self._now))
        if not starts and not self._running:
            raise ValueError(f"{len(self._waiting)} members wait, nothing runs and nothing is started")
        for stream in dict.fromkeys(self._start(start) for start in starts):
            self._stream_ready(stream)
        self._cohort = max([self._cohort, *(start.cohort + 1 for start in starts if start.cohort is not None)])

    def _start(self, start: Start) -> _Stream:
        member, workers = start.placement.member, start.placement.identity.workers
        trainee = self._waiting.pop(member, None)
        if trainee is None:
            raise ValueError(f"{member} is started, but does not wait")
        running = _Running(trainee, start, self._now, interpolate_rate(trainee.samples_per_s, workers))
        self._running[member] = running
        self._free.reserve(start.placement)
        key = member if start.cohort is None else start.cohort
        stream = self._streams.setdefault(key, _Stream(shared=start.cohort is not None))
        node = self._number[start.placement.node]
        if node not in stream.uses:
            stream.uses[node] = Use(node)  # set by `_set_uses`
            if stream.shared and self._prep.startup_s > 0:
                stream.feeders += 1
                self._start_up(node, self._prep.startup_s, stream, None)
        if trainee.startup_s > 0:
            stream.coming[member] = running
            self._start_up(node, trainee.startup_s, stream, running)
        else:
            stream.joining.append(running)
        return stream

    def _start_up(self, node: int, core_s: float, stream: _Stream, of: _Running | None) -> None:
        flow = _StartUp(stream=stream, of=of, cap=1.0, target=core_s, at=self._now)
        flow.uses[node] = Use(node)
        flow.uses[node].add_processes(1.0, 1)
        self._cores.add(flow)
        self._cores.mark(flow)

    # -- the clock ----------------------------------------------------------------------------------------------

    def _update_rates(self) -> None:
        """Set the rates from now on, and the time at which each flow reaches its target."""
        for flow in self._cores.update_rates(self._progress):
            flow.event = -1
            left = flow.target - flow.done
            if left > 0 and (flow.rate <= 0 or math.isinf(left)):
                continue
            flow.event = next(self._events)
            at = self._now + (left / flow.rate if left > 0 else 0.0)
            heapq.heappush(self._due, (at, flow.event, flow))

    def _progress(self, flow: Flow) -> None:
        """Advance a flow to the present at its former rate."""
        gone, flow.at = (self._now - flow.at) * flow.rate, self._now
        if gone <= 0:
            return
        flow.done = min(flow.done + gone, flow.target)
        self._found.cpu_s += gone * sum(use.cost for use in flow.uses.values())
        if isinstance(flow, _Stream):
            self._found.prepared += gone
            self._found.busy_s += gone * sum(each.workers / each.own_rate for each in flow.reading.values())

    def _advance(self) -> bool:
        """Handle the next event and all others at that time; returns whether a place became free.

        Raises:
            ValueError: there is no event, because a stream has no rate.
        """
        freed = happened = False
        while self._due:
            at, event, flow = self._due[0]
            if event == flow.event and happened and at > self._now * (1 + 1e-12):
                break
            heapq.heappop(self._due)
            if event == flow.event:
                happened, self._now = True, max(self._now, at)
                self._progress(flow)
                flow.done = flow.target
                freed |= self._handle_target(flow)
        if not happened:
            raise ValueError("nothing moves any more: a member or a feeder has no rate")
        return freed

    def _handle_target(self, flow: Flow) -> bool:
        if isinstance(flow, _StartUp):
            self._cores.remove(flow)
            if flow.of is None:
                flow.stream.feeders -= 1
            else:
                flow.stream.joining.append(flow.stream.coming.pop(flow.of.member))
            self._stream_ready(flow.stream)
            return False
        assert isinstance(flow, _Stream)
        over = [running for running in flow.reading.values() if flow.done >= running.end - _SLACK]
        for running in over:
            del flow.reading[running.member], self._running[running.member]
            self._free.release(running.start.placement)
            self._found.spans[running.member] = (running.start_s, self._now)
            self._found.workers[running.member] = running.workers
        self._update_stream(flow)
        return bool(over)

    # -- streams ------------------------------------------------------------------------------------------------

    def _stream_ready(self, stream: _Stream) -> None:
        """Start a stream when all its members and feeders have started; update it afterwards."""
        if stream.flowing or not (stream.coming or stream.feeders):
            stream.flowing = True
            self._update_stream(stream)

    def _update_stream(self, stream: _Stream) -> None:
        """Update a stream whose members have changed: who joins, its limit, its uses, its next target."""
        self._progress(stream)
        boundary = float(math.ceil(stream.done / self._samples - _SLACK) * self._samples)
        if stream.joining and (not stream.reading or abs(stream.done - boundary) < _SLACK):
            stream.done = boundary
            for running in stream.joining:
                running.end = boundary + running.trainee.epochs * self._samples
                stream.reading[running.member] = running
            stream.joining.clear()
        self._cores.remove(stream)
        if not stream.reading and not stream.coming:
            return
        self._set_uses(stream)
        stream.cap, stream.target = 0.0, math.inf
        if stream.reading:
            stream.cap = min(self._member_limit(stream, running) for running in stream.reading.values())
            stream.target = min(running.end for running in stream.reading.values())
        if stream.joining:
            stream.target = min(stream.target, boundary)
        self._cores.add(stream)
        self._cores.mark(stream)

    def _member_limit(self, stream: _Stream, running: _Running) -> float:
        """A member's rate where cores are free."""
        if not stream.shared and self._prep.alone == 0:
            return 1.0 / (1.0 / running.own_rate + self._prep.cpu_s / running.workers)
        return running.own_rate

    def _set_uses(self, stream: _Stream) -> None:
        """Core-seconds of each node for a sample of the stream."""
        prep, here = self._prep, [*stream.reading.values(), *stream.joining, *stream.coming.values()]
        nodes = dict.fromkeys(self._number[each.start.placement.node] for each in here)
        uses = {node: Use(node) for node in nodes | dict.fromkeys(stream.uses)}  # feeders stay until it ends
        if stream.shared:
            for use in uses.values():
                use.add_processes(prep.cpu_s / len(uses), prep.workers)
        for running in stream.reading.values():
            use, own_s = uses[self._number[running.start.placement.node]], running.trainee.cpu_s
            if not stream.shared and prep.alone == 0:
                own_s += prep.cpu_s
            elif not stream.shared:
                use.add_processes(prep.cpu_s, prep.alone * running.workers)
            # a member waits while its device computes; the rest of a step is its own process's
            wait_s = max(0.0, 1.0 / running.own_rate - running.trainee.cpu_s / running.workers)
            use.add_processes(own_s, running.workers, wait_s)
        stream.uses = uses
