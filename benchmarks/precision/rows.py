"""The rows of the precision study, one for each model and precision, and the findings from them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from ensemble.bench.results import Interval, Rows, flatten, tabulate

FP32 = "fp32"


@dataclass(frozen=True, kw_only=True)
class Row:
    """One model in one precision; None where it was not measured; `note` has the reason.

    Attributes:
        model, precision, data, device, threads, batch_size: what was run.
        parameters: weights of the model.
        step_ms: a training step, the median of `steps`.  samples_per_s: at that speed.
        memory_mb: peak of training above what the process had before, 10^6 bytes.
        exchange_mb: bytes that a rank of two sends in a step, its gradients in this precision, 10^6.
        metric: accuracy in percent on the test split after the last epoch: mean and interval over seeds.
        difference: from fp32 with the same seed, percentage points.
        note: the reason why something is missing.
    """

    model: str
    precision: str
    data: str
    device: str
    threads: int
    batch_size: int
    parameters: int
    step_ms: float | None = None
    samples_per_s: float | None = None
    steps: int = 0
    memory_mb: float | None = None
    exchange_mb: float | None = None
    metric: Interval | None = None
    difference: Interval | None = None
    note: str | None = None


def as_json(row: Row) -> dict[str, object]:
    """The row's figures, intervals as their mean and ends."""
    return {**flatten(row, "metric", "difference"), "seeds": row.metric.n if row.metric else 0}


_HEADINGS = {"samples_per_s": "samples/s", "metric": "accuracy, %", "difference": "less fp32"}
_COLUMNS = "model data precision step_ms samples_per_s memory_mb exchange_mb metric difference note"


def table(rows: Sequence[Row]) -> Rows:
    """Rows for people."""
    shown = [replace(row, difference=None) if row.precision == FP32 else row for row in rows]
    return [{**row, "note": row["note"] or ""} for row in tabulate(shown, _COLUMNS, **_HEADINGS)]


def _pairs(rows: Sequence[Row]) -> Iterator[tuple[Row, Row]]:
    """Each row of half precision with the one of the same model in fp32."""
    full = {row.model: row for row in rows if row.precision == FP32}
    yield from ((row, full[row.model]) for row in rows if row.precision != FP32 and row.model in full)


def findings(rows: Sequence[Row]) -> Iterator[str]:
    """Half precision against fp32, a line for each model: cost first, then the metric."""
    for half, full in _pairs(rows):
        ratios = []
        for name, label in (
            ("samples_per_s", "samples/s"),
            ("memory_mb", "memory"),
            ("exchange_mb", "bytes sent"),
        ):
            ours, theirs = getattr(half, name), getattr(full, name)
            if ours is not None and theirs:
                ratios.append(f"{ours / theirs:.3g} x the {label}")
        if ratios:
            yield f"{half.model}: {half.precision} has {', '.join(ratios)} of fp32"
    for half, full in _pairs(rows):
        if half.difference is not None and full.metric is not None:
            yield f"{half.model} on {half.data}: {half.precision} less fp32 is {_verdict(half.difference)}"


def _verdict(difference: Interval) -> str:
    """Whether a paired difference differs from 0."""
    if difference.half is None or difference.low is None or difference.high is None:
        return f"{difference.mean:+.2f} points with one seed, which says nothing; take more --seeds"
    verdict = "no difference is seen" if difference.contains(0.0) else "a difference is seen"
    return (
        f"{difference.mean:+.2f} points, 95 % interval {difference.low:+.2f} to {difference.high:+.2f} over "
        f"{difference.n} seeds: {verdict}"
    )
