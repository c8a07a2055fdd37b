"""Who starts when: the baselines, and the scheduler's own decisions as the controller puts them together."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from itertools import groupby

from ensemble.schedule import Board, Busy, RatedMember, Room, Start, allocate, place
from ensemble.schedule.flotilla import rate
from ensemble.schedule.simulate import Trainee
from ensemble.spec import Identity


class OneByOne:
    """Each member by itself, with a pipeline of its own, as soon as there is a place for it: the usual way.

    Args:
        most: members at one time; None for as many as find a place.
    """

    def __init__(self, most: int | None = None) -> None:
        self._most = most

    def starts(self, board: Board, now_s: float) -> Sequence[Start]:
        """See `Policy`."""
        free = len(board.waiting) if self._most is None else max(0, self._most - len(board.running))
        found = place(dataclasses.replace(board, waiting=board.waiting[:free], streaming=True))
        return [dataclasses.replace(start, cohort=None) for start in found]


class InCohorts:
    """Members as wide as they are declared, in cohorts of as many as there is room for.

    Args:
        shared: whether those of a cohort read one stream; else each prepares for itself.
    """

    def __init__(self, shared: bool = True) -> None:
        self._shared = shared

    def starts(self, board: Board, now_s: float) -> Sequence[Start]:
        """See `Policy`."""
        found = place(board)
        return found if self._shared else [dataclasses.replace(start, cohort=None) for start in found]


class Flotillas:
    """Widths and flotillas from measured rates; made anew whenever others wait than before.

    Args:
        rated: what was measured of each member, and its epochs as declared: how soon it converges is not known.
        room: where they may run.
        samples: of an epoch.

    Attributes:
        plans_s: how long each planning took.
        starts_s: how long it took to say who starts, planning aside.
    """

    def __init__(self, rated: Mapping[str, RatedMember], room: Room, samples: int) -> None:
        self._rated, self._room, self._samples = rated, room, samples
        self._planned_for: frozenset[str] = frozenset()
        self._turn: dict[str, int] = {}
        self._workers: Mapping[str, int] = {}
        self._began: dict[str, float] = {}
        self._cohorts: dict[str, int] = {}
        self.plans_s: list[float] = []
        self.starts_s: list[float] = []

    def starts(self, board: Board, now_s: float) -> Sequence[Start]:
        """See `Policy`."""
        began = time.perf_counter()
        self._plan(board, now_s)
        planned = time.perf_counter()
        found = self._starts(board)
        for start in found:
            self._began[start.placement.member] = now_s
            self._cohorts[start.placement.member] = start.cohort or 0
        self.plans_s.append(planned - began)
        self.starts_s.append(time.perf_counter() - planned)
        return found

    def _plan(self, board: Board, now_s: float) -> None:
        wait = frozenset(identity.member for identity in board.waiting)
        if wait == self._planned_for:
            return
        self._planned_for = wait
        rated = [self._rated[identity.member] for identity in board.waiting]
        plan = allocate(rated, self._room, self._samples, self._busy(board, now_s))
        self._turn = {member: n for n, flotilla in enumerate(plan.flotillas) for member in flotilla.members}
        self._workers = plan.workers

    def _busy(self, board: Board, now_s: float) -> list[Busy]:
        """What runs, and for how long at most if it takes all of its epochs at its own rate."""
        number = {node.name: n for n, node in enumerate(board.nodes)}
        found = []
        for placement in board.running:
            known, workers = self._rated[placement.member], placement.identity.workers
            whole_s = known.epochs * self._samples / rate(known.samples_per_s, workers)
            left_s = max(0.0, self._began[placement.member] + whole_s - now_s)
            found.append(Busy(number[placement.node], workers, left_s, self._cohorts[placement.member]))
        return found

    def _starts(self, board: Board) -> list[Start]:
        waiting = sorted(map(self._settled, board.waiting), key=lambda one: self._turn[one.member])
        found: list[Start] = []
        cohort = board.next_cohort
        for _, members in groupby(waiting, key=lambda one: self._turn[one.member]):
            flotilla = list(members)
            running = [*board.running, *(start.placement for start in found)]
            some = place(dataclasses.replace(board, waiting=flotilla, running=running, next_cohort=cohort))
            if len(some) < len(flotilla):
                break
            found += some
            cohort += 1
        return found

    def _settled(self, identity: Identity) -> Identity:
        return dataclasses.replace(identity, workers=self._workers[identity.member])


def rated(trainees: Sequence[Trainee]) -> dict[str, RatedMember]:
    """What a scheduler that has measured their rates knows of members."""
    return {
        one.identity.member: RatedMember(
            member=one.identity.member, samples_per_s=one.samples_per_s, epochs=one.identity.epochs
        )
        for one in trainees
    }
