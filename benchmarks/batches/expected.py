"""What Jia et al. 2018 claim of large batches, beside what was measured."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from benchmarks.batches.measure import LARS, BatchRow
from benchmarks.results import Claim, Outcome, outcome_of, show_claims

# Points of accuracy within which a large batch is said to lose nothing.
NOTHING = 1.0
# 90 epochs of 1,281,167 images in batches of 65,536.
_PAPER_STEPS = 1759
_COLUMNS = "batch_size epochs steps optimizer lr grid_percent accuracy difference less_sgd note"
_HEADINGS = {"batch_size": "batch", "grid_percent": "grid, %", "accuracy": "accuracy, %"}
_HEADINGS |= {"difference": "less the small batch", "less_sgd": "less SGD"}


def show_accuracy(rows: Sequence[BatchRow]) -> Outcome:
    """What the study prints and writes."""
    return show_claims(list(accuracy_claims(rows))) + outcome_of(
        rows,
        "As many epochs, fewer steps",
        _COLUMNS,
        headings=_HEADINGS,
        part="accuracy",
        findings=accuracy_findings(rows),
    )


def accuracy_claims(rows: Sequence[BatchRow]) -> Iterator[Claim]:
    """What LARS with the largest batch loses in as many epochs, and what is kept in more steps."""
    base = rows[0] if rows else None
    alike = [row for row in rows if base and row.optimizer == LARS and row.epochs == base.epochs]
    large = max(alike, key=lambda row: row.batch_size, default=None)
    if base is None or large is None or large.difference is None:
        return
    lost, low, high = large.difference.ends
    why = ""
    if not _is_kept(large):
        why = f"in {large.steps} steps: {large.difference.describe()}; the paper's 90 epochs have {_PAPER_STEPS:,}"
        for row in rows:
            if row.optimizer == LARS and _is_kept(row):
                why += f"; within a point of {base.epochs} epochs of the small batch in {row.steps} "
                why += f"(batch {row.batch_size:,}, {row.epochs} epochs)"
    if large.less_sgd is not None and large.less_sgd.sign < 0:
        why += f"{'; ' if why else ''}sgd there is better: {large.less_sgd.describe()}"
    at = f"{large.accuracy} % at {large.batch_size:,}, {base.accuracy} % at {base.batch_size:,}"
    yield Claim(
        paper="Jia et al. 2018",
        claim=f"a batch of 64 K loses no accuracy; here {large.batch_size:,} on {base.data}",
        published="75.8 % top-1 at 64 K, 75.3 % at 256",
        measured=f"{lost:+.2f} points in {large.epochs} epochs: {at}, {large.difference.n} seeds",
        spread="" if low is None or high is None else f"{low:+.2f} to {high:+.2f} points",
        loses=why,
    )


def _is_kept(row: BatchRow) -> bool:
    """Whether the interval of the difference says that no more than `NOTHING` is lost."""
    low = row.difference.ends[1] if row.difference else None
    return low is not None and low >= -NOTHING


def accuracy_findings(rows: Sequence[BatchRow]) -> Iterator[str]:
    """How far each case is from the baseline and from SGD, and grids that were too narrow."""
    for row in rows:
        where = f"{row.optimizer} at {row.batch_size}, {row.epochs} epochs"
        if row.difference is not None:
            yield f"{where}, less {rows[0].optimizer} at {rows[0].batch_size}: {row.difference.describe()}"
        if row.less_sgd is not None:
            yield f"{where}, less sgd there: {row.less_sgd.describe()}"
    edges = [f"{row.optimizer} at {row.batch_size} (lr {row.lr:g})" for row in rows if row.edge]
    if edges:
        yield f"the best rate is an end of its grid, a better one may lie beyond: {', '.join(edges)}"
