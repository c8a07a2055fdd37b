"""Intervals of figures on a split: how far they would move on other samples of the same kind.

The bootstrap (Efron 1979) draws n of the n samples with replacement, `draws` times, and measures each draw.
Samples are drawn, never single positions: the steps of one sequence are not independent. The interval lies between
two quantiles of the drawn figures. A draw repeats samples, so that an error of calibration is larger in draws than
in the sample, as it is larger in the sample than in truth: its interval is the basic one (Davison and Hinkley
1997, section 5.2), which turns the distances of the draws to the other side of the figure.

Draws are the same for all figures, so the difference of two models is drawn in pairs: much of what moves with the
samples moves both, and the difference is known better than either.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from ensemble.combine.metrics import AreasUnderCurve, Array, Figures, MetricSums, compute_defined
from ensemble.combine.tasks.base import Statistic
from ensemble.spec.split_metrics import SplitMetricLike, bind_fields, name_of
from ensemble.spec.task import Task

DRAWS = 1000
SLOW_DRAWS = 200
"""Most draws of `Resampled` and of areas under curves, which take longer than sums."""

FEWEST_DRAWS = 100
FEWEST_RESAMPLED = 40
MOST_RESAMPLED = 50_000_000
"""Predicted values times metrics times draws of a `Resampled`, beyond which fewer draws are made, and none where
they would be fewer than `FEWEST_RESAMPLED`: areas under curves of scikit-learn take half a minute."""

MOST_ALONE = 2_000
"""Samples of which each is measured alone, where the predictions are too many to draw from."""

MOST_COUNTS = 20_000_000
"""Samples times draws beyond which fewer draws are made: two models of ten classes take about a second then."""

CHUNK = 4_000_000
"""Samples times draws that are held at once."""

FEWEST_DEFINED = 0.5
"""Of the draws, in which a figure must be defined: those in which it is are not like the others."""

ROUNDING = 1e-12
"""Relative; draws that differ by less are the same."""

BIASED = ("ece", "ece_debiased", "calibration_error")
"""Figures whose intervals are basic: means of absolute deviations, which chance makes larger. None is below 0."""

Interval = list[float]


@dataclass(frozen=True)
class DrawnFigures:
    """The figures of one model, as they are and in each draw of its samples.

    Draws depend on the number of samples alone: figures of models that predicted the same samples are of the same
    draws, whenever they were made.
    """

    estimates: Mapping[str, float]
    drawn: Figures

    def subtract(self, other: DrawnFigures, level: float = 0.95) -> dict[str, Interval]:
        """The intervals of these figures minus those of another model, of the figures that both have."""
        found = {}
        for name in (name for name in self.estimates if name in other.estimates):
            difference = self.estimates[name] - other.estimates[name]
            drawn = self.drawn[name] - other.drawn[name]
            interval = find_interval(difference, drawn, level, is_biased=name in BIASED)
            if interval is not None:
                found[name] = interval
        return found


@dataclass(frozen=True)
class Resampled:
    """Metrics of a whole split that are computed anew for each draw; of the first `draws` only.

    Where the predictions are too many for `FEWEST_RESAMPLED` draws, it has no figures, and they no intervals.
    """

    metrics: Sequence[SplitMetricLike]
    values: Array
    target: Array
    task: Task
    fields: Mapping[str, Array] = field(default_factory=dict)

    @property
    def draws(self) -> int:
        """How many draws are made of them; 0 where they are too many."""
        draws = MOST_RESAMPLED // max(1, self.values.size * len(self.metrics))
        return min(draws, SLOW_DRAWS) if draws >= FEWEST_RESAMPLED else 0

    def __call__(self, counts: Array | None = None) -> Figures:
        """The figures of d resamples (see `metrics.Sums`); NaN where one is not defined."""
        if not self.draws:
            return {}
        if counts is None:
            return {name: np.array([value]) for name, value in self.compute(slice(None)).items()}
        draws = [np.repeat(np.arange(len(self.values)), own.astype(np.int64)) for own in counts]
        rows = [self.compute(own) for own in draws]
        return {name: np.array([row.get(name, np.nan) for row in rows]) for name in map(name_of, self.metrics)}

    def compute(self, rows: Any) -> dict[str, float]:
        """The metrics of some samples."""
        metrics = [
            bind_fields(each, {name: of[rows] for name, of in self.fields.items()}) for each in self.metrics
        ]
        return compute_defined(metrics, self.values[rows], self.target[rows], self.task)[0]


def resample(whole: Resampled, figures: Mapping[str, float]) -> list[Statistic]:
    """What resamples metrics of a whole split, which are `figures` of all predictions.

    Of too many predictions, it draws from the figures of single samples, where their mean is that of all, as of a
    Dice score.
    """
    found: list[Statistic] = [whole] if whole.draws else []
    for metric in whole.metrics if not found and len(whole.values) <= MOST_ALONE else ():
        name, one = name_of(metric), replace(whole, metrics=[metric])
        if callable(metric) and name in figures:
            alone = [one.compute(slice(at, at + 1)).get(name, np.nan) for at in range(len(whole.values))]
            if np.isclose(np.mean(alone), figures[name], rtol=1e-6, atol=0):
                sums = np.stack([alone, np.ones(len(alone))])
                found.append(MetricSums(sums, partial(_divide_sums, name)))
    return found


def _divide_sums(name: str, sums: Array) -> Figures:
    return {name: sums[0] / sums[1]}


def draw(
    statistics: Mapping[str, Iterable[Statistic]], n: int, draws: int = DRAWS, seed: int = 0
) -> dict[str, Figures]:
    """Figures of resamples, float64 [draws] each, by the names of their statistics.

    Args:
        statistics: name -> functions of counts [d, n]. All see the same draws.
        n: samples.
    """
    draws = int(np.clip(MOST_COUNTS // n, FEWEST_DRAWS, draws))
    rng = np.random.default_rng(seed)
    found: dict[str, dict[str, list[Array]]] = {name: {} for name in statistics}
    size = max(1, CHUNK // n)
    for start in range(0, draws, size):
        rows = range(start, min(start + size, draws))
        counts = np.stack([np.bincount(rng.integers(0, n, n), minlength=n) for _ in rows]).astype(np.float64)
        for name, functions in statistics.items():
            for function in functions:
                few = counts[: max(0, _count_draws(function, draws) - start)]
                for metric, values in (function(few) if len(few) else {}).items():
                    found[name].setdefault(metric, []).append(values)
    return {name: {metric: np.concatenate(each) for metric, each in of.items()} for name, of in found.items()}


def draw_figures(statistics: Sequence[Statistic], n: int) -> DrawnFigures:
    """Draws the figures of one model; of a single sample there are none.

    Args:
        n: samples.
    """
    estimates = {name: float(value[0]) for function in statistics for name, value in function(None).items()}
    return DrawnFigures(estimates if n > 1 else {}, draw({"": statistics}, n)[""] if n > 1 else {})


def _count_draws(function: Statistic, draws: int) -> int:
    if isinstance(function, Resampled):
        return function.draws
    return SLOW_DRAWS if isinstance(function, AreasUnderCurve) else draws


def find_interval(
    estimate: float, drawn: Array, level: float = 0.95, *, is_biased: bool = False
) -> Interval | None:
    """The interval [low, high] of a figure; None where it is not defined in most draws.

    Args:
        is_biased: whether it is the basic interval, else that between two quantiles of the draws.
    """
    draws, drawn = len(drawn), drawn[np.isfinite(drawn)]
    if len(drawn) < max(2, FEWEST_DEFINED * draws) or not np.isfinite(estimate):
        return None
    low, high = map(float, np.quantile(drawn, [(1 - level) / 2, (1 + level) / 2]))
    if is_biased:  # it is made to hold the figure, of which all draws may lie to one side
        return [min(2 * estimate - high, estimate), max(2 * estimate - low, estimate)]
    return [low, high]


def intervals(
    statistics: Mapping[str, Sequence[Statistic]], n: int, level: float = 0.95, draws: int = DRAWS, seed: int = 0
) -> dict[str, dict[str, Interval]]:
    """Intervals of figures of several models, and of the difference of the first to the second.

    Args:
        statistics: model -> its statistics (`TaskMath.statistics`).
        n: samples.
        level: the share of repetitions in which such an interval holds the true figure, roughly.

    Returns:
        model -> figure -> [low, high]; under "difference" those of the first minus the second model. None of a
        figure that is the same in all draws, as an accuracy of 1: they cannot tell how far it would move; none of
        a single sample.
    """
    estimates = {
        name: {metric: float(value[0]) for function in functions for metric, value in function(None).items()}
        for name, functions in statistics.items()
    }
    if n < 2:
        return {name: {} for name in [*estimates, *["difference"] * (len(estimates) > 1)]}
    drawn = draw(statistics, n, draws, seed)
    found: dict[str, dict[str, Interval]] = {}
    for name, figures in estimates.items():
        found[name] = {}
        for metric, value in figures.items():
            is_biased = metric in BIASED
            interval = find_interval(value, drawn[name][metric], level, is_biased=is_biased)
            if interval is None:
                continue
            if np.nanmax(drawn[name][metric]) - np.nanmin(drawn[name][metric]) > ROUNDING * abs(value):
                found[name][metric] = [max(0.0, bound) for bound in interval] if is_biased else interval
    if len(estimates) > 1:
        first, second, *_ = (DrawnFigures(estimates[name], drawn[name]) for name in estimates)
        found["difference"] = first.subtract(second, level)
    return found


def find_noise(intervals: Mapping[str, Mapping[str, Interval]], figures: Iterable[str] = ()) -> list[str]:
    """The figures of which the difference may be chance: its interval holds 0, or there is none.

    So may that of two `BIASED` figures neither of which is distinguishable from 0.

    Args:
        figures: of both models, those without an interval included.
    """
    known = intervals.get("difference", {})
    names = dict.fromkeys([*known, *figures])
    models = [of for model, of in intervals.items() if model != "difference"]
    lowest = {name: [of[name][0] for of in models if name in of] for name in BIASED}
    zero = {name for name, bounds in lowest.items() if bounds and max(bounds) <= 0}
    return [name for name in names if name in zero or name not in known or known[name][0] <= 0 <= known[name][1]]
