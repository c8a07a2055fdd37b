"""The rows of the scaling study, one for each number of workers or batch size, and the findings from them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ensemble.bench.results import Interval, group_by

STRONG, WEAK = "strong", "weak"
REAL = "real"
SGD, LARS, LARS_DECAY = "sgd", "lars", "lars-decay"
# Percentage points that SGD must lose against a smaller batch before LARS is compared with it.
LOSS = 2.0


@dataclass(frozen=True, kw_only=True)
class WorkerRow:
    """One number of workers.

    Attributes:
        scaling: "strong", one global batch for all; "weak", one batch for each worker.
        compute: "real", on this machine's processors; or such as "100 ms", an emulated accelerator: a timed wait
            of that length for the batch of one worker, which uses no processor.
        model, precision, compression: what was trained.  cores: of all workers together.
        workers, hosts: how many.  link: the rate of the hosts' links; None on one host.
        batch_size: global.
        examples_per_s: of all workers.
        step_ms: of the slowest worker; compute_ms and sync_ms: of that, computing and waiting for others.
        communication_ms: measured without computing: a step's less that of one worker.
        predicted_ms: compute / n + communication(n), or compute + communication(n) where scaling is weak;
            `compute` is one worker's step. Real workers share the cores: n is at most their number then.
        efficiency: examples/s against n times those of one worker.
        sent_mb: that a worker sends in a step, 10^6 bytes.
    """

    scaling: str
    compute: str
    model: str
    precision: str
    compression: str
    cores: int
    workers: int
    hosts: int
    link: str | None
    batch_size: int
    examples_per_s: float
    step_ms: float
    compute_ms: float
    sync_ms: float
    communication_ms: float
    predicted_ms: float
    efficiency: float
    sent_mb: float

    @property
    def shares_cores(self) -> bool:
        """Whether more workers computed than there are cores."""
        return self.compute == REAL and self.workers > self.cores


def worker_curves(rows: Sequence[WorkerRow]) -> dict[tuple[str, str], list[WorkerRow]]:
    """The rows of each scaling and compute."""
    return group_by(rows, lambda row: (row.scaling, row.compute))


def worker_findings(rows: Sequence[WorkerRow]) -> Iterator[str]:
    """A line for each curve."""
    for (scaling, compute), curve in worker_curves(rows).items():
        last = [row for row in curve if not row.shares_cores][-1]
        if last.workers > 1:
            yield (
                f"{scaling} scaling, compute {compute}: {last.workers} workers train "
                f"{last.examples_per_s / curve[0].examples_per_s:.3g} x the examples/s of one (efficiency "
                f"{100 * last.efficiency:.0f} %), {100 * last.sync_ms / last.step_ms:.0f} % of a step is "
                f"synchronization; {last.step_ms:.3g} ms a step, where the model says {last.predicted_ms:.3g} ms"
            )
    if any(row.shares_cores for row in rows):
        yield (
            f"more than {rows[0].cores} workers that compute share {rows[0].cores} cores: they cannot be faster; "
            "--step-ms emulates an accelerator for each worker"
        )


# --- batches -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class BatchRow:
    """One batch size with one optimizer, at the best learning rate of its grid.

    Attributes:
        batch_size, optimizer: what was run; "lars-decay" decays and adapts normalization too.
        steps: of the whole training.
        lr: the best on the validation split.  edge: whether it is an end of the grid: a better one may lie beyond.
        grid: rate -> accuracy there in percent, one seed; None where it diverged.
        accuracy: on the test split, fresh seeds; None where all diverged.
        against_sgd: the difference from SGD at the same batch, paired by seed, points.
        diverged: seeds that did not finish.
    """

    batch_size: int
    optimizer: str
    steps: int
    lr: float | None
    edge: bool
    grid: dict[float, float | None]
    accuracy: Interval | None = None
    against_sgd: Interval | None = None
    diverged: int = 0


def first_loss(rows: Sequence[BatchRow], points: float = LOSS) -> tuple[BatchRow, BatchRow] | None:
    """The smallest batch at which the best SGD has lost `points` against its best at a smaller batch.

    Returns:
        both rows; None where SGD does not lose that much.
    """
    sgd = sorted((row for row in rows if row.optimizer == SGD and row.accuracy), key=lambda row: row.batch_size)
    best: BatchRow | None = None
    for row in sgd:
        assert row.accuracy is not None
        if best is None or best.accuracy is None or row.accuracy.mean > best.accuracy.mean:
            best = row
        elif best.accuracy.mean - row.accuracy.mean >= points:
            return row, best
    return None


def batch_findings(rows: Sequence[BatchRow]) -> Iterator[str]:
    """LARS against SGD where SGD begins to lose and at the largest batch, and grids that were too narrow."""
    if not rows:
        return
    lost = first_loss(rows)
    if lost is None:
        yield f"nowhere does the best SGD lose {LOSS:g} points against a smaller batch: take larger --batches"
    else:
        row, best = lost
        yield (
            f"the best SGD has {best.accuracy} % at batch {best.batch_size} and loses {LOSS:g} points first at "
            f"{row.batch_size}: {row.accuracy} %"
        )
        yield from _against_sgd(rows, row.batch_size)
    largest = max(row.batch_size for row in rows)
    if lost is None or lost[0].batch_size != largest:
        yield from _against_sgd(rows, largest)
    edges = [f"{row.optimizer} at {row.batch_size} (lr {row.lr:g})" for row in rows if row.edge]
    if edges:
        yield f"the best rate is an end of its grid, a better one may lie beyond: {', '.join(edges)}"


def _against_sgd(rows: Sequence[BatchRow], batch_size: int) -> Iterator[str]:
    """The other optimizers' differences from SGD at one batch size."""
    for row in rows:
        difference = row.against_sgd
        if row.batch_size != batch_size or difference is None:
            continue
        text = f"{row.optimizer} at {batch_size}: {row.accuracy} %, {difference.mean:+.2f} points against SGD"
        if difference.low is None or difference.high is None:
            yield f"{text}, one seed"
        else:
            ends = f"{difference.low:+.2f} to {difference.high:+.2f}"
            yield f"{text}, 95 % interval {ends} over {difference.n} seeds"
