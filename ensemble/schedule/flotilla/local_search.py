"""Improves a plan by simulated annealing over widths, flotillas and their order, then simplifies it.

The search is seeded and limited by a count of evaluations, not by time, so equal inputs give equal plans on any
machine.
"""

from __future__ import annotations

import math
import random

from ensemble.schedule.flotilla.initial import FlotillaPlan
from ensemble.schedule.flotilla.model import Problem
from ensemble.schedule.flotilla.timeline import TimelineBuilder

# Temperatures at the start and the end of a round, as fractions of the best makespan: a plan that is worse by the
# temperature is accepted with probability 1/e.
_HOT, _COLD = 0.3, 0.003
_FEW = 8  # members up to which a round starts at _HOT; with n members it starts at _HOT * (_FEW / n) ** 2
_MEAN = 0.05  # weight of the mean end of the members beside the makespan
_SAME = 1 + 1e-9  # factor up to which makespans count as equal, because floating-point sums differ by their order

_FlotillaLists = list[list[int]]
# by member: widths with the time of an epoch, each faster than the last
_WidthOptions = list[list[tuple[int, float]]]
_Neighbor = tuple[_FlotillaLists, list[int]] | None  # flotillas and widths; None where the move is impossible


def anneal(
    problem: Problem, clock: TimelineBuilder, plan: FlotillaPlan, evaluations: int, rounds: int = 16
) -> FlotillaPlan:
    """Search for a better plan.

    Args:
        evaluations: of timelines, in all rounds together; repeated plans are not computed again.
        rounds: restarts from the best plan so far.

    Returns:
        The best plan found, at least as good as `plan`.
    """
    search = _Search(problem, clock)
    for seed in range(rounds):
        plan = search.anneal_once(plan, seed, evaluations // rounds)
    return plan


class _Search:
    def __init__(self, problem: Problem, clock: TimelineBuilder) -> None:
        self._options, self._clock = _list_width_options(problem), clock
        self._known: dict[tuple[object, ...], tuple[float, float]] = {}
        self._slots = problem.slots
        self._rng = random.Random()
        self._moves = (
            self._change_width,
            self._change_width,
            self._change_pace,
            self._move_member,
            self._move_member,
            self._merge_flotillas,
        )

    def _cost(self, flotillas: _FlotillaLists, widths: list[int]) -> tuple[float, float]:
        """The makespan, and the makespan plus a small share of the mean end, which breaks ties."""
        key = (*map(frozenset, flotillas), *widths)
        if key not in self._known:
            timeline = self._clock.build(flotillas, widths)
            self._known[key] = (timeline.makespan, timeline.makespan + _MEAN * sum(timeline.ends) / len(widths))
        return self._known[key]

    def anneal_once(self, plan: FlotillaPlan, seed: int, evaluations: int) -> FlotillaPlan:
        """One round of annealing, from the highest to the lowest temperature."""
        rng = self._rng
        rng.seed(seed)
        flotillas, widths = [list(flotilla) for flotilla in plan.flotillas], list(plan.widths)
        best, best_plan = self._cost(flotillas, widths), plan
        cost = best[1]
        hot = _HOT * min(1.0, (_FEW / len(widths)) ** 2)  # with many members each move changes little
        for step in range(evaluations):
            moved = rng.choice(self._moves)(flotillas, widths)
            if moved is None or any(sum([moved[1][i] for i in flotilla]) > self._slots for flotilla in moved[0]):
                continue
            value = self._cost(*moved)
            temperature = best[0] * hot * (_COLD / _HOT) ** (step / evaluations)
            worse = value[1] - cost
            if worse <= 0 or (math.isfinite(worse) and rng.random() < math.exp(-worse / temperature)):
                (flotillas, widths), cost = moved, value[1]
                if value < best:
                    best, best_plan = value, FlotillaPlan(tuple(map(tuple, flotillas)), tuple(widths))
        return best_plan

    def _match_pace(self, flotilla: list[int], widths: list[int]) -> list[int]:
        """The least widths at which a flotilla's members reach the pace of one of them at a random width."""
        leader = self._rng.choice(flotilla)
        pace = self._rng.choice(self._options[leader])[1]
        out = list(widths)
        for i in flotilla:
            out[i] = next((w for w, time in self._options[i] if time <= pace), self._options[i][-1][0])
        return out

    def _change_width(self, flotillas: _FlotillaLists, widths: list[int]) -> _Neighbor:
        i = self._rng.randrange(len(widths))
        others = [w for w, _ in self._options[i] if w != widths[i]]
        if not others:
            return None
        return flotillas, [*widths[:i], self._rng.choice(others), *widths[i + 1 :]]

    def _move_member(self, flotillas: _FlotillaLists, widths: list[int]) -> _Neighbor:
        """Move a member to another flotilla or to a new one; half of the time also change that flotilla's pace."""
        i = self._rng.randrange(len(widths))
        others = [[j for j in flotilla if j != i] for flotilla in flotillas]
        others = [flotilla for flotilla in others if flotilla]
        to = self._rng.randrange(2 * len(others) + 1)
        if to < len(others):
            joined = others[to] = [*others[to], i]
        else:
            joined = [i]
            others.insert(to - len(others), joined)
        return others, widths if self._rng.random() < 0.5 else self._match_pace(joined, widths)

    def _merge_flotillas(self, flotillas: _FlotillaLists, widths: list[int]) -> _Neighbor:
        if len(flotillas) < 2:
            return None
        a, b = sorted(self._rng.sample(range(len(flotillas)), 2))
        out = [list(flotilla) for flotilla in flotillas]
        out[a] = out[a] + out.pop(b)
        return out, self._match_pace(out[a], widths)

    def _change_pace(self, flotillas: _FlotillaLists, widths: list[int]) -> _Neighbor:
        return flotillas, self._match_pace(self._rng.choice(flotillas), widths)


def simplify(problem: Problem, clock: TimelineBuilder, plan: FlotillaPlan) -> FlotillaPlan:
    """Make members narrower and merge flotillas as long as the makespan does not grow."""
    options = _list_width_options(problem)
    flotillas, widths = [list(flotilla) for flotilla in plan.flotillas], list(plan.widths)
    timeline = clock.build(flotillas, widths)
    limit, starts = timeline.makespan * _SAME, timeline.starts
    for i in range(len(widths)):
        for width, _ in options[i]:
            if width >= widths[i]:
                break
            narrower = [*widths[:i], width, *widths[i + 1 :]]
            if clock.build(flotillas, narrower).makespan <= limit:
                widths = narrower
                break
    # flotillas of similar pace first, because sharing a stream costs them least
    pace = [max(problem.times[i, widths[i]] for i in flotilla) for flotilla in flotillas]
    order = sorted(range(len(flotillas)), key=lambda k: (starts[k], -pace[k], k))
    flotillas, starts = [flotillas[k] for k in order], [starts[k] for k in order]
    at = 0
    while at + 1 < len(flotillas):
        merged = [*flotillas[:at], flotillas[at] + flotillas[at + 1], *flotillas[at + 2 :]]
        if starts[at] == starts[at + 1] and clock.build(merged, widths).makespan <= limit:
            flotillas = merged
            del starts[at + 1]
        else:
            at += 1
    best = FlotillaPlan(tuple(tuple(sorted(flotilla)) for flotilla in flotillas), tuple(widths))
    return best if clock.build(best.flotillas, best.widths).makespan <= limit else plan


def _list_width_options(problem: Problem) -> _WidthOptions:
    times = problem.times.tolist()
    return [[(w, row[w]) for w in range(1, len(row)) if row[w] < row[w - 1]] for row in times]
