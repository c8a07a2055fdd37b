"""What follows from measured times: which way for which size, which groups, what to measure next. Pure.

Of several measurements of one thing the least counts: what disturbs them makes them only longer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

Way = Literal["flat", "hierarchical"]

#: (up to so many bytes, the way); the last one holds for all that is larger.
Ways = tuple[tuple[int, Way], ...]

_ROUNDS, _CLEAR_ROUNDS, _FEW = 7, 4, 3
_GOLDEN = (math.sqrt(5) - 1) / 2
_HOPELESS, _CLEAR, _CONTENDER, _HARDLY_MORE = 2.0, 1.5, 1.25, 1.1  # times the best


@dataclass(frozen=True)
class Timed:
    """A measurement: what ("flat", "groups of 4", "buckets"), of how many bytes, and how long it took."""

    what: str
    size: int
    seconds: float


def choose(ways: Ways, size: int) -> Way:
    """The way for a message of `size` bytes: the first whose limit it does not exceed, else the last.

    Example:
        >>> choose(((65536, "hierarchical"), (1048576, "flat")), 4096)
        'hierarchical'
    """
    return next((way for up_to, way in ways if size <= up_to), ways[-1][1])


def choose_ways(flat_s: Mapping[int, float], hierarchical_s: Mapping[int, float]) -> Ways:
    """The quicker way by size; between two sizes with different ones the change lies where both would be equal.

    How much quicker one is changes steadily with the size: where one size stands out against both its neighbours,
    it was disturbed, and the middle one of the three counts.

    Args:
        flat_s, hierarchical_s: seconds by size in bytes; the same sizes, one at least.
    """
    sizes = sorted(flat_s)
    found = [math.log(flat_s[size] / hierarchical_s[size]) for size in sizes]
    middle = [sorted(found[i - 1 : i + 2])[1] for i in range(1, len(found) - 1)]
    gain = dict(zip(sizes, [*found[:1], *middle, *found[1:][-1:]], strict=True))
    ways: list[tuple[int, Way]] = []
    for size in sizes:
        way: Way = "hierarchical" if gain[size] > 0 else "flat"
        if ways and (ways[-1][1] == way or gain[size] == 0):
            way = ways[-1][1]
            ways[-1] = (size, way)
            continue
        if ways:  # straight lines between the two sizes, both axes logarithmic
            before = ways[-1][0]
            share = gain[before] / (gain[before] - gain[size])
            ways[-1] = (min(size - 1, round(before * (size / before) ** share)), ways[-1][1])
        ways.append((size, way))
    return tuple(ways)


def choose_groups(flat_s: Mapping[int, float], candidates: Sequence[Mapping[int, float]], hybrid: bool) -> int:
    """Which candidate takes the least time, as a geometric mean over the sizes; the first unless clearly another.

    Args:
        flat_s: seconds of the flat all-reduce by size.
        candidates: of each set of groups, whole hosts first; those without all sizes do not count.
        hybrid: whether the flat one is taken where it is quicker.
    """

    def cost(seconds: Mapping[int, float]) -> float:
        if len(seconds) < len(flat_s):
            return math.inf
        return sum(math.log(min(s, flat_s[size]) if hybrid else s) for size, s in seconds.items()) / len(seconds)

    costs = [cost(each) for each in candidates]
    best = min(range(len(costs)), key=costs.__getitem__)
    return best if costs[best] < costs[0] - math.log(_HARDLY_MORE) else 0


def choose_bucket(seconds: Mapping[int, float], usual: int) -> int:
    """The size of buckets of the least time; of those that take hardly more, the nearest to the usual one.

    Around its bottom the U is flat, and what was measured within a second or two is not known better than so.
    """
    good = [size for size, s in seconds.items() if s <= _HARDLY_MORE * min(seconds.values())]
    return min(good, key=lambda size: (abs(math.log(size / usual)), seconds[size]))


def next_trial(samples: Sequence[Sequence[float]], left_s: float, begin: int) -> int | None:
    """Which of some settings in a row, with one best somewhere, to measure next; None when it is enough.

    Begins with one and goes outwards, on each side until a setting is hopeless; then measures again in turn those
    that may be the best: at first all that are not hopeless, since a single measurement says little, and in any
    case the one that it began with.

    Args:
        samples: seconds measured so far of each setting.
        left_s: the time that is left.
        begin: the first to measure.
    """
    known = {number: min(each) for number, each in enumerate(samples) if each}
    if not known:
        return begin
    best = min(known.values())
    if left_s < best:
        return None
    for number in sorted(range(len(samples)), key=lambda i: (abs(i - begin), i)):
        inwards = number + (1 if number < begin else -1)
        if number not in known and known.get(inwards, math.inf) <= _HOPELESS * best:
            return number
    few = {n for n in known if len(samples[n]) < _FEW}
    limit = {n: (_HOPELESS if n in few else _CONTENDER) * best for n in known}
    rivals = [
        n for n, s in known.items() if len(samples[n]) < _ROUNDS and (s <= limit[n] or (n == begin and n in few))
    ]
    return min(rivals, key=lambda number: (len(samples[number]), number), default=None)


def enough(rounds: Sequence[Sequence[float]], share_s: float) -> bool:
    """Whether candidates were measured often enough: it is clear which is the best, or the time is over.

    Args:
        rounds: in each, the seconds of each candidate.
        share_s: time for all rounds.
    """
    spent_s = sum(map(sum, rounds))
    best, *others = sorted(min(column) for column in zip(*rounds, strict=True))
    clear = all(other > _CLEAR * best for other in others[:1])
    return (
        len(rounds) > _ROUNDS
        or (clear and len(rounds) >= _CLEAR_ROUNDS)
        or spent_s * (1 + 1 / len(rounds)) > share_s  # another one is too much
    )


def expected(took: Sequence[tuple[int, float]], size: int) -> float:
    """Seconds that a message of `size` bytes will take: the last two (bytes, seconds) and a straight line."""
    last, seconds = took[-1]
    before, seconds_before = took[-2] if len(took) > 1 else (0, seconds)
    return seconds + max(0.0, seconds - seconds_before) / (last - before) * (size - last)


def by_size(timed: Sequence[Timed], names: Sequence[str]) -> list[dict[int, float]]:
    """Of each name, seconds by size."""
    return [{each.size: each.seconds for each in timed if each.what == name} for name in names]


def in_the_race(seconds: Sequence[Mapping[int, float]]) -> list[int]:
    """Which of (flat, hosts, parts, parts ...) to go on with; parts of hosts that are worse than the hosts leave.

    Hosts and the flat way stay to the end: at the first, small sizes it is not known yet what crosses the network.

    Args:
        seconds: of each, by size; the same sizes.
    """
    costs = [sum(map(math.log, each.values())) / len(each) for each in seconds]
    return [i for i, cost in enumerate(costs) if i < 2 or cost <= costs[1] + math.log(_HARDLY_MORE)]


def sample(sizes: Sequence[int], most: int) -> list[int]:
    """Some of a model's tensors in its order, `most` values at most; as many small for each large one as it has.

    Multiples of the golden ratio fall evenly, whatever pattern the layers repeat. One that is too large is cut.
    """
    share, left = most / sum(sizes), most
    taken: list[int] = []
    for number, size in enumerate(sizes):
        if number * _GOLDEN % 1 < share and left > 0:
            taken.append(min(size, left))
            left -= taken[-1]
    return taken
