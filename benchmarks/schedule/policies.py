"""Decides who starts when: the baselines, and the scheduler's own decisions as the controller combines them."""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from collections.abc import Mapping, Sequence

from benchmarks.schedule.simulate import Trainee
from ensemble.schedule import Capacity, HeldSlots, PlacementState, RatedMember, Start, allocate, decide_starts
from ensemble.schedule.flotilla import interpolate_rate
from ensemble.spec import Identity


class OneByOne:
    """Starts each member by itself, with a pipeline of its own, as soon as a place is free.

    Args:
        most: members at one time; None for as many as find a place.
    """

    def __init__(self, most: int | None = None) -> None:
        self._most = most

    def starts(self, board: PlacementState, now_s: float) -> Sequence[Start]:
        """See `Policy`."""
        free = len(board.waiting) if self._most is None else max(0, self._most - len(board.running))
        found = decide_starts(dataclasses.replace(board, waiting=board.waiting[:free], streaming=True))
        return [dataclasses.replace(start, cohort=None) for start in found]


class InCohorts:
    """Starts members with their declared workers, in cohorts of as many as fit.

    Args:
        shared: whether those of a cohort read one stream; else each prepares for itself.
    """

    def __init__(self, shared: bool = True) -> None:
        self._shared = shared

    def starts(self, board: PlacementState, now_s: float) -> Sequence[Start]:
        """See `Policy`."""
        found = decide_starts(board)
        return found if self._shared else [dataclasses.replace(start, cohort=None) for start in found]


class Flotillas:
    """Starts flotillas with widths chosen from measured rates, as the controller's planner does.

    Args:
        rated: each member's measured rates and declared epochs; when it converges is unknown.
        room: the places.
        samples: of an epoch.
        most: waiting members up to which a change among them makes a new plan.

    Attributes:
        plans_s: CPU-seconds of each planning, which other load does not change.
        starts_s: CPU-seconds of each decision about who starts, without planning.
    """

    def __init__(self, rated: Mapping[str, RatedMember], room: Capacity, samples: int, most: int = 1000) -> None:
        self._rated, self._room, self._samples, self._most = rated, room, samples, most
        self._planned_for: set[str] = set()
        self._flotillas: deque[list[Identity]] = deque()
        self._start_s: dict[str, float] = {}
        self._cohorts: dict[str, int] = {}
        self.plans_s: list[float] = []
        self.starts_s: list[float] = []

    def starts(self, board: PlacementState, now_s: float) -> Sequence[Start]:
        """See `Policy`."""
        start = time.thread_time()
        known = len(self._planned_for) == len(board.waiting) and not self._has_unplanned(board)
        if not known and (not self._planned_for or self._has_unplanned(board) or len(board.waiting) <= self._most):
            self._plan(board, now_s)
            self.plans_s.append(time.thread_time() - start)
        planned = time.thread_time()
        found = self._start_flotillas(board)
        for each in found:
            self._start_s[each.placement.member] = now_s
            self._cohorts[each.placement.member] = each.cohort or 0
        self.starts_s.append(time.thread_time() - planned)
        return found

    def _has_unplanned(self, board: PlacementState) -> bool:
        """Whether a waiting member is in no flotilla."""
        return any(identity.member not in self._planned_for for identity in board.waiting)

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
            whole_s = known.epochs * self._samples / interpolate_rate(known.samples_per_s, workers)
            left_s = max(0.0, self._start_s[placement.member] + whole_s - now_s)
            found.append(HeldSlots(number[placement.node], workers, left_s, self._cohorts[placement.member]))
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


def rated_members(trainees: Sequence[Trainee]) -> dict[str, RatedMember]:
    """The members as a scheduler that has measured their rates knows them."""
    return {
        one.identity.member: RatedMember(
            member=one.identity.member, samples_per_s=one.samples_per_s, epochs=one.identity.epochs
        )
        for one in trainees
    }
