"""Computes when each flotilla starts and each member ends: the cost model of flotilla plans.

A flotilla starts when all its members find their slots and a stream is free, and never overtakes an earlier one;
its pace is that of its slowest member that still trains. `FluidModel` estimates the rest of a run, with its cores.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ensemble.schedule.flotilla.model import (
    Capacity,
    Cohort,
    CoreBudget,
    HeldSlots,
    Problem,
    RatedMember,
    make_problem,
)


@dataclass(frozen=True)
class Timeline:
    """Start of each flotilla, end of each member (by number), in the problem's unit of time."""

    starts: list[float]
    ends: list[float]
    makespan: float


class TimelineBuilder:
    """Computes timelines of plans for one problem."""

    def __init__(self, problem: Problem) -> None:
        self._times: list[list[float]] = problem.times.tolist()
        self._epochs: list[int] = problem.epochs.tolist()
        self._slots = problem.capacity.slots
        self._streams = problem.capacity.streams
        self._busy = problem.busy
        self._widest = max(self._slots)

    def build(self, flotillas: Sequence[Sequence[int]], widths: Sequence[int]) -> Timeline:
        """Compute the timeline of a plan.

        Args:
            flotillas: the numbers of the members, in the order of their starts.
            widths: by number of the member.

        Returns:
            The timeline; its makespan is infinite where a flotilla does not fit on the empty nodes.
        """
        free = list(self._slots)
        for held in self._busy:
            free[held.node] -= held.workers
        total, streams, time = sum(free), self._streams, 0.0
        by_free = _index_by_free(free, self._widest)
        last: dict[int, float] = {}
        for held in self._busy:
            if held.cohort is not None:
                last[held.cohort] = max(held.until_s, last.get(held.cohort, 0.0))
        streams -= len(last)
        ties = itertools.count()  # so that the queue never compares places
        releases: list[tuple[float, int, list[tuple[int, int]], int]] = [
            (held.until_s, next(ties), [(held.node, held.workers)], 0) for held in self._busy
        ]
        releases += [(until, next(ties), [], 1) for until in last.values()]
        heapq.heapify(releases)
        starts, ends, makespan = [], [0.0] * len(self._epochs), max((b.until_s for b in self._busy), default=0.0)
        for flotilla in flotillas:
            need = sum([widths[i] for i in flotilla])
            while True:
                found = None
                if need <= total and streams > 0:
                    found = _place_best_fit(by_free, free, sorted(flotilla, key=lambda i: -widths[i]), widths)
                if found is not None:
                    break
                if not releases:
                    return Timeline([], [], math.inf)
                time = releases[0][0]
                while releases and releases[0][0] <= time:
                    _, _, places, stream = heapq.heappop(releases)
                    streams += stream
                    for node, workers in places:
                        _change_free(by_free, free, node, workers)
                        total += workers
            starts.append(time)
            total -= need
            streams -= 1
            end = time
            for members, length in self.segment_ends(flotilla, widths):
                end = time + length
                for i in members:
                    ends[i] = end
                heapq.heappush(releases, (end, next(ties), [found[i] for i in members], 0))
            heapq.heappush(releases, (end, next(ties), [], 1))
            makespan = max(makespan, end)
        return Timeline(starts, ends, makespan)

    def estimate_makespan(self, flotillas: Sequence[Sequence[int]], widths: Sequence[int]) -> float:
        """A quick lower bound of the makespan of these flotillas, which ignores nodes and order."""
        area = streams = longest = 0.0
        for flotilla in flotillas:
            length = 0.0
            for members, length in self.segment_ends(flotilla, widths):
                area += length * sum([widths[i] for i in members])
            streams += length
            longest = max(longest, length)
        return max(area / sum(self._slots), streams / self._streams, longest)

    def segment_ends(self, flotilla: Sequence[int], widths: Sequence[int]) -> list[tuple[list[int], float]]:
        """Members that end together, and their time from the start, in the order of their ends."""
        times, epochs = self._times, self._epochs
        by_epochs: dict[int, list[int]] = {}
        for i in flotilla:
            by_epochs.setdefault(epochs[i], []).append(i)
        pace, segments = 0.0, []
        for last in sorted(by_epochs, reverse=True):
            pace = max(pace, max([times[i][widths[i]] for i in by_epochs[last]]))
            segments.append((last, pace))
        out, length, done = [], 0.0, 0
        for last, pace in reversed(segments):
            length += (last - done) * pace
            done = last
            out.append((by_epochs[last], length))
        return out


def _index_by_free(free: list[int], widest: int) -> list[dict[int, None]]:
    """Nodes by their number of free slots; dicts serve as ordered sets, so that results are deterministic.

    Nodes with more held slots than they offer now count as full.
    """
    out: list[dict[int, None]] = [{} for _ in range(widest + 1)]
    for node, slots in enumerate(free):
        out[max(slots, 0)][node] = None
    return out


def _change_free(by_free: list[dict[int, None]], free: list[int], node: int, by: int) -> None:
    del by_free[max(free[node], 0)][node]
    free[node] += by
    by_free[max(free[node], 0)][node] = None


def _place_best_fit(
    by_free: list[dict[int, None]], free: list[int], members: Sequence[int], widths: Sequence[int]
) -> dict[int, tuple[int, int]] | None:
    """Place all members, the widest first: member -> (node, slots); None, and no change, if one has no place."""
    places: dict[int, tuple[int, int]] = {}
    if len(free) == 1:  # a single pool: if all fit together, each does
        need = sum([widths[i] for i in members])
        if need > free[0]:
            return None
        _change_free(by_free, free, 0, -need)
        return {i: (0, widths[i]) for i in members}
    for i in members:
        slots = width = widths[i]
        while slots < len(by_free) and not by_free[slots]:
            slots += 1
        if slots == len(by_free):
            for node, workers in places.values():
                _change_free(by_free, free, node, workers)
            return None
        node = next(iter(by_free[slots]))
        _change_free(by_free, free, node, -width)
        places[i] = (node, width)
    return places


Groups = Sequence[Sequence[str]]


class FluidModel:
    """Estimates the rest of a run.

    Args:
        members: all members that run, start now or wait, with their widths.
        capacity, samples: see `allocate`; all nodes are one pool.
        cores: None where preparation takes no cores from members.
    """

    def __init__(
        self, members: Sequence[RatedMember], capacity: Capacity, samples: int, cores: CoreBudget | None = None
    ) -> None:
        heap = dataclasses.replace(capacity, slots=(sum(capacity.slots),), widest=capacity.most_workers)
        free = [RatedMember(member=m.member, samples_per_s=m.samples_per_s, epochs=m.epochs) for m in members]
        self._problem = make_problem(free, heap, samples)  # without fixed widths, because members may be widened
        self._number = {name: i for i, name in enumerate(self._problem.names)}
        # A member that is wider than a node's slots shares GPUs among its ranks.
        self._widths = {member.member: min(member.workers or 1, capacity.most_workers) for member in members}
        self._samples, self._cores = samples, cores

    @property
    def unit_s(self) -> float:
        return self._problem.unit_s

    def epoch_s(self, member: str, workers: int | None = None) -> float:
        """Seconds of an epoch of a member that waits only for its feeder."""
        width = self._widths[member] if workers is None else workers
        return float(self._problem.times[self._number[member], width]) * self.unit_s

    def estimate_run_s(
        self,
        groups: Groups,
        waiting: Groups = (),
        *,
        alone: Sequence[str] = (),
        extra: Mapping[str, int] | None = None,
        workers: Mapping[str, int] | None = None,
        late_s: float = 0.0,
    ) -> float:
        """Seconds until all members have ended.

        Args:
            groups: running members, by stream.
            waiting: flotillas that follow, in this order.
            alone: running members that prepare their own batches.
            extra: member -> epochs that it stays in its group's stream beyond its own.
            workers: member -> its changed width.
            late_s: seconds that a change of its width costs a member.
        """
        widths = [self._widths[name] for name in self._problem.names]
        times, epochs = self._problem.times, self._problem.epochs
        for name, more in (extra or {}).items():
            epochs = epochs.copy()
            epochs[self._number[name]] += more
        for name, wider in (workers or {}).items():
            i = self._number[name]
            widths[i] = wider
            times = times.copy()
            times[i, wider] += late_s / self.unit_s / int(epochs[i])
        busy = []
        for name in alone:
            i = self._number[name]
            busy.append(HeldSlots(0, widths[i], float(times[i, widths[i]] * epochs[i]), None))
        streams = max(self._problem.capacity.streams, len(groups))
        capacity = dataclasses.replace(self._problem.capacity, streams=streams)
        problem = dataclasses.replace(
            self._problem, times=times, epochs=epochs, busy=tuple(busy), capacity=capacity
        )
        order = [[self._number[name] for name in group] for group in (*groups, *waiting)]
        makespan = TimelineBuilder(problem).build(order, widths).makespan * self.unit_s
        return makespan * self._slowdown([*groups, *([name] for name in alone)], widths)

    def _slowdown(self, groups: Groups, widths: Sequence[int]) -> float:
        """The factor by which a lack of cores lengthens the run."""
        if self._cores is None:
            return 1.0
        wanted = 0.0
        for group in groups:
            times = {name: self.epoch_s(name, widths[self._number[name]]) for name in group}
            pace = max(times.values())
            wanted += self._samples / pace / self._cores.prepared_per_s
            wanted += sum(self._cores.members.get(name, 0.0) * time / pace for name, time in times.items())
        return max(1.0, wanted / self._cores.total)


def estimate_ends(cohorts: Sequence[Cohort], capacity: Capacity, samples: int) -> dict[str, float]:
    """Seconds until each running member ends, at the pace of its cohort."""
    out: dict[str, float] = {}
    for cohort in cohorts:
        problem = make_problem(cohort.members, capacity, samples)
        by_name = {member.member: member.workers or 1 for member in cohort.members}
        widths = [by_name[name] for name in problem.names]
        for members, length in TimelineBuilder(problem).segment_ends(range(len(widths)), widths):
            out |= {problem.names[i]: length * problem.unit_s for i in members}
    return out
