"""What half precision should save and not cost: the table, findings and plot of the precision study."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from benchmarks.precision.measure import FP32, Row
from ensemble.bench.charts import Panel, bar_panel
from ensemble.bench.results import Outcome, outcome_of, series_of

_COLUMNS = "model data precision step_ms samples_per_s memory_mb exchange_mb accuracy difference note"
_HEADINGS = {"samples_per_s": "samples/s", "accuracy": "accuracy, %", "difference": "less fp32"}
_COSTS = {"samples_per_s": "samples/s", "memory_mb": "memory", "exchange_mb": "bytes sent"}
_PANELS = (
    ("Training, samples/s", "samples/s", "samples_per_s"),
    ("Peak memory of training, MB", "MB", "memory_mb"),
    ("Bytes a rank of two sends in a step, MB", "MB", "exchange_mb"),
    ("Accuracy on the test split, %", "%", "accuracy"),
    ("Accuracy less that of fp32, points", "points", "difference"),
)
_COLOURS = {"fp32": "#8a94a3", "bf16": "#2f7bc4", "fp16": "#d97a2b"}


def make_outcome(rows: Sequence[Row]) -> Outcome:
    """What the study prints, writes and draws."""
    return outcome_of(
        rows,
        columns=_COLUMNS,
        headings=_HEADINGS,
        findings=findings(rows),
        title="Precision",
        notes=("training steps through the code of members, precisions in turn", "accuracy of members of one run"),
        panels=panels(rows),
    )


def findings(rows: Sequence[Row]) -> Iterator[str]:
    """Half precision against fp32 of the same model: cost, then accuracy."""
    plain = {row.model: row for row in rows if row.precision == FP32}
    for half in (row for row in rows if row.precision != FP32 and row.model in plain):
        figures = [
            (getattr(half, name), getattr(plain[half.model], name), label) for name, label in _COSTS.items()
        ]
        ratios = [f"{ours / theirs:.3g} x the {label}" for ours, theirs, label in figures if ours and theirs]
        if ratios:
            yield f"{half.model}: {half.precision} has {', '.join(ratios)} of fp32"
        if half.difference is not None:
            yield f"{half.model} on {half.data}: {half.precision} less fp32 is {half.difference.describe()}"


def panels(rows: Sequence[Row]) -> Iterator[Panel]:
    """Bars of each cost, of accuracy and of its difference from fp32, by model."""
    at = f"{rows[0].device}, {rows[0].threads} threads"
    for title, unit, field in _PANELS:
        if series := series_of(rows, "model", field, "precision", _COLOURS):
            intervals = any(each.low for each in series)
            yield bar_panel(title, series, at="mean over seeds, 95 % interval" if intervals else at, y=unit)
