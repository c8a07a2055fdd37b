"""The plot of the scaling study."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from ensemble.bench import charts
from ensemble.bench.charts import PREDICTED, Mark, Panel, Series
from ensemble.bench.scaling import batches, workers
from ensemble.bench.scaling.batches import LARS, LARS_DECAY, SGD, first_loss

_OPTIMIZERS = {SGD: "#8a94a3", LARS: "#2f7bc4", LARS_DECAY: "#d97a2b"}
_STEP, _COMPUTE, _SYNC = "#2f7bc4", "#3c9d68", "#d97a2b"


def worker_panels(rows: Sequence[workers.Row]) -> Iterator[Panel]:
    """Examples/s, and a step's parts beside the model, of each curve."""
    curves: dict[tuple[str, str], list[workers.Row]] = {}
    for row in rows:
        curves.setdefault((row.scaling, row.compute), []).append(row)
    for (scaling, compute), curve in curves.items():
        first, counts = curve[0], [row.workers for row in curve]
        kind = (
            f"{first.cores} cores compute"
            if compute == workers.REAL
            else f"accelerators of {compute} are emulated"
        )
        batch = "one batch of {} for all" if scaling == workers.STRONG else "a batch of {} for each"
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


def batch_panels(rows: Sequence[batches.Row]) -> Iterator[Panel]:
    """Accuracy over the batch, and over the rates of the grid at the batch where SGD begins to lose."""
    sizes = sorted({row.batch_size for row in rows})
    texts = {size: f"{size:,}" for size in sizes}
    series = []
    for optimizer, colour in _OPTIMIZERS.items():
        own = [(row.batch_size, row.accuracy) for row in rows if row.optimizer == optimizer and row.accuracy]
        if own:
            means = [accuracy.mean for _, accuracy in own]
            series.append(
                Series(
                    name=optimizer,
                    xs=[size for size, _ in own],
                    ys=means,
                    low=[m if a.low is None else a.low for m, (_, a) in zip(means, own, strict=True)],
                    high=[m if a.high is None else a.high for m, (_, a) in zip(means, own, strict=True)],
                    colour=colour,
                )
            )
    lost = first_loss(rows)
    marks = []
    if lost is not None and lost[0].accuracy is not None:
        marks = [Mark(lost[0].batch_size, lost[0].accuracy.mean, f"SGD loses {batches.LOSS:g} points")]
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


def write_plot(of_workers: Sequence[workers.Row], of_batches: Sequence[batches.Row], path: Path) -> None:
    """Write the figure to a file that opens without a network."""
    panels = [*worker_panels(of_workers)] if of_workers else []
    panels += [*batch_panels(of_batches)] if of_batches else []
    said = [
        *["one member over n workers"] * bool(of_workers),
        *["the batch grows, the epochs do not"] * bool(of_batches),
    ]
    charts.write(charts.figure("Scaling", said, panels), path)
