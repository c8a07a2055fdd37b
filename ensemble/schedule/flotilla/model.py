"""Data of the flotilla model: members, capacity and plans, and the numeric problem that the search solves.

Rates are samples per second when batches are ready, as profiled. In a `Problem` they are relative to the fastest,
and members are sorted by their values, so that plans depend neither on the order of members nor on the unit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, kw_only=True)
class RatedMember:
    """A waiting member with its measured rates.

    Attributes:
        member: its id.
        samples_per_s: number of workers -> samples per second, as measured (`Profile.samples_per_s`).
        epochs: epochs left, at least one.
        workers: its fixed width; None: the width is to be chosen.
    """

    member: str
    samples_per_s: Mapping[int, float]
    epochs: int
    workers: int | None = None


@dataclass(frozen=True, kw_only=True)
class Capacity:
    """The capacity of the nodes.

    Attributes:
        slots: for each node the number of workers that it holds: one for each GPU, share of a GPU, or share of the
            cores, as packing divides them.
        widest: most workers of one member on a node; None: as many as there are slots. A node with 8 GPUs of 4
            shares each has 32 slots, and `widest` 8, because a GPU holds at most one rank of a member.
        streams: most streams at one time. Each needs feeders and these need cores, so the cores that are not
            promised to members limit it. With 1, a flotilla starts after the last member of the one before it has
            ended; with 2, the next starts while the former ends.
        prep_samples_per_s: samples per second that the feeders of one stream can prepare.
    """

    slots: tuple[int, ...]
    widest: int | None = None
    streams: int = 1
    prep_samples_per_s: float = math.inf

    @property
    def most_workers(self) -> int:
        """The widest member that a node can hold."""
        widest = max(self.slots)
        return widest if self.widest is None else min(widest, self.widest)


@dataclass(frozen=True)
class HeldSlots:
    """Slots that a running member holds: `workers` on node number `node`, for `until_s` seconds from now.

    A cohort holds a stream until the last of its members ends; `cohort` is None for a member without a stream.
    """

    node: int
    workers: int
    until_s: float
    cohort: int | None


@dataclass(frozen=True, kw_only=True)
class RunningMember(RatedMember):
    """A running member at an epoch boundary, on node number `node`.

    Its rates are those observed (see `correct_rates`), without the time that it waited for others.
    """

    node: int


@dataclass(frozen=True, kw_only=True)
class Cohort:
    """Members that read one stream now.

    Attributes:
        members: those with epochs left.
        epoch: the epoch of the stream that begins for them.
        private: whether this is a single member that prepares its own batches and has no stream.
    """

    number: int
    members: tuple[RunningMember, ...]
    epoch: int
    private: bool = False


@dataclass(frozen=True, kw_only=True)
class CoreBudget:
    """Cores that members and feeders share.

    Attributes:
        total: cores of all nodes.
        prepared_per_s: samples per second that one core prepares.
        members: member -> cores that all its workers keep busy when it waits for nothing; 0 for others.
    """

    total: float
    prepared_per_s: float
    members: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Flotilla:
    """Members that start together and share one stream.

    Attributes:
        members: their ids, the slowest first.
        workers: their widths, in the same order.
        start_s, end_s: expected, in seconds from now.
        samples_per_s: the initial pace: that of the slowest member, or of the feeder.
    """

    members: tuple[str, ...]
    workers: tuple[int, ...]
    start_s: float
    end_s: float
    samples_per_s: float

    @property
    def slots(self) -> int:
        return sum(self.workers)


@dataclass(frozen=True, kw_only=True)
class Allocation:
    """A plan: widths, and flotillas in their order; each starts as soon as its slots and a stream are free.

    Attributes:
        flotillas: every member is in exactly one.
        makespan_s: expected seconds from now until the last member has ended.
        lower_bound_s: a bound for every plan: the least time t such that the work of all members, at widths at
            which none takes longer than t, fits into all slots within t.
    """

    flotillas: tuple[Flotilla, ...]
    makespan_s: float
    lower_bound_s: float = field(compare=False, default=0.0)

    @cached_property
    def workers(self) -> Mapping[str, int]:
        """Each member's width."""
        return {m: w for one in self.flotillas for m, w in zip(one.members, one.workers, strict=True)}


def interpolate_rate(samples_per_s: Mapping[int, float], workers: int) -> float:
    """Samples per second with this many workers, from measurements for some numbers of workers.

    Between two measured numbers the rate is interpolated linearly, below the smallest it is proportional. Above
    the largest it follows Amdahl's law through the two largest, up to twice the largest, and is constant beyond;
    with a single measurement it is constant. It is never more than proportional to the next smaller measured
    number, and never less than its rate.
    """
    if workers in samples_per_s:
        return samples_per_s[workers]
    widths = sorted(samples_per_s)
    smaller = [width for width in widths if width < workers]
    if not smaller:
        return samples_per_s[widths[0]] * workers / widths[0]
    below = smaller[-1]
    least, most = samples_per_s[below], samples_per_s[below] * workers / below
    if len(smaller) < len(widths):
        above = widths[len(smaller)]
        share = (workers - below) / (above - below)
        return min(most, max(least, least + share * (samples_per_s[above] - least)))
    if len(widths) == 1:
        return least
    before = widths[-2]
    # Amdahl: 1 / rate = serial + parallel / workers
    parallel = (1 / samples_per_s[before] - 1 / least) / (1 / before - 1 / below)
    serial = 1 / least - parallel / below
    return min(most, max(least, 1 / max(serial + parallel / min(workers, 2 * below), 1e-300)))


def correct_rates(samples_per_s: Mapping[int, float], workers: int, rate_now: float) -> Mapping[int, float]:
    """Scale all profiled rates by the factor that was observed with this many workers."""
    factor = rate_now / interpolate_rate(samples_per_s, workers)
    return {width: factor * profiled for width, profiled in samples_per_s.items()} | {workers: rate_now}


def tabulate_rates(samples_per_s: Mapping[int, float], most_workers: int) -> Sequence[float]:
    """For 1 ... `most_workers`: the best rate with at most that many workers."""
    best, out = 0.0, []
    for workers in range(1, most_workers + 1):
        best = max(best, interpolate_rate(samples_per_s, workers))
        out.append(best)
    return out


_DIGITS = 2.0**36


@dataclass(frozen=True)
class Problem:
    """The members as numbers, sorted by their time with one worker, the slowest first.

    Attributes:
        names: their ids.
        times: [members, most workers + 1] time of one epoch by width; infinite where a width is not allowed, and
            equal to that of a smaller width where more workers are no faster, or the feeder limits the rate.
        epochs: [members] epochs left.
        capacity, busy: the nodes, and the slots that are held; `until_s` of these is in the unit of `times`.
        unit_s: seconds of one unit of time.
        samples: of one epoch.
    """

    names: tuple[str, ...]
    times: NDArray[np.float64]
    epochs: NDArray[np.int64]
    capacity: Capacity
    busy: tuple[HeldSlots, ...]
    unit_s: float
    samples: int

    @property
    def slots(self) -> int:
        """All slots of all nodes, the busy ones included."""
        return sum(self.capacity.slots)

    @cached_property
    def lower_bound(self) -> float:
        """See `Allocation.lower_bound_s`; in the unit of `times`, with a relative error of at most 1e-6."""
        whole = self.times * self.epochs[:, None]
        work = whole[:, 1:] * np.arange(1, whole.shape[1])
        held = sum(each.workers * max(each.until_s, 0.0) for each in self.busy)
        ends = max((each.until_s for each in self.busy), default=0.0)
        low = float(max(whole.min(axis=1).max(initial=0.0), (work.min(axis=1).sum() + held) / self.slots, ends))

        def reaches(limit: float) -> bool:
            """Whether the work of all members, at widths at which none takes longer, fits into all slots."""
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


def make_problem(
    members: Sequence[RatedMember], capacity: Capacity, samples: int, busy: Sequence[HeldSlots] = ()
) -> Problem:
    """Make the numeric problem; a node can hold each width that is fixed."""
    most = capacity.most_workers
    by_rates: dict[tuple[int, int | None], NDArray[np.float64]] = {}
    rows = []
    for member in members:
        key = (id(member.samples_per_s), member.workers)  # members of one shape share the mapping of their profile
        if key not in by_rates:
            by_rates[key] = _tabulate_row(member.samples_per_s, member.workers, most)
        rows.append(by_rates[key])
    matrix = np.stack(rows) if rows else np.zeros((0, most + 1))
    fastest = float(matrix.max(initial=0.0)) or 1.0
    relative = _round(matrix / fastest)
    limit = float(_round(np.array(min(capacity.prep_samples_per_s / fastest, 2.0))))
    with np.errstate(divide="ignore"):
        times = 1.0 / np.minimum(relative, limit)
    epochs = np.array([member.epochs for member in members], np.int64)
    unit_s = samples / fastest
    # an allowed width's time first: one with a fixed width has infinities before it
    first = np.where(np.isfinite(times), times, 0.0).max(axis=1, initial=0.0)
    names = [member.member for member in members]
    keys: list[NDArray[np.float64]] = [*times.T[::-1], epochs.astype(np.float64), -first]
    by_name = np.array(sorted(range(len(names)), key=lambda i: (len(names[i]), names[i])), np.int64)
    order = by_name[np.lexsort([key[by_name] for key in keys])] if len(names) else by_name
    held = tuple(
        HeldSlots(b.node, b.workers, float(_round(np.array(max(b.until_s, 0.0) / unit_s))), b.cohort) for b in busy
    )
    return Problem(tuple(names[i] for i in order), times[order], epochs[order], capacity, held, unit_s, samples)


def _tabulate_row(samples_per_s: Mapping[int, float], workers: int | None, most: int) -> NDArray[np.float64]:
    """[most + 1] rate by width; 0 where the width is not allowed."""
    row = np.zeros(most + 1)
    if workers is None:
        row[1:] = tabulate_rates(samples_per_s, most)
    else:
        row[workers:] = interpolate_rate(samples_per_s, workers)
    return row


def _round(values: NDArray[np.float64]) -> NDArray[np.float64]:
    mantissa, exponent = np.frexp(values)
    out: NDArray[np.float64] = np.ldexp(np.round(mantissa * _DIGITS) / _DIGITS, exponent)
    return out
