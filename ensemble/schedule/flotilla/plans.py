"""Plans to begin with: ways to cut members into flotillas and to give them widths, each good for some kind of run.

*In waves*: flotillas of like pace, each on all slots, one after another. For a pace d (time of an epoch) a member
needs the least width w(d) that reaches it, so a flotilla of given members has a best pace: the least d at which
the widths fit. Sorted by their time with one worker, which consecutive members should be together is a shortest
path over the cuts (dynamic programming): exact where cuts between all members are tried, on few members; on many
the cuts lie on a grid.

*By length*: widths such that no member takes longer than a limit, then the longest first (LPT), flotillas of as
many as it takes to keep all slots busy with the streams there are.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ensemble.schedule.flotilla.problem import Problem

_CUTS = 48  # positions at which many members may be cut
_PACES = 160  # paces that are tried where there are many
_LIMITS = 12


@dataclass(frozen=True)
class Plan:
    """Flotillas in order, as members' numbers, and each member's width."""

    flotillas: tuple[tuple[int, ...], ...]
    widths: tuple[int, ...]


def in_waves(problem: Problem, order: NDArray[np.int64]) -> Plan:
    """The best cut of `order` into flotillas that run one after another, by dynamic programming."""
    count = len(order)
    paces = _paces(problem)
    cuts = np.unique(np.linspace(0, count, min(count, _CUTS) + 1).round().astype(np.int64))
    needs = np.zeros((len(paces), count + 1))
    for number, pace in enumerate(paces):
        widths = problem.least_widths(pace)[order]
        needs[number, 1:] = np.cumsum(np.where(widths > 0, widths, np.inf))
    at_cuts = needs[:, cuts]
    longest = problem.epochs[order]
    best, came = np.full(len(cuts), np.inf), np.zeros(len(cuts), np.int64)
    best[0] = 0.0
    with np.errstate(invalid="ignore"):
        for end in range(1, len(cuts)):
            need = at_cuts[:, end, None] - at_cuts[:, :end]  # [paces, starts]
            fits = need <= problem.slots
            pace = np.where(fits.any(axis=0), paces[fits.argmax(axis=0)], np.inf)
            epochs = np.maximum.accumulate(longest[: cuts[end]][::-1])[::-1][cuts[:end]]
            total = best[:end] + pace * epochs
            came[end] = total.argmin()
            best[end] = total[came[end]]
    bounds = [len(cuts) - 1]
    while bounds[-1]:
        bounds.append(int(came[bounds[-1]]))
    waves = [order[cuts[a] : cuts[b]] for b, a in itertools.pairwise(bounds)]
    widths_of = np.zeros(count, np.int64)
    flotillas = []
    for wave in waves:
        for part in _fitted(problem, wave, paces, widths_of):
            flotillas.append(tuple(part.tolist()))
    length = [max(problem.times[i, widths_of[i]] * problem.epochs[i] for i in each) for each in flotillas]
    flotillas = [flotillas[k] for k in sorted(range(len(flotillas)), key=lambda k: -length[k])]
    return Plan(tuple(flotillas), tuple(widths_of.tolist()))


def _fitted(
    problem: Problem, wave: NDArray[np.int64], paces: NDArray[np.float64], widths_of: NDArray[np.int64]
) -> Iterator[NDArray[np.int64]]:
    """Sets the widths of a wave to the best pace at which it fits on the nodes; one that never does is halved."""
    times = problem.times[wave]
    low, high = 0, len(paces)
    found = None
    while low < high:
        middle = (low + high) // 2
        widths = (times <= paces[middle]).argmax(axis=1)
        if widths.min() > 0 and packs(problem.room.slots, widths):
            found, high = widths, middle
        else:
            low = middle + 1
    if found is not None:
        widths_of[wave] = found
        yield wave
        return
    half = len(wave) // 2
    for part in (wave[:half], wave[half:]):
        yield from _fitted(problem, part, paces, widths_of)


def packs(slots: tuple[int, ...], widths: NDArray[np.int64]) -> bool:
    """Whether best fit, the widest first, finds room for all these on empty nodes."""
    if widths.sum() > sum(slots):
        return False
    free = np.bincount(slots).tolist()
    counts = np.bincount(widths).tolist()
    for width in range(len(counts) - 1, 0, -1):
        left = counts[width]
        for have in range(width, len(free)):
            while left and free[have]:
                each = have // width  # best fit goes on with the node it has begun
                nodes = min(free[have], left // each) or 1
                put = min(each, left)
                free[have] -= nodes
                free[have - put * width] += nodes
                left -= put * nodes
        if left:
            return False
    return True


def by_length(problem: Problem, limit: float, order: NDArray[np.int64] | None = None) -> Plan:
    """Widths such that no member takes longer than `limit` where that is possible, the longest first."""
    whole = problem.times * problem.epochs[:, None]
    widths = (whole <= np.maximum(limit, whole.min(axis=1))[:, None]).argmax(axis=1)
    lengths = whole[np.arange(len(widths)), widths]
    if order is None:
        order = np.lexsort((np.arange(len(widths)), -lengths))
    if problem.room.streams >= min(len(widths), problem.slots):
        return Plan(tuple((int(i),) for i in order), tuple(widths.tolist()))
    # one flotilla at a time and stream, each an equal part of the slots
    part = max(problem.slots / problem.room.streams, problem.room.most_workers)
    number = np.floor((np.cumsum(widths[order]) - widths[order]) / part).astype(np.int64)
    pieces = np.split(order, np.flatnonzero(np.diff(number)) + 1)
    return Plan(tuple(tuple(piece.tolist()) for piece in pieces if len(piece)), tuple(widths.tolist()))


def limits(problem: Problem) -> NDArray[np.float64]:
    """Lengths from the lower bound to the longest member alone with one worker."""
    whole = problem.times * problem.epochs[:, None]
    slowest = float(np.where(np.isfinite(whole), whole, 0.0).max())
    low = problem.lower_bound()
    return np.geomspace(low, max(slowest, low), _LIMITS)


def _paces(problem: Problem) -> NDArray[np.float64]:
    """Times of an epoch that some member has at some width; a selection where there are many."""
    paces = np.unique(problem.times[np.isfinite(problem.times)])
    if len(paces) > _PACES:
        # even in rank and even in ratio, the slowest kept: it is what a flotilla of all may need
        ranks = np.linspace(0, len(paces) - 1, _PACES // 2).round().astype(np.int64)
        ratios = np.searchsorted(paces, np.geomspace(paces[0], paces[-1], _PACES // 2)).clip(0, len(paces) - 1)
        paces = paces[np.unique(np.concatenate([ranks, ratios]))]
    return paces
