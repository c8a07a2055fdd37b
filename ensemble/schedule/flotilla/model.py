"""Data of the flotilla model: members, capacity and plans, and the numeric problem that the search works on.

Rates are *rated capacity*: the samples per second that a member processes when batches are ready, as profiled.

In a `Problem` rates are relative to the fastest and rounded to 36 binary digits, and members are sorted by their
values (ties by id): neither the order in which members are given nor the unit of the rates matters.
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
    """A member that waits, with its measured rates and what it has left to do.

    Attributes:
        member: its id.
        samples_per_s: what it takes in, by number of workers, for the measured numbers (`Profile.samples_per_s`).
        epochs: epochs left, at least one.
        workers: its width where that is fixed; None where it is to be chosen.
    """

    member: str
    samples_per_s: Mapping[int, float]
    epochs: int
    workers: int | None = None

    def __post_init__(self) -> None:
        if self.epochs < 1:
            raise ValueError(f"{self.member}: epochs={self.epochs}; a member to be placed has at least one left")
        if not self.samples_per_s:
            raise ValueError(f"{self.member}: no rate was measured; profile it, or declare its workers")
        for workers, measured in self.samples_per_s.items():
            if workers < 1 or not 0 < measured < math.inf:
                raise ValueError(f"{self.member}: samples_per_s[{workers}]={measured} is no rate")
        if self.workers is not None and self.workers < 1:
            raise ValueError(f"{self.member}: workers={self.workers}; at least one")


@dataclass(frozen=True, kw_only=True)
class Capacity:
    """Where members may run.

    Attributes:
        slots: what each node offers, in workers: a worker takes one slot, be it a GPU, the share of a GPU that
            packing gives it, or the share of the cores.
        widest: most workers of one member on a node; None for as many as there are slots. A node with 8 GPUs of
            4 shares each has 32 slots, and `widest` 8, as at most one rank of a member may be on a GPU.
        streams: most streams at one time. Each needs feeders and these need cores, so this is what the cores that
            are not promised to members can carry. 1 lets no flotilla start before the last member of the one
            before it has ended; 2 lets the next start while the former ends.
        prep_samples_per_s: what the feeders of one stream can prepare.
    """

    slots: tuple[int, ...]
    widest: int | None = None
    streams: int = 1
    prep_samples_per_s: float = math.inf

    def __post_init__(self) -> None:
        if not self.slots or min(self.slots) < 0 or self.most_workers < 1:
            raise ValueError(f"slots={self.slots}, widest={self.widest}: no node offers a slot")
        if self.streams < 1 or not self.prep_samples_per_s > 0:
            raise ValueError(f"streams={self.streams}, prep_samples_per_s={self.prep_samples_per_s}: both above 0")

    @property
    def most_workers(self) -> int:
        """The widest member that a node can hold."""
        widest = max(self.slots)
        return widest if self.widest is None else min(widest, self.widest)


@dataclass(frozen=True)
class HeldSlots:
    """Slots that a running member holds: `workers` on node number `node`, for `until_s` seconds from now.

    Its cohort's stream is taken until the last of these ends; None for a member that works alone and needs none.
    """

    node: int
    workers: int
    until_s: float
    cohort: int | None


@dataclass(frozen=True, kw_only=True)
class RunningMember(RatedMember):
    """A member that trains, at an epoch boundary: `epochs` it has left, `workers` it has, on node number `node`.

    Its rates are those observed (see `correct_rates`), with the time that it waited for others left out.
    """

    node: int

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.workers is None:
            raise ValueError(f"{self.member} runs, so its workers are known")


@dataclass(frozen=True, kw_only=True)
class Cohort:
    """Members that read one stream now.

    Attributes:
        number: of the cohort.
        members: with epochs left.
        epoch: the stream epoch that begins for them.
        private: this is one member that works alone and takes no stream.
    """

    number: int
    members: tuple[RunningMember, ...]
    epoch: int
    private: bool = False

    def __post_init__(self) -> None:
        if not self.members or (self.private and len(self.members) > 1):
            raise ValueError(f"cohort {self.number}: {len(self.members)} members, private={self.private}")


@dataclass(frozen=True, kw_only=True)
class CoreBudget:
    """Cores that members and feeders share, for what the preparation of one more stream costs.

    Attributes:
        total: of all nodes.
        prepared_per_s: samples per second that one of them prepares.
        members: cores that a member keeps busy with all its workers when it waits for nothing; 0 for one not
            named.
    """

    total: float
    prepared_per_s: float
    members: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.total > 0 or not self.prepared_per_s > 0:
            raise ValueError(f"total={self.total}, prepared_per_s={self.prepared_per_s}: both above 0")


@dataclass(frozen=True, kw_only=True)
class Flotilla:
    """Members that start together and share one stream, and what is expected of them.

    Attributes:
        members: their ids, the slowest first.
        workers: their widths, in the same order.
        start_s, end_s: expected, in seconds from now.
        samples_per_s: the pace at which they begin: that of the slowest, or of the feeder.
    """

    members: tuple[str, ...]
    workers: tuple[int, ...]
    start_s: float
    end_s: float
    samples_per_s: float

    @property
    def slots(self) -> int:
        """Slots that it takes at its start."""
        return sum(self.workers)


@dataclass(frozen=True, kw_only=True)
class Allocation:
    """Widths, and flotillas in the order in which they start, each as soon as its slots and a stream are free.

    Attributes:
        flotillas: every member is in exactly one.
        makespan_s: seconds from now until the last member has ended, as the model expects.
        lower_bound_s: no plan can end sooner: the least time in which the work of all members, at widths at which
            none of them takes longer than this time, goes into all slots.
    """

    flotillas: tuple[Flotilla, ...]
    makespan_s: float
    lower_bound_s: float = field(compare=False, default=0.0)

    @cached_property
    def workers(self) -> Mapping[str, int]:
        """Each member's width."""
        return {m: w for each in self.flotillas for m, w in zip(each.members, each.workers, strict=True)}


def interpolate_rate(samples_per_s: Mapping[int, float], workers: int) -> float:
    """Samples per second with this many workers, from what was measured for some numbers of workers.

    A measured number is what was measured. Between two measured ones the chord; below the smallest proportional;
    up to twice the largest by Amdahl's law through the two largest, and flat from there, or from the only one:
    where nothing is known of how a member scales, it is not assumed to. Never more than linear from the next
    smaller measured number, and never less than it.
    """
    if workers in samples_per_s:
        return samples_per_s[workers]
    known = sorted(samples_per_s)
    smaller = [width for width in known if width < workers]
    if not smaller:
        return samples_per_s[known[0]] * workers / known[0]
    below = smaller[-1]
    least, most = samples_per_s[below], samples_per_s[below] * workers / below
    if len(smaller) < len(known):
        above = known[len(smaller)]
        share = (workers - below) / (above - below)
        return min(most, max(least, least + share * (samples_per_s[above] - least)))
    if len(known) == 1:
        return least
    before = known[-2]
    # Amdahl: 1 / rate = serial + parallel / workers
    parallel = (1 / samples_per_s[before] - 1 / least) / (1 / before - 1 / below)
    serial = 1 / least - parallel / below
    return min(most, max(least, 1 / max(serial + parallel / min(workers, 2 * below), 1e-300)))


def correct_rates(samples_per_s: Mapping[int, float], workers: int, rate_now: float) -> Mapping[int, float]:
    """Profiled rates corrected by what was observed with this many workers: all by the same factor."""
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


def make_problem(
    members: Sequence[RatedMember], capacity: Capacity, samples: int, busy: Sequence[HeldSlots] = ()
) -> Problem:
    """The canonical numbers.

    Raises:
        ValueError: a width that no node can hold, or two members of one name.
    """
    most = capacity.most_workers
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
            by_rates[key] = _tabulate_row(each.samples_per_s, each.workers, most)
        rows.append(by_rates[key])
    matrix = np.stack(rows) if rows else np.zeros((0, most + 1))
    fastest = float(matrix.max(initial=0.0)) or 1.0
    relative = _round(matrix / fastest)
    limit = float(_round(np.array(min(capacity.prep_samples_per_s / fastest, 2.0))))
    with np.errstate(divide="ignore"):
        times = 1.0 / np.minimum(relative, limit)
    epochs = np.array([each.epochs for each in members], np.int64)
    unit_s = samples / fastest
    # an allowed width's time first: one with a fixed width has infinities before it
    first = np.where(np.isfinite(times), times, 0.0).max(axis=1, initial=0.0)
    names = [each.member for each in members]
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
