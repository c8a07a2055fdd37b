"""Decides who starts when: the baselines, and the scheduler's own decisions as the controller combines them."""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from collections.abc import Sequence

from benchmarks.fleet.simulate import Trainee
from ensemble.schedule.flotilla.allocate import allocate
from ensemble.schedule.flotilla.model import Capacity, HeldSlots, RatedMember, interpolate_rate
from ensemble.schedule.placement import ClusterSnapshot, Start, decide_starts
from ensemble.spec import Identity


def one_by_one(cluster: ClusterSnapshot, now_s: float) -> Sequence[Start]:
    """Starts each member by itself, with a pipeline of its own, as soon as a place is free; see `Policy`."""
    starts = decide_starts(dataclasses.replace(cluster, joins_late=True))
    return [dataclasses.replace(start, cohort=None) for start in starts]


def in_cohorts(cluster: ClusterSnapshot, now_s: float) -> Sequence[Start]:
    """Starts members with their declared workers, in cohorts of as many as fit; see `Policy`."""
    return decide_starts(cluster)


class Flotillas:
    """Starts flotillas with widths chosen from measured rates, as the controller's planner does.

    Args:
        trainees: of which their rates and declared epochs are known, and not when they converge.
        room: the places.
        samples: of an epoch.

    Attributes:
        plans_s: CPU-seconds of each planning, which other load does not change.
        starts_s: CPU-seconds of each decision about who starts, without planning.
    """

    def __init__(self, trainees: Sequence[Trainee], room: Capacity, samples: int) -> None:
        self._room, self._samples = room, samples
        self._rated = {
            own.member: RatedMember(member=own.member, samples_per_s=trainee.samples_per_s, epochs=own.epochs)
            for own, trainee in ((trainee.identity, trainee) for trainee in trainees)
        }
        self._planned_for: set[str] = set()
        self._flotillas: deque[list[Identity]] = deque()
        self._started: dict[str, tuple[float, int]] = {}  # when, and in which cohort
        self.plans_s: list[float] = []
        self.starts_s: list[float] = []

    def starts(self, cluster: ClusterSnapshot, now_s: float) -> Sequence[Start]:
        """See `Policy`."""
        start = time.thread_time()
        waiting = {identity.member for identity in cluster.waiting}
        if waiting != self._planned_for:
            self._plan(cluster, now_s)
            self.plans_s.append(time.thread_time() - start)
        planned = time.thread_time()
        starts = self._start_flotillas(cluster)
        self._started |= {start.placement.member: (now_s, start.cohort or 0) for start in starts}
        self.starts_s.append(time.thread_time() - planned)
        return starts

    def _plan(self, cluster: ClusterSnapshot, now_s: float) -> None:
        waiting = {identity.member: identity for identity in cluster.waiting}
        self._planned_for = set(waiting)
        rated = [self._rated[member] for member in waiting]
        plan = allocate(rated, self._room, self._samples, self._running_members(cluster, now_s))
        self._flotillas = deque(
            [dataclasses.replace(waiting[member], workers=plan.workers[member]) for member in flotilla.members]
            for flotilla in plan.flotillas
        )

    def _running_members(self, cluster: ClusterSnapshot, now_s: float) -> list[HeldSlots]:
        """The running members, each with its remaining time if it takes all epochs at its own rate."""
        number = {node.name: n for n, node in enumerate(cluster.nodes)}
        held = []
        for placement in cluster.running:
            trainee, workers = self._rated[placement.member], placement.identity.workers
            start_s, cohort = self._started[placement.member]
            whole_s = trainee.epochs * self._samples / interpolate_rate(trainee.samples_per_s, workers)
            held.append(HeldSlots(number[placement.node], workers, max(0.0, start_s + whole_s - now_s), cohort))
        return held

    def _start_flotillas(self, cluster: ClusterSnapshot) -> list[Start]:
        """Place whole flotillas in order, each as a cohort, until one does not fit."""
        starts: list[Start] = []
        free, cohort = cluster.free_capacity(), cluster.next_cohort
        while self._flotillas:
            flotilla = self._flotillas[0]
            some = decide_starts(dataclasses.replace(cluster, waiting=flotilla, next_cohort=cohort, free=free))
            if len(some) < len(flotilla):
                break
            self._flotillas.popleft()
            free.reserve(*(start.placement for start in some))
            starts += some
            cohort += 1
        free.release(*(start.placement for start in starts))
        return starts
