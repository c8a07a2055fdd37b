"""What half precision should save and not cost: the table and findings of the precision study."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from benchmarks.precision.measure import FP32, Row
from benchmarks.results import Claim, Outcome, outcome_of, show_claims

_FRNN, _FRNN_PARAMETERS = "Svyatkovskiy et al. 2019", 70e6
_COLUMNS = "model data precision step_ms samples_per_s memory_mb exchange_mb accuracy difference note"
_HEADINGS = {"samples_per_s": "samples/s", "accuracy": "accuracy, %", "difference": "less fp32"}
_COSTS = {"samples_per_s": "samples/s", "memory_mb": "memory", "exchange_mb": "bytes sent"}


def make_outcome(rows: Sequence[Row]) -> Outcome:
    """What the study prints and writes."""
    shown = outcome_of(rows, columns=_COLUMNS, headings=_HEADINGS, findings=findings(rows))
    return show_claims(list(claims(rows))) + shown


def claims(rows: Sequence[Row]) -> Iterator[Claim]:
    """Half precision of recurrent networks beside the paper's, of each model that was trained in both."""
    plain = {row.model: row for row in rows if row.precision == FP32}
    for half in (row for row in rows if row.precision != FP32 and row.model in plain and row.accuracy):
        full = plain[half.model]
        costs = [(getattr(half, name), getattr(full, name), label) for name, label in _COSTS.items()]
        speed, *less = [(ours / theirs if ours and theirs else None, label) for ours, theirs, label in costs]
        loses = ["slower"] if speed[0] is not None and speed[0] < 1 else []
        loses += [f"more {label}" for ratio, label in less if ratio is not None and ratio > 1]
        if half.difference and (half.difference.ends[2] or 0) < 0:
            loses.append("less accurate")
        if half.parameters >= _FRNN_PARAMETERS:
            ratios = ", ".join(
                f"{ratio:.2g} x the {label}" for ratio, label in (speed, *less) if ratio is not None
            )
            yield Claim(
                paper=_FRNN,
                claim="networks of more than 70 million weights train in half precision",
                published="more than 70 million weights",
                measured=f"{half.parameters / 1e6:.1f} million in {half.precision}"
                + (ratios and f": {ratios} of fp32"),
                ratio=half.parameters / _FRNN_PARAMETERS,
                loses=" and ".join(loses),
            )
        if full.accuracy:
            seeds = "one seed" if half.seeds == 1 else f"{half.seeds} seeds"
            yield Claim(
                paper=_FRNN,
                claim=f"test performance is comparable to single precision; here {half.model}, {half.data}",
                published="comparable",
                measured=f"{half.precision} {half.accuracy} %, fp32 {full.accuracy} %, {seeds}",
                spread="" if half.difference is None else f"{half.difference} points, paired by seed",
                loses=" and ".join(loses),
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
