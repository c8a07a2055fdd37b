"""Generates initial plans: divides members into flotillas and chooses their widths.

*In waves*: flotillas of similar pace run one after another; dynamic programming cuts the members, sorted by their
time with one worker, where the best paces are. *By length*: no member takes longer than a limit, the longest
first.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ensemble.schedule.flotilla.model import Problem

_CUTS = 32  # positions at which the order of many members may be cut
_PACES = 96  # paces that are tried at most
_LIMITS = np.array([1.0, 1.02, 1.05, 1.08, 1.12, 1.17, 1.25, 1.4, 1.7, 2.5, np.inf])

_Numbers = NDArray[np.int64]


@dataclass(frozen=True)
class FlotillaPlan:
    """Flotillas in order, as numbers of members, and the width of each member."""

    flotillas: tuple[tuple[int, ...], ...]
    widths: tuple[int, ...]


def generate_initial_plans(problem: Problem) -> Iterator[FlotillaPlan]:
    orders = _orders(problem)
    waves = _WavePlanner(problem)
    for parts in (1, 2, 4, 8, 16):
        if parts > problem.capacity.streams or (
            parts * problem.capacity.most_workers > problem.slots and parts > 1
        ):
            break
        for order in orders:
            yield waves.plan(order, problem.slots // parts)
    for limit in list_limits(problem):
        yield from plan_longest_first(problem, float(limit))


def plan_one_flotilla(problem: Problem) -> FlotillaPlan:
    """Plan one flotilla at its best pace; more where not all members fit at once."""
    widths = np.zeros(len(problem.names), np.int64)
    flotillas = _WavePlanner(problem).fit(np.arange(len(widths)), problem.slots, widths)
    return FlotillaPlan(tuple(tuple(flotilla.tolist()) for flotilla in flotillas), tuple(widths.tolist()))


def _orders(problem: Problem) -> list[_Numbers]:
    """Orders of the members: by epoch time; if their epochs differ, also by epochs and by total time."""
    by_time = np.arange(len(problem.names))
    if problem.epochs.min() == problem.epochs.max():
        return [by_time]
    whole = (problem.times * problem.epochs[:, None]).min(axis=1)
    return [by_time, np.lexsort((by_time, -problem.epochs)), np.lexsort((by_time, -whole))]


class _WavePlanner:
    """Plans waves; `_least[pace, member]` is the least width that reaches a pace, infinite where none does."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        paces = np.unique(problem.times[np.isfinite(problem.times)])
        if len(paces) > _PACES:
            # even in rank and even in ratio, the slowest kept: it is what a flotilla of all may need
            ranks = np.linspace(0, len(paces) - 1, _PACES // 2).round().astype(np.int64)
            ratios = np.searchsorted(paces, np.geomspace(paces[0], paces[-1], _PACES // 2)).clip(0, len(paces) - 1)
            paces = paces[np.unique(np.concatenate([ranks, ratios]))]
        self._paces = paces
        # times fall with the width, so the least width is one more than the number of widths that are too slow
        slow = np.stack([(problem.times[:, 1:] > pace).sum(axis=1) for pace in paces])
        self._least = np.where(slow < problem.times.shape[1] - 1, slow + 1.0, np.inf)

    def plan(self, order: _Numbers, slots: int) -> FlotillaPlan:
        """The best cut of `order` into flotillas of at most `slots`, if they run one after another."""
        cuts, previous_cut = self._cut(order, slots)
        bounds = [len(cuts) - 1]
        while bounds[-1]:
            bounds.append(int(previous_cut[bounds[-1]]))
        widths = np.zeros(len(order), np.int64)
        flotillas: list[_Numbers] = []
        for end, start in itertools.pairwise(bounds):
            flotillas += self.fit(order[cuts[start] : cuts[end]], slots, widths)
        whole = self._problem.epochs * self._problem.times[np.arange(len(order)), widths]
        flotillas.sort(key=lambda flotilla: -float(whole[flotilla].max()))
        return FlotillaPlan(tuple(tuple(flotilla.tolist()) for flotilla in flotillas), tuple(widths.tolist()))

    def _cut(self, order: _Numbers, slots: int) -> tuple[_Numbers, _Numbers]:
        """Positions of the cuts, and for each of them the best one before it."""
        count = len(order)
        cuts = np.unique(np.linspace(0, count, min(count, _CUTS) + 1).round().astype(np.int64))
        needs = np.zeros((len(self._paces), len(cuts)))
        needs[:, 1:] = np.add.reduceat(self._least[:, order], cuts[:-1], axis=1)
        needs = np.minimum(needs, 1e15).cumsum(axis=1)  # finite, so that differences are numbers
        epochs = self._problem.epochs[order]
        best, previous_cut = np.full(len(cuts), np.inf), np.zeros(len(cuts), np.int64)
        best[0] = 0.0
        for end in range(1, len(cuts)):
            feasible = needs[:, end, None] - needs[:, :end] <= slots  # [paces, starts]
            pace = np.where(feasible.any(axis=0), self._paces[feasible.argmax(axis=0)], np.inf)
            most = np.maximum.accumulate(epochs[: cuts[end]][::-1])[::-1][cuts[:end]]
            total = best[:end] + pace * most
            previous_cut[end] = total.argmin()
            if not np.isfinite(total[previous_cut[end]]):
                previous_cut[end] = end - 1  # too many members between two cuts: `fit` divides them
                total[end - 1] = best[end - 1] + self._paces[-1] * most[-1]
            best[end] = total[previous_cut[end]]
        return cuts, previous_cut

    def fit(self, wave: _Numbers, slots: int, widths_of: _Numbers) -> list[_Numbers]:
        """Set the widths of a wave to the best pace at which it fits on the nodes; divide it where none fits."""
        low, high = 0, len(self._paces)
        found = None
        while low < high:
            middle = (low + high) // 2
            least = self._least[middle, wave]
            if least.sum() <= slots and fits_on_nodes(self._problem.capacity.slots, least.astype(np.int64)):
                found, high = least, middle
            else:
                low = middle + 1
        if found is None and len(wave) == 1:  # wider than its part of the slots
            found = self._least[-1, wave]
        if found is not None:
            widths_of[wave] = found
            return [wave]
        half = len(wave) // 2
        return self.fit(wave[:half], slots, widths_of) + self.fit(wave[half:], slots, widths_of)


def fits_on_nodes(slots: tuple[int, ...], widths: _Numbers) -> bool:
    """Whether best fit, the widest first, places all these widths on empty nodes."""
    if widths.sum() > sum(slots):
        return False
    free = np.bincount(slots).tolist()
    counts = np.bincount(widths).tolist()
    for width in range(len(counts) - 1, 0, -1):
        unplaced = counts[width]
        for have in range(width, len(free)):
            while unplaced and free[have]:
                per_node = have // width  # best fit fills one node after another
                nodes = min(free[have], unplaced // per_node) or 1
                put = min(per_node, unplaced)
                free[have] -= nodes
                free[have - put * width] += nodes
                unplaced -= put * nodes
        if unplaced:
            return False
    return True


def plan_longest_first(problem: Problem, limit: float) -> Iterator[FlotillaPlan]:
    """Plan the longest members first, with widths such that none takes longer than `limit`, if possible."""
    whole = problem.times * problem.epochs[:, None]
    widths = (whole <= np.maximum(limit, whole.min(axis=1))[:, None]).argmax(axis=1)
    numbers = np.arange(len(widths))
    lengths, paces = whole[numbers, widths], problem.times[numbers, widths]
    longest = np.lexsort((numbers, -lengths))
    if problem.capacity.streams >= min(len(widths), problem.slots):
        yield FlotillaPlan(tuple((i,) for i in longest.tolist()), tuple(widths.tolist()))
        return
    orders = [np.lexsort((numbers, -paces))]
    if problem.epochs.min() < problem.epochs.max():
        orders += [longest, np.lexsort((numbers, -paces, -problem.epochs))]
    # one flotilla for each stream at a time, each on an equal part of the slots
    part = max(problem.slots / problem.capacity.streams, problem.capacity.most_workers)
    for order in orders:
        number = np.floor((np.cumsum(widths[order]) - widths[order]) / part).astype(np.int64)
        pieces = np.split(order, np.flatnonzero(np.diff(number)) + 1)
        ends = [float(paces[piece].max() * problem.epochs[piece].max()) for piece in pieces]
        pieces = [pieces[k] for k in sorted(range(len(pieces)), key=lambda k: -ends[k])]
        yield FlotillaPlan(tuple(tuple(piece.tolist()) for piece in pieces), tuple(widths.tolist()))


def list_limits(problem: Problem) -> NDArray[np.float64]:
    """Limits for `plan_longest_first`, from the lower bound to the time of the longest member with one worker."""
    whole = problem.times * problem.epochs[:, None]
    slowest = float(np.where(np.isfinite(whole), whole, 0.0).max())
    limits = np.minimum(problem.lower_bound * _LIMITS, max(slowest, problem.lower_bound))
    return np.unique(limits)
