"""How full the queues between preparation and members were, as Pittman et al. (SC18) logged theirs.

A queue is a feeder's ring: samples that are prepared and that some member has not yet released. Each feeder
integrates its levels over time at its own events (`pipelines.feeder.statistics`); what it has so far is a
`Sample`. The difference between two samples is the mean of the time between them.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipelines.feeder.statistics import FULL, LINK, RING, WAITING, WORKERS, bottleneck

#: Seconds between the samples of a feeder.
EVERY_S = 0.25
_POINTS = 40  # of the course of a run


@dataclass(frozen=True)
class Sample:
    """A feeder's levels so far.

    Attributes:
        time_s: of `time.perf_counter`, which all processes of a machine have in common.
        recorded_s: how long there were levels.
        means: of each level over that time.
    """

    time_s: float
    recorded_s: float
    means: Mapping[str, float]


@dataclass(frozen=True)
class Queues:
    """The levels of all feeders of a run, each counted once.

    Attributes:
        mean: share of the ring that is full.
        waiting: share of the time in which some member of a feeder waited for samples.
        full: share of the time in which the ring had no room for more.
        limit: what the others wait for: "preparation", "members" or "links".
        course: seconds after the start, and the mean level of the rings at that time.
    """

    mean: float
    waiting: float
    full: float
    limit: str | None
    course: tuple[tuple[float, float], ...]


def sample(report: Mapping[str, Any], time_s: float) -> Sample:
    """Of a feeder's `stats` or report."""
    return Sample(time_s, report["recorded_s"], report["fullness"])


def summarize(feeders: Sequence[Sequence[Sample]], start_s: float, stop_s: float) -> Queues | None:
    """The levels between two moments.

    Args:
        feeders: the samples of each, in order; the moments are taken at the samples that enclose them.
    """
    found = [levels for samples in feeders if (levels := _between(*_enclose(samples, start_s, stop_s)))]
    if not found:
        return None
    names = {name for levels in found for name in levels}
    means = {name: statistics.fmean(levels.get(name, 0.0) for levels in found) for name in names}
    waiting, full = means[WAITING], means[FULL]
    # The busiest node's: in some designs few nodes prepare, or send.
    busiest = {name: max(levels.get(name, 0.0) for levels in found) for name in names & {WORKERS, LINK}}
    # A member that waits while the ring is full waits for a slower one.
    limit = "members" if full > waiting else bottleneck({**means, **busiest})
    return Queues(means[RING], waiting, full, limit, _find_course(feeders, start_s, stop_s))


def _enclose(samples: Sequence[Sample], start_s: float, stop_s: float) -> tuple[Sample, Sample]:
    first = max((each for each in samples if each.time_s <= start_s), key=_time, default=samples[0])
    last = min((each for each in samples if each.time_s >= stop_s), key=_time, default=samples[-1])
    return first, last


def _time(each: Sample) -> float:
    return each.time_s


def _between(first: Sample, last: Sample) -> dict[str, float]:
    """The mean levels; none where no time was recorded."""
    span_s = last.recorded_s - first.recorded_s
    if span_s <= 0:
        return {}
    before = {name: mean * first.recorded_s for name, mean in first.means.items()}
    return {
        # A feeder of a group that changes its levels' names has less of the new ones: at least 0 and at most 1.
        name: min(1.0, max(0.0, (mean * last.recorded_s - before.get(name, 0.0)) / span_s))
        for name, mean in last.means.items()
    }


def _find_course(
    feeders: Sequence[Sequence[Sample]], start_s: float, stop_s: float
) -> tuple[tuple[float, float], ...]:
    """The mean level of the rings at up to `_POINTS` moments, of those feeders that had one then."""
    course = []
    for point in range(_POINTS):
        after_s = (stop_s - start_s) * (point + 0.5) / _POINTS
        moment = start_s + after_s
        found = [levels for samples in feeders if (levels := _between(*_enclose(samples, moment, moment)))]
        if found:
            course.append((round(after_s, 2), round(statistics.fmean(each[RING] for each in found), 3)))
    return tuple(course)
