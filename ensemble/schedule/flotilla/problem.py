"""The numbers that the search works on: seconds of an epoch by width, in a canonical order of members.

Rates are taken relative to the fastest and rounded to 36 binary digits, and members are sorted by what they are
(the id decides between equal ones): so neither the order in which members are given nor the unit of the rates
matters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from ensemble.schedule.flotilla.model import Busy, RatedMember, Room, rate, rates

_DIGITS = 2.0**36


@dataclass(frozen=True)
class Problem:
    """Members slowest first (by their time alone with one worker).

    Attributes:
        names: their ids.
        times: [members, most workers + 1] time of one epoch by width; infinite where a width is not allowed, equal
            to that of a smaller width where a wider one is no faster or the feeder is the limit.
        epochs: [members] left.
        room, busy: where, and what is taken; `until_s` of the latter in the units of `times`.
        second: seconds of one unit of time.
        samples: of one epoch.
    """

    names: tuple[str, ...]
    times: NDArray[np.float64]
    epochs: NDArray[np.int64]
    room: Room
    busy: tuple[Busy, ...]
    second: float
    samples: int

    @property
    def slots(self) -> int:
        """All slots of all nodes, the busy ones included."""
        return sum(self.room.slots)

    @cached_property
    def lower_bound(self) -> float:
        """In units of `times`, to within 1e-6 of it; see `Allocation.lower_bound_s`."""
        whole = self.times * self.epochs[:, None]
        work = whole[:, 1:] * np.arange(1, whole.shape[1])
        held = sum(each.workers * max(each.until_s, 0.0) for each in self.busy)
        ends = max((each.until_s for each in self.busy), default=0.0)
        low = float(max(whole.min(axis=1).max(initial=0.0), (work.min(axis=1).sum() + held) / self.slots, ends))

        def reaches(limit: float) -> bool:
            """Whether the work of all, at widths at which none takes longer, goes into all slots until then."""
            within = np.where(whole[:, 1:] <= limit * (1 + 1e-9), work, np.inf).min(axis=1)
            return bool(within.sum() + held <= limit * self.slots * (1 + 1e-9))

        if reaches(low):
            return low
        high = 2 * low
        while not reaches(high):
            low, high = high, 2 * high
        while high > low * (1 + 1e-6):
            middle = (low + high) / 2
            low, high = (low, middle) if reaches(middle) else (middle, high)
        return low


def make_problem(members: Sequence[RatedMember], room: Room, samples: int, busy: Sequence[Busy] = ()) -> Problem:
    """The canonical numbers.

    Raises:
        ValueError: a width that no node can hold, or two members of one name.
    """
    most = room.most_workers
    for each in members:
        if each.workers is not None and each.workers > most:
            raise ValueError(f"{each.member}: workers={each.workers}, but a node holds at most {most} of a member")
    if len({each.member for each in members}) < len(members):
        raise ValueError("two members have the same id")
    by_rates: dict[tuple[int, int | None], NDArray[np.float64]] = {}
    rows = []
    for each in members:
        key = (id(each.samples_per_s), each.workers)  # members of one shape share the mapping of their profile
        if key not in by_rates:
            by_rates[key] = _row(each.samples_per_s, each.workers, most)
        rows.append(by_rates[key])
    matrix = np.stack(rows) if rows else np.zeros((0, most + 1))
    fastest = float(matrix.max(initial=0.0)) or 1.0
    relative = _rounded(matrix / fastest)
    limit = float(_rounded(np.array(min(room.prep_samples_per_s / fastest, 2.0))))
    with np.errstate(divide="ignore"):
        times = 1.0 / np.minimum(relative, limit)
    epochs = np.array([each.epochs for each in members], np.int64)
    second = samples / fastest
    # an allowed width's time first: one with a fixed width has infinities before it
    first = np.where(np.isfinite(times), times, 0.0).max(axis=1, initial=0.0)
    names = [each.member for each in members]
    keys: list[NDArray[np.float64]] = [*times.T[::-1], epochs.astype(np.float64), -first]
    by_name = np.array(sorted(range(len(names)), key=lambda i: (len(names[i]), names[i])), np.int64)
    order = by_name[np.lexsort([key[by_name] for key in keys])] if len(names) else by_name
    held = tuple(
        Busy(b.node, b.workers, float(_rounded(np.array(max(b.until_s, 0.0) / second))), b.cohort) for b in busy
    )
    return Problem(tuple(names[i] for i in order), times[order], epochs[order], room, held, second, samples)


def _row(samples_per_s: Mapping[int, float], workers: int | None, most: int) -> NDArray[np.float64]:
    """[most + 1] rate by width; 0 where the width is not allowed."""
    row = np.zeros(most + 1)
    if workers is None:
        row[1:] = rates(samples_per_s, most)
    else:
        row[workers:] = rate(samples_per_s, workers)
    return row


def _rounded(values: NDArray[np.float64]) -> NDArray[np.float64]:
    mantissa, exponent = np.frexp(values)
    out: NDArray[np.float64] = np.ldexp(np.round(mantissa * _DIGITS) / _DIGITS, exponent)
    return out
