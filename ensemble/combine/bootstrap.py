"""Intervals of figures on a split: how far they would move on other samples of the same kind.

The bootstrap (Efron 1979) draws n of the n samples with replacement, never single positions, and measures that.
A draw repeats samples, which makes an error of calibration larger: its interval is the basic one (Davison and
Hinkley 1997, section 5.2). Draws are the same for all figures, so that differences of two models are of pairs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ensemble.combine.metrics import AreasUnderCurve, Array, Figures, compute_defined
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

MOST_COUNTS = 20_000_000
"""Samples times draws beyond which fewer draws are made: two models of ten classes take about a second then."""

CHUNK = 4_000_000
"""Samples times draws that are held at once."""

FEWEST_DEFINED = 0.5
"""Of the draws, in which a figure must be defined: those in which it is are not like the others."""

ROUNDING = 1e-12
"""Relative; draws that differ by less are the same."""

BIASED = ("ece", "calibration_error")
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
        bounds: dict[str, Interval] = {}
        for name in [name for name in self.estimates if name in other.estimates]:
            difference, drawn = self.estimates[name] - other.estimates[name], self.drawn[name] - other.drawn[name]
            if (interval := find_interval(difference, drawn, level, is_biased=name in BIASED)) is not None:
                bounds[name] = interval
        return bounds


@dataclass(frozen=True)
class Resampled:
    """Metrics of a whole split that are computed anew for each draw; of the first `draws` only."""

    metrics: Sequence[SplitMetricLike]
    values: Array
    target: Array
    task: Task
    fields: Mapping[str, Array] = field(default_factory=dict)

    @property
    def draws(self) -> int:
        """How many draws are made of them; 0 where the predictions are too many for `FEWEST_RESAMPLED`."""
        draws = MOST_RESAMPLED // max(1, self.values.size * len(self.metrics))
        return min(draws, SLOW_DRAWS) if draws >= FEWEST_RESAMPLED else 0

    def __call__(self, counts: Array | None = None) -> Figures:
        """The figures of d resamples (see `metrics.MetricSums`); NaN where one is not defined."""
        if not self.draws:
            return {}
        if counts is None:
            return {name: np.array([value]) for name, value in self.compute(slice(None)).items()}
        draws = [np.repeat(np.arange(len(self.values)), own.astype(np.int64)) for own in counts]
        rows = [self.compute(own) for own in draws]
        return {name: np.array([row.get(name, np.nan) for row in rows]) for name in map(name_of, self.metrics)}

    def compute(self, rows: Any) -> dict[str, float]:
        """The metrics of some samples."""
        fields = {name: column[rows] for name, column in self.fields.items()}
        metrics = [bind_fields(metric, fields) for metric in self.metrics]
        return compute_defined(metrics, self.values[rows], self.target[rows], self.task)[0]


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
    parts: dict[str, dict[str, list[Array]]] = {name: {} for name in statistics}
    size = max(1, CHUNK // n)
    for start in range(0, draws, size):
        rows = range(start, min(start + size, draws))
        counts = np.stack([np.bincount(rng.integers(0, n, n), minlength=n) for _ in rows]).astype(np.float64)
        for name, functions in statistics.items():
            for function in functions:
                most = SLOW_DRAWS if isinstance(function, AreasUnderCurve) else draws
                most = function.draws if isinstance(function, Resampled) else most
                few = counts[: max(0, most - start)]
                for metric, values in (function(few) if len(few) else {}).items():
                    parts[name].setdefault(metric, []).append(values)
    return {name: {metric: np.concatenate(one) for metric, one in of.items()} for name, of in parts.items()}


def draw_models(
    statistics: Mapping[str, Sequence[Statistic]], n: int, draws: int = DRAWS, seed: int = 0
) -> dict[str, DrawnFigures]:
    """The figures of models, as they are and in each draw; of a single sample there are none.

    Args:
        statistics: model -> its statistics.
        n: samples.
    """
    if n < 2:
        return {name: DrawnFigures({}, {}) for name in statistics}
    drawn = draw(statistics, n, draws, seed)
    models: dict[str, DrawnFigures] = {}
    for name, functions in statistics.items():
        whole = {metric: float(value[0]) for function in functions for metric, value in function(None).items()}
        models[name] = DrawnFigures(whole, drawn[name])
    return models


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
    models = draw_models(statistics, n, draws, seed)
    bounds: dict[str, dict[str, Interval]] = {}
    for name, figures in models.items():
        bounds[name] = {}
        for metric, value in figures.estimates.items():
            drawn, is_biased = figures.drawn[metric], metric in BIASED
            interval = find_interval(value, drawn, level, is_biased=is_biased)
            if interval is not None and np.nanmax(drawn) - np.nanmin(drawn) > ROUNDING * abs(value):
                bounds[name][metric] = [max(0.0, bound) for bound in interval] if is_biased else interval
    if len(models) > 1:
        first, second, *_ = models.values()
        bounds["difference"] = first.subtract(second, level)
    return bounds


def find_noise(intervals: Mapping[str, Mapping[str, Interval]], figures: Iterable[str] = ()) -> list[str]:
    """The figures of which the difference may be chance: its interval holds 0, or there is none.

    So may that of two `BIASED` figures neither of which is distinguishable from 0.

    Args:
        figures: of both models, those without an interval included.
    """
    difference = intervals.get("difference", {})
    models = [of for model, of in intervals.items() if model != "difference"]
    noise: list[str] = []
    for name in dict.fromkeys([*difference, *figures]):
        lowest = [of[name][0] for of in models if name in of] if name in BIASED else []
        low, high = difference.get(name, (0.0, 0.0))
        if low <= 0 <= high or (lowest and max(lowest) <= 0):
            noise.append(name)
    return noise
