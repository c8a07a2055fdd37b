"""The plot of the precision study."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from ensemble.bench import charts
from ensemble.bench.charts import Panel, Series
from ensemble.bench.intervals import Interval
from ensemble.bench.precision.rows import FP32, Row

COLOURS = {"fp32": "#8a94a3", "bf16": "#2f7bc4", "fp16": "#d97a2b"}
# From this ratio on bars need a logarithmic scale, on which their lengths say nothing.
_FAR = 30.0
_COST: tuple[tuple[str, str, Callable[[Row], float | None]], ...] = (
    ("Training, samples/s", "samples/s", lambda row: row.samples_per_s),
    ("Peak memory of training, MB", "MB", lambda row: row.memory_mb),
    ("Bytes a rank of two sends in a step, MB", "MB", lambda row: row.exchange_mb),
)


def panels(rows: Sequence[Row]) -> Iterator[Panel]:
    """What to draw of these rows."""
    first = rows[0]
    at = f"{first.device}, {first.threads} thread{'s' * (first.threads != 1)}"
    for title, unit, value in _COST:
        series = list(_bars(rows, value))
        if series:
            ys = [y for each in series for y in each.ys if y]
            log_y = max(ys) > _FAR * min(ys)
            yield Panel(title=title, at=at, y=unit, series=series, bars=True, x_scale="category", log_y=log_y)
    metric = list(_intervals(rows, lambda row: row.metric))
    if metric:
        said = f"mean over {max(row.metric.n for row in rows if row.metric)} seeds, 95 % interval"
        yield Panel(
            title="Accuracy on the test split, %", at=said, y="%", series=metric, bars=True, x_scale="category"
        )
    half = [row for row in rows if row.precision != FP32]
    difference = list(_intervals(half, lambda row: row.difference))
    if difference:
        said = "paired by seed, 95 % interval: where it spans 0 no difference is seen"
        yield Panel(
            title="Accuracy less that of fp32, points",
            at=said,
            y="points",
            series=difference,
            bars=True,
            x_scale="category",
        )


def _bars(rows: Sequence[Row], value: Callable[[Row], float | None]) -> Iterator[Series]:
    for precision, colour in COLOURS.items():
        points = [(row.model, y) for row in rows if row.precision == precision and (y := value(row)) is not None]
        if points:
            yield Series(name=precision, xs=[x for x, _ in points], ys=[y for _, y in points], colour=colour)


def _intervals(rows: Sequence[Row], value: Callable[[Row], Interval | None]) -> Iterator[Series]:
    for precision, colour in COLOURS.items():
        points = [(row.model, found) for row in rows if row.precision == precision and (found := value(row))]
        if points:
            means = [found.mean for _, found in points]
            yield Series(
                name=precision,
                xs=[model for model, _ in points],
                ys=means,
                low=[mean if f.low is None else f.low for mean, (_, f) in zip(means, points, strict=True)],
                high=[mean if f.high is None else f.high for mean, (_, f) in zip(means, points, strict=True)],
                colour=colour,
            )


def write_plot(rows: Sequence[Row], path: Path) -> None:
    """Write the figure to a file that opens without a network."""
    said = [
        "training steps through the code of members, precisions in turn",
        "members of one Ensemble for the metric",
    ]
    charts.write(charts.figure("Precision", said, list(panels(rows))), path)
