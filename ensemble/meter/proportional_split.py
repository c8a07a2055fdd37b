"""Splits what a node used in proportion to use. Pure functions of whole numbers of ticks.

Use (CPU time, a hold on cores or a GPU, a GPU's busy time) is known at some moments only, as a growing count;
between two of them it is taken to have grown evenly.
Integers make the splits exact: shares always add up to the total, in any order.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from ensemble.meter.origin import to_ticks

K = TypeVar("K", bound=tuple[object, ...])


class Owner(NamedTuple):
    """Who used something: a role, with the member it belongs to or, of a feeder, the cohort that it serves."""

    role: str
    member: str | None = None
    cohort: int | None = None


@dataclass(frozen=True)
class UsageSpan:
    """`ticks` of something that `owner` used evenly over the time (start, end]; at `end` when they are equal.

    Attributes:
        rate: of a hold, how much is held: what is held up to a moment is then the same to the tick, whether the
            hold has ended since or not. None: it follows from `ticks`.
    """

    owner: Owner
    start: float
    end: float
    ticks: int
    rate: float | None = None

    def until(self, t: float) -> int:
        """Ticks used up to the moment `t`."""
        if t >= self.end:
            return self.ticks
        if t <= self.start:
            return 0
        if self.rate is not None:
            return min(self.ticks, to_ticks((t - self.start) * self.rate))
        return min(self.ticks, round(self.ticks * ((t - self.start) / (self.end - self.start))))


@dataclass
class Lag:
    """Running totals of `subtract_claimed`: a node's busy ticks less those claimed, and the most that this was."""

    ahead: int = 0
    highest: int = 0


def split(total: int, weights: Mapping[K, int]) -> dict[K, int]:
    """Shares of `total` in proportion to `weights`, as whole ticks that add up to it exactly.

    Each share is rounded down, and the ticks left over go one by one to the largest remainders, equal ones in the
    order of their names (Hamilton's method): no share is off by a tick or more, whatever the order of `weights`.

    Args:
        total: ticks to split, not negative.
        weights: not negative, at least one of them positive.

    Raises:
        ValueError: there is nothing to split by.
    """
    whole = sum(weights.values())
    if whole <= 0 or min(weights.values()) < 0 or total < 0:
        raise ValueError(f"cannot split {total} ticks by weights {dict(weights)!r}")
    shares = {key: total * weight // whole for key, weight in weights.items()}
    left = total - sum(shares.values())
    by_remainder = sorted(weights, key=lambda key: (-(total * weights[key] % whole), [str(part) for part in key]))
    for key in by_remainder[:left]:
        shares[key] += 1
    return shares


def spread(spans: Iterable[UsageSpan], intervals: Sequence[tuple[float, float]]) -> list[dict[Owner, int]]:
    """For each interval (start, end], how many ticks each owner used in it.

    Args:
        spans: in any order; the parts of them outside all intervals are left out.
        intervals: in order of time, not overlapping.
    """
    used: list[dict[Owner, int]] = [{} for _ in intervals]
    ends = [end for _, end in intervals]
    for span in spans:
        # The first interval that ends after the span's start; an empty span falls where its moment does.
        first = bisect_right(ends, span.start) if span.start < span.end else bisect_left(ends, span.end)
        for at in range(first, len(intervals)):
            start, end = intervals[at]
            if start >= span.end:
                break
            ticks = span.until(end) - span.until(start)
            if ticks:
                used[at][span.owner] = used[at].get(span.owner, 0) + ticks
    return used


def subtract_claimed(busy: Sequence[int | None], claimed: Sequence[int], lag: Lag | None = None) -> list[int]:
    """For each interval, the part of a node's busy ticks that no process of the run accounts for.

    Both are counted at slightly different moments, so in a single interval either may be ahead. The surplus is
    therefore taken from the running totals: a lag that is made good in the next interval is not charged to anyone.

    Args:
        busy: ticks that all processes of the node used; None where that is not known (no surplus then).
        claimed: ticks that the run's processes used.
        lag: as earlier intervals left it; it is brought up to date.
    """
    lag = Lag() if lag is None else lag
    surplus = []
    for total, ours in zip(busy, claimed, strict=True):
        if total is not None:
            lag.ahead += total - ours
        surplus.append(max(0, lag.ahead - lag.highest))
        lag.highest = max(lag.highest, lag.ahead)
    return surplus
