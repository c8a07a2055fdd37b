"""Decides who starts when: the baselines, and the scheduler's own decisions as the controller combines them."""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from collections.abc import Sequence

from benchmarks.schedule.simulate import Trainee
from ensemble.schedule import Capacity, HeldSlots, PlacementState, RatedMember, Start, allocate, decide_starts
from ensemble.schedule.flotilla import interpolate_rate
from ensemble.spec import Identity

_MOST_REPLANNED = 1000  # waiting members up to which a change among them makes a new plan


def one_by_one(board: PlacementState, now_s: float) -> Sequence[Start]:
    """Starts each member by itself, with a pipeline of its own, as soon as a place is free; see `Policy`."""
    found = decide_starts(dataclasses.replace(board, streaming=True))
    return [dataclasses.replace(start, cohort=None) for start in found]


def in_cohorts(board: PlacementState, now_s: float) -> Sequence[Start]:
    """Starts members with their declared workers, in cohorts of as many as fit; see `Policy`."""
    return decide_starts(board)


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

    def starts(self, board: PlacementState, now_s: float) -> Sequence[Start]:
        """See `Policy`."""
        start = time.thread_time()
        waiting = {identity.member for identity in board.waiting}
        if waiting - self._planned_for or (waiting != self._planned_for and len(waiting) <= _MOST_REPLANNED):
            self._plan(board, now_s)
            self.plans_s.append(time.thread_time() - start)
        planned = time.thread_time()
        found = self._start_flotillas(board)
        self._started |= {each.placement.member: (now_s, each.cohort or 0) for each in found}
        self.starts_s.append(time.thread_time() - planned)
        return found

    def _plan(self, board: PlacementState, now_s: float) -> None:
        waiting = {identity.member: identity for identity in board.waiting}
        self._planned_for = set(waiting)
        rated = [self._rated[member] for member in waiting]
        plan = allocate(rated, self._room, self._samples, self._running_members(board, now_s))
        self._flotillas = deque(
            [dataclasses.replace(waiting[member], workers=plan.workers[member]) for member in flotilla.members]
            for flotilla in plan.flotillas
        )

    def _running_members(self, board: PlacementState, now_s: float) -> list[HeldSlots]:
        """The running members, each with its remaining time if it takes all epochs at its own rate."""
        number = {node.name: n for n, node in enumerate(board.nodes)}
        found = []
        for placement in board.running:
            known, workers = self._rated[placement.member], placement.identity.workers
            start_s, cohort = self._started[placement.member]
            whole_s = known.epochs * self._samples / interpolate_rate(known.samples_per_s, workers)
            found.append(HeldSlots(number[placement.node], workers, max(0.0, start_s + whole_s - now_s), cohort))
        return found

    def _start_flotillas(self, board: PlacementState) -> list[Start]:
        """Place whole flotillas in order, each as a cohort, until one does not fit."""
        found: list[Start] = []
        free, cohort = board.free_capacity(), board.next_cohort
        while self._flotillas:
            flotilla = self._flotillas[0]
            some = decide_starts(dataclasses.replace(board, waiting=flotilla, next_cohort=cohort, free=free))
            if len(some) < len(flotilla):
                break
            self._flotillas.popleft()
            free.reserve(*(start.placement for start in some))
            found += some
            cohort += 1
        free.release(*(start.placement for start in found))
        return found
