"""What is expected of more workers and of larger batches: the tables, findings and plot of the scaling study."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from benchmarks.scaling.measure import LARS, LARS_DECAY, REAL, SGD, STRONG, BatchRow, WorkerRow
from ensemble.bench.charts import PREDICTED, Mark, Panel, Series
from ensemble.bench.results import Outcome, flatten, group_by, series_of, tabulate

# Percentage points that SGD loses against a smaller batch where it is said to begin to lose.
LOSS = 2.0
_COLOURS = {SGD: "#8a94a3", LARS: "#2f7bc4", LARS_DECAY: "#d97a2b"}
_WORKER_COLUMNS = "scaling compute workers hosts batch_size examples_per_s step_ms compute_ms sync_ms "
_WORKER_COLUMNS += "communication_ms predicted_ms efficiency sent_mb"
_BATCH_COLUMNS = "batch_size steps optimizer lr grid accuracy difference"
_HEADINGS = {"batch_size": "batch", "examples_per_s": "examples/s", "grid": "grid, %", "accuracy": "accuracy, %"}


def make_outcome(of_workers: Sequence[WorkerRow], of_batches: Sequence[BatchRow]) -> Outcome:
    """What the study prints, writes and draws; the key `part` of a row determines its other keys."""
    batches = tabulate(of_batches, _BATCH_COLUMNS, **_HEADINGS, difference="less SGD")
    for row, shown in zip(of_batches, batches, strict=True):
        shown["grid, %"] = "  ".join(f"{lr:g}: {'-' if a is None else f'{a:.1f}'}" for lr, a in row.grid.items())
    return Outcome(
        tables=[
            ("One member over workers", tabulate(of_workers, _WORKER_COLUMNS, **_HEADINGS)),
            ("The batch grows, the epochs do not", batches),
        ],
        rows=[
            *({"part": "workers", **vars(row)} for row in of_workers),
            *({"part": "batches", **flatten(row, "accuracy", "difference")} for row in of_batches),
        ],
        findings=[*worker_findings(of_workers), *batch_findings(of_batches)],
        title="Scaling",
        notes=["one member over n workers", "the batch grows, the epochs do not"],
        panels=[*worker_panels(of_workers), *batch_panels(of_batches)],
    )


# --- workers -------------------------------------------------------------------------------------------------


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
        xs = [row.workers for row in curve]
        series = [
            Series(name="measured", xs=xs, ys=[row.examples_per_s for row in curve], colour="#2f7bc4"),
            Series(
                name="compute / n + communication(n)",
                xs=xs,
                ys=[1000 * row.batch_size / row.predicted_ms for row in curve],
                colour="#2f7bc4",
                dash=PREDICTED,
            ),
            Series(name="linear", xs=xs, ys=[first.examples_per_s * n for n in xs], colour="#c0c5cc", dash="dot"),
        ]
        yield Panel(title=f"Examples/s, {scaling} scaling", at=at, x="workers", y="examples/s", series=series)


# --- batches -------------------------------------------------------------------------------------------------


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
    if not rows:
        return
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
