"""The plot of the precision study."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from benchmarks.precision.rows import FP32, Row
from ensemble.bench.charts import Panel, Series, bar_panel, interval_series
from ensemble.bench.results import Interval

TITLE = "Precision"
NOTES = (
    "training steps through the code of members, precisions in turn",
    "members of one Ensemble for the metric",
)
_COLOURS = {"fp32": "#8a94a3", "bf16": "#2f7bc4", "fp16": "#d97a2b"}
# From this ratio on bars need a logarithmic scale, on which their lengths are not comparable.
_LOG_RATIO = 30.0
_COSTS: tuple[tuple[str, str, Callable[[Row], float | None]], ...] = (
    ("Training, samples/s", "samples/s", lambda row: row.samples_per_s),
    ("Peak memory of training, MB", "MB", lambda row: row.memory_mb),
    ("Bytes a rank of two sends in a step, MB", "MB", lambda row: row.exchange_mb),
)


def panels(rows: Sequence[Row]) -> Iterator[Panel]:
    """Bars of each cost, of accuracy and of its difference from fp32, by model."""
    first = rows[0]
    at = f"{first.device}, {first.threads} thread{'s' * (first.threads != 1)}"
    for title, unit, value in _COSTS:
        series = list(_bars(rows, value))
        if series:
            ys = [y for each in series for y in each.ys if y]
            yield bar_panel(title, series, at=at, y=unit, log_y=max(ys) > _LOG_RATIO * min(ys))
    accuracy = list(_intervals(rows, lambda row: row.metric))
    if accuracy:
        at = f"mean over {max(row.metric.n for row in rows if row.metric)} seeds, 95 % interval"
        yield bar_panel("Accuracy on the test split, %", accuracy, at=at, y="%")
    difference = list(_intervals([row for row in rows if row.precision != FP32], lambda row: row.difference))
    if difference:
        at = "paired by seed, 95 % interval: where it spans 0 no difference is seen"
        yield bar_panel("Accuracy less that of fp32, points", difference, at=at, y="points")


def _bars(rows: Sequence[Row], value: Callable[[Row], float | None]) -> Iterator[Series]:
    for precision, colour in _COLOURS.items():
        points = [(row.model, y) for row in rows if row.precision == precision and (y := value(row)) is not None]
        if points:
            yield Series(name=precision, xs=[x for x, _ in points], ys=[y for _, y in points], colour=colour)


def _intervals(rows: Sequence[Row], value: Callable[[Row], Interval | None]) -> Iterator[Series]:
    for precision, colour in _COLOURS.items():
        points = [(row.model, found) for row in rows if row.precision == precision and (found := value(row))]
        if points:
            yield interval_series(precision, points, colour)
