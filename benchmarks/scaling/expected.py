"""What is expected of more workers and of larger batches: the tables, findings and plot of the scaling study."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from benchmarks.scaling.measure import LARS, LARS_DECAY, REAL, SGD, STRONG, BatchRow, WorkerRow
from ensemble.bench.charts import PREDICTED, Mark, Panel
from ensemble.bench.results import Outcome, group_by, outcome_of, series_of, series_of_fields

# Percentage points that SGD loses against a smaller batch where it is said to begin to lose.
LOSS = 2.0
# Of a curve over workers: what was measured, the model, and the first row's examples/s by the number of workers.
_MODEL = "compute / n + communication(n)"
_WORKER_FIELDS = {"measured": "examples_per_s", _MODEL: "predicted_per_s", "linear": "linear_per_s"}
_WORKER_COLOURS = {"measured": "#2f7bc4", _MODEL: "#2f7bc4", "linear": "#c0c5cc"}
_WORKER_DASHES = {_MODEL: PREDICTED, "linear": "dot"}
_COLOURS = {SGD: "#8a94a3", LARS: "#2f7bc4", LARS_DECAY: "#d97a2b"}
_WORKER_COLUMNS = "scaling compute workers hosts batch_size examples_per_s step_ms compute_ms sync_ms "
_WORKER_COLUMNS += "communication_ms predicted_ms efficiency sent_mb"
_BATCH_COLUMNS = "batch_size steps optimizer lr grid_percent accuracy difference"
_HEADINGS = {"batch_size": "batch", "examples_per_s": "examples/s", "grid_percent": "grid, %"}
_HEADINGS |= {"accuracy": "accuracy, %", "difference": "less SGD"}


# --- workers -------------------------------------------------------------------------------------------------


def show_workers(rows: Sequence[WorkerRow]) -> Outcome:
    """What the part 'workers' prints, writes and draws."""
    return outcome_of(
        rows,
        "One member over workers",
        _WORKER_COLUMNS,
        headings=_HEADINGS,
        part="workers",
        findings=worker_findings(rows),
        notes=["one member over n workers"],
        panels=worker_panels(rows),
    )


def _curves(rows: Sequence[WorkerRow]) -> dict[tuple[str, str], list[WorkerRow]]:
    return group_by(rows, lambda row: (row.scaling, row.compute))


def worker_findings(rows: Sequence[WorkerRow]) -> Iterator[str]:
    """A line for each curve, of the most workers that had a core each."""
    for (scaling, compute), curve in _curves(rows).items():
        last = [row for row in curve if not row.shares_cores][-1]
        if last.workers > 1:
            yield (
                f"{scaling} scaling, compute {compute}: {last.workers} workers train "
                f"{last.examples_per_s / curve[0].examples_per_s:.3g} x the examples/s of one; "
                f"{last.step_ms:.3g} ms a step, where the model says {last.predicted_ms:.3g} ms"
            )
    if any(row.shares_cores for row in rows):
        yield (
            f"more than {rows[0].cores} workers that compute share {rows[0].cores} cores: they cannot be faster; "
            "--step-ms emulates an accelerator for each worker"
        )


def worker_panels(rows: Sequence[WorkerRow]) -> Iterator[Panel]:
    """Examples/s beside the model, of each curve."""
    for (scaling, compute), curve in _curves(rows).items():
        first = curve[0]
        kind = f"{first.cores} cores compute" if compute == REAL else f"accelerators of {compute} are emulated"
        batch = "one batch of {} for all" if scaling == STRONG else "a batch of {} for each"
        at = f"{first.model}, {batch.format(first.batch_size)}, {kind}"
        series = series_of_fields(curve, "workers", _WORKER_FIELDS, _WORKER_COLOURS, _WORKER_DASHES)
        yield Panel(title=f"Examples/s, {scaling} scaling", at=at, x="workers", y="examples/s", series=series)


# --- batches -------------------------------------------------------------------------------------------------


def show_batches(rows: Sequence[BatchRow]) -> Outcome:
    """What the part 'batches' prints, writes and draws."""
    return outcome_of(
        rows,
        "The batch grows, the epochs do not",
        _BATCH_COLUMNS,
        headings=_HEADINGS,
        part="batches",
        findings=batch_findings(rows),
        notes=["the batch grows, the epochs do not"],
        panels=batch_panels(rows),
    )


def first_loss(rows: Sequence[BatchRow]) -> tuple[BatchRow, BatchRow] | None:
    """The smallest batch at which the best SGD has lost `LOSS` points against its best at a smaller batch.

    Returns:
        both rows; None where SGD does not lose that much.
    """
    sgd = [(row.accuracy.mean, row) for row in rows if row.optimizer == SGD and row.accuracy]
    best: tuple[float, BatchRow] | None = None
    for mean, row in sorted(sgd, key=lambda each: each[1].batch_size):
        if best is None or mean > best[0]:
            best = mean, row
        elif best[0] - mean >= LOSS:
            return row, best[1]
    return None


def batch_findings(rows: Sequence[BatchRow]) -> Iterator[str]:
    """Where SGD begins to lose, and grids that were too narrow."""
    if lost := first_loss(rows):
        row, best = lost
        yield (
            f"the best SGD has {best.accuracy} % at batch {best.batch_size} and loses {LOSS:g} points first at "
            f"{row.batch_size}: {row.accuracy} %"
        )
    elif rows:
        yield f"nowhere does the best SGD lose {LOSS:g} points against a smaller batch: take larger --batches"
    edges = [f"{row.optimizer} at {row.batch_size} (lr {row.lr:g})" for row in rows if row.edge]
    if edges:
        yield f"the best rate is an end of its grid, a better one may lie beyond: {', '.join(edges)}"


def batch_panels(rows: Sequence[BatchRow]) -> Iterator[Panel]:
    """Accuracy over the batch, with a mark where SGD begins to lose."""
    lost = first_loss(rows)
    marks = []
    if lost and lost[0].accuracy:
        marks = [Mark(lost[0].batch_size, lost[0].accuracy.mean, f"SGD loses {LOSS:g} points")]
    yield Panel(
        title="Accuracy over the batch, %",
        at="best rate of the grid, test split, mean and 95 % interval over seeds",
        x="global batch",
        y="%",
        series=series_of(rows, "batch_size", "accuracy", "optimizer", _COLOURS),
        x_scale="log",
        marks=marks,
        x_text={row.batch_size: f"{row.batch_size:,}" for row in rows},
    )
