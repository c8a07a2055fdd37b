"""The plot of the precision study."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from benchmarks.precision.rows import FP32, Row
from ensemble.bench.charts import Panel, bar_panel, series_of

TITLE = "Precision"
NOTES = (
    "training steps through the code of members, precisions in turn",
    "members of one Ensemble for the metric",
)
_COLOURS = {"fp32": "#8a94a3", "bf16": "#2f7bc4", "fp16": "#d97a2b"}
# From this ratio on bars need a logarithmic scale, on which their lengths are not comparable.
_LOG_RATIO = 30.0
_COSTS = (
    ("Training, samples/s", "samples/s", "samples_per_s"),
    ("Peak memory of training, MB", "MB", "memory_mb"),
    ("Bytes a rank of two sends in a step, MB", "MB", "exchange_mb"),
)


def panels(rows: Sequence[Row]) -> Iterator[Panel]:
    """Bars of each cost, of accuracy and of its difference from fp32, by model."""
    first = rows[0]
    at = f"{first.device}, {first.threads} thread{'s' * (first.threads != 1)}"
    for title, unit, field in _COSTS:
        if series := series_of(rows, "model", field, "precision", _COLOURS):
            ys = [y for each in series for y in each.ys if y]
            yield bar_panel(title, series, at=at, y=unit, log_y=max(ys) > _LOG_RATIO * min(ys))
    if accuracy := series_of(rows, "model", "metric", "precision", _COLOURS):
        at = f"mean over {max(row.metric.n for row in rows if row.metric)} seeds, 95 % interval"
        yield bar_panel("Accuracy on the test split, %", accuracy, at=at, y="%")
    half = [row for row in rows if row.precision != FP32]
    if difference := series_of(half, "model", "difference", "precision", _COLOURS):
        at = "paired by seed, 95 % interval: where it spans 0 no difference is seen"
        yield bar_panel("Accuracy less that of fp32, points", difference, at=at, y="points")
