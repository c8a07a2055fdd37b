"""The tables and the plot of the scaling study."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from benchmarks.scaling.rows import (
    LARS,
    LARS_DECAY,
    LOSS,
    REAL,
    SGD,
    STRONG,
    BatchRow,
    WorkerRow,
    batch_findings,
    first_loss,
    worker_curves,
    worker_findings,
)
from ensemble.bench.charts import PREDICTED, Mark, Panel, Series, series_of
from ensemble.bench.results import Outcome, flatten, tabulate

_OPTIMIZERS = {SGD: "#8a94a3", LARS: "#2f7bc4", LARS_DECAY: "#d97a2b"}
_WORKER_COLUMNS = "scaling compute workers hosts batch_size examples_per_s step_ms compute_ms sync_ms "
_WORKER_COLUMNS += "communication_ms predicted_ms efficiency sent_mb"
_HEADINGS = {"batch_size": "batch", "examples_per_s": "examples/s", "grid": "grid, %", "accuracy": "accuracy, %"}
_STEP, _COMPUTE, _SYNC = "#2f7bc4", "#3c9d68", "#d97a2b"


def outcome(of_workers: Sequence[WorkerRow], of_batches: Sequence[BatchRow]) -> Outcome:
    """What the study prints, writes and draws; the key `part` of a row determines its other keys."""
    batches = tabulate(
        of_batches, "batch_size steps optimizer lr grid accuracy against_sgd", **_HEADINGS, against_sgd="less SGD"
    )
    for table_row in batches:
        grid = table_row["grid, %"].items()
        table_row["grid, %"] = "  ".join(f"{lr:g}: {'-' if a is None else f'{a:.1f}'}" for lr, a in grid)
    rows = [{"part": "workers", **vars(row)} for row in of_workers]
    rows += [
        {
            "part": "batches",
            **flatten(row, "accuracy", "against_sgd"),
            "seeds": row.accuracy.n if row.accuracy else 0,
        }
        for row in of_batches
    ]
    return Outcome(
        tables=[
            ("One member over workers", tabulate(of_workers, _WORKER_COLUMNS, **_HEADINGS)),
            ("The batch grows, the epochs do not", batches),
        ],
        rows=rows,
        findings=[*worker_findings(of_workers), *batch_findings(of_batches)],
        title="Scaling",
        notes=["one member over n workers"] * bool(of_workers)
        + ["the batch grows, the epochs do not"] * bool(of_batches),
        panels=[*worker_panels(of_workers), *batch_panels(of_batches)],
    )


def worker_panels(rows: Sequence[WorkerRow]) -> Iterator[Panel]:
    """Examples/s, and a step's parts beside the model, of each curve."""
    for (scaling, compute), curve in worker_curves(rows).items():
        first, counts = curve[0], [row.workers for row in curve]
        kind = f"{first.cores} cores compute" if compute == REAL else f"accelerators of {compute} are emulated"
        batch = "one batch of {} for all" if scaling == STRONG else "a batch of {} for each"
        at = f"{first.model}, {batch.format(first.batch_size)}, {kind}"
        alone = first.examples_per_s
        yield Panel(
            title=f"Examples/s, {scaling} scaling",
            at=at,
            x="workers",
            y="examples/s",
            series=[
                Series(name="measured", xs=counts, ys=[row.examples_per_s for row in curve], colour=_STEP),
                Series(
                    name="compute / n + communication(n)",
                    xs=counts,
                    ys=[1000 * row.batch_size / row.predicted_ms for row in curve],
                    colour=_STEP,
                    dash=PREDICTED,
                ),
                Series(name="linear", xs=counts, ys=[alone * n for n in counts], colour="#c0c5cc", dash="dot"),
            ],
        )
        yield Panel(
            title=f"A step in parts, {scaling} scaling",
            at=at,
            x="workers",
            y="ms",
            series=[
                Series(name="measured", xs=counts, ys=[row.step_ms for row in curve], colour=_STEP),
                Series(
                    name="compute / n + communication(n)",
                    xs=counts,
                    ys=[row.predicted_ms for row in curve],
                    colour=_STEP,
                    dash=PREDICTED,
                ),
                Series(name="computing", xs=counts, ys=[row.compute_ms for row in curve], colour=_COMPUTE),
                Series(name="synchronization", xs=counts, ys=[row.sync_ms for row in curve], colour=_SYNC),
            ],
        )


def batch_panels(rows: Sequence[BatchRow]) -> Iterator[Panel]:
    """Accuracy over the batch, and over the rates of the grid at the batch where SGD begins to lose."""
    if not rows:
        return
    sizes = sorted({row.batch_size for row in rows})
    texts = {size: f"{size:,}" for size in sizes}
    series = series_of(rows, "batch_size", "accuracy", "optimizer", _OPTIMIZERS)
    lost = first_loss(rows)
    marks = []
    if lost is not None and lost[0].accuracy is not None:
        marks = [Mark(lost[0].batch_size, lost[0].accuracy.mean, f"SGD loses {LOSS:g} points")]
    at = "best rate of the grid, test split, mean and 95 % interval over seeds"
    yield Panel(
        title="Accuracy over the batch, %",
        at=at,
        x="global batch",
        y="%",
        series=series,
        x_scale="log",
        marks=marks,
        x_text=texts,
    )
    for size in sizes:
        chosen = [row for row in rows if row.batch_size == size]
        yield Panel(
            title=f"The grid at batch {size:,}: accuracy, %",
            at="validation split, one seed; what diverged is left out",
            x="learning rate",
            y="%",
            series=[
                Series(
                    name=row.optimizer,
                    xs=list(row.grid),
                    ys=list(row.grid.values()),
                    colour=_OPTIMIZERS[row.optimizer],
                )
                for row in chosen
            ],
            x_scale="log",
            x_text={lr: f"{lr:g}" for row in chosen for lr in row.grid},
        )
