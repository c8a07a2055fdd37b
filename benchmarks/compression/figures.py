"""The tables and the plot of the compression study."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from benchmarks.compression.rows import (
    AccuracyRow,
    CodecRow,
    Crossover,
    ExchangeRow,
    Results,
    findings,
    format_bps,
)
from benchmarks.compression.schemes import PLAIN, UNLIMITED
from ensemble.bench.charts import Mark, Panel, Series, bar_panel, series_of
from ensemble.bench.results import Outcome, flatten, group_by, tabulate

_COLOURS = {
    PLAIN: "#8a94a3",
    "fp16": "#b58a3c",
    "bf16": "#d9a62a",
    "qsgd8": "#3c9d68",
    "qsgd4": "#2f7bc4",
    "qsgd2": "#7a5bc4",
    "onebit": "#c4432f",
    "powersgd": "#d97a2b",
}
_EXCHANGE_COLUMNS = "hosts rate what scheme time_ms speedup sent_mb wire_mb ratio error"


def outcome(results: Results) -> Outcome:
    """What the study prints, writes and draws; the key `part` of a row determines its other keys."""
    exchanges = [replace(row, rate=row.rate or UNLIMITED) for row in results.exchanges]
    timed_steps = " step_ms" if any(row.step_ms is not None for row in exchanges) else ""
    kinds = {"codec": results.codecs, "exchange": results.exchanges, "crossover": results.crossovers()}
    rows = [{"part": part, **vars(row)} for part, own in kinds.items() for row in own]
    rows += [{"part": "accuracy", **flatten(row, "accuracy", "difference")} for row in results.accuracies]
    return Outcome(
        tables=[
            ("Codecs on one core (GB/s of fp32)", tabulate(results.codecs)),
            ("Exchanges", tabulate(exchanges, _EXCHANGE_COLUMNS + timed_steps)),
            (
                "Where compression pays, by the link's rate (of those measured)",
                [_crossover_columns(crossover) for crossover in results.crossovers()],
            ),
            ("Accuracy against bits", [_accuracy_columns(row) for row in results.accuracies]),
        ],
        rows=rows,
        findings=list(findings(results)),
        title="Compression",
        notes=("gradients exchanged by scatter-reduce and all-gather", "links shaped by tbf, a rank a host"),
        panels=list(panels(results)),
    )


def _crossover_columns(row: Crossover) -> dict[str, Any]:
    verdict = row.verdict.removeprefix("pays ").replace("never pays", "never")
    rate = "" if row.bps is None else f" {format_bps(row.bps)}"
    return {"hosts": row.hosts, "what": row.what, "scheme": row.scheme, "faster than fp32": verdict + rate}


def _accuracy_columns(row: AccuracyRow) -> dict[str, Any]:
    return {
        "model": row.model,
        "data": row.data,
        "scheme": row.scheme,
        "bits": row.bits,
        "seeds": row.accuracy.n if row.accuracy else 0,
        "accuracy_%": str(row.accuracy) if row.accuracy else None,
        "less_fp32": str(row.difference) if row.difference and row.scheme != PLAIN else None,
        "note": row.note,
    }


def _colour(scheme: str) -> str | None:
    return _COLOURS.get(scheme.partition("+")[0])


def panels(results: Results) -> Iterator[Panel]:
    """The exchanges over the rate, bytes, codecs, and accuracy of each model."""
    yield from _exchanges(results)
    if results.exchanges:
        yield from _bytes(results.exchanges)
    if results.codecs:
        yield _codecs(results.codecs)
    for rows in group_by(results.accuracies, lambda row: row.model).values():
        yield _accuracy(rows)


def _exchanges(results: Results) -> Iterator[Panel]:
    for (hosts, what), here in group_by(results.exchanges, lambda row: (row.hosts, row.what)).items():
        if len({row.reached_bps for row in here}) < 2:
            continue
        series = []
        for scheme, own in group_by(here, lambda row: row.scheme).items():
            own.sort(key=lambda row: row.reached_bps)
            times = [row.time_ms for row in own]
            series.append(
                Series(name=scheme, xs=[row.reached_bps for row in own], ys=times, colour=_colour(scheme))
            )
        marks = [
            Mark(c.bps, c.at_ms, c.scheme)
            for c in results.crossovers()
            if (c.hosts, c.what) == (hosts, what) and c.bps is not None and c.at_ms is not None
        ]
        text = {row.reached_bps: format_bps(row.reached_bps) for row in here}
        yield Panel(
            title=f"Exchange of {what}, ms",
            at=f"{hosts} hosts; marked: where a scheme stops being faster than fp32 ({PLAIN})",
            x="rate of each host's link, as fp32 reached it",
            y="ms",
            series=series,
            x_scale="log",
            log_y=True,
            marks=marks,
            x_text=text,
        )


def _bytes(rows: Sequence[ExchangeRow]) -> Iterator[Panel]:
    """Bytes of the largest message on the most hosts, counted in two places."""
    most = max(row.hosts for row in rows)
    largest = max((row for row in rows if row.hosts == most), key=lambda row: row.values)
    here = [row for row in rows if (row.hosts, row.what) == (most, largest.what)]
    one = [row for row in here if row.rate == here[0].rate]
    schemes = [row.scheme for row in one]
    series = [Series(name="counted in code", xs=schemes, ys=[row.sent_mb for row in one], colour="#2f7bc4")]
    if one[0].wire_mb is not None:
        at_interface = [row.wire_mb for row in one]
        series.append(Series(name="counted at the interface", xs=schemes, ys=at_interface, colour="#9fb8d4"))
    yield bar_panel(
        "Bytes that a host sends in an exchange, MB",
        series,
        at=f"{largest.what}, {most} hosts; at the interface with headers and acknowledgements",
        y="MB",
        log_y=True,
    )


def _codecs(rows: Sequence[CodecRow]) -> Panel:
    schemes = [
        row.scheme if row.form != "torch" or row.ratio <= 2 else f"{row.scheme}, plain torch" for row in rows
    ]
    return bar_panel(
        "Codecs on one core, GB/s of fp32",
        [
            Series(name="encode", xs=schemes, ys=[row.encode_gbs for row in rows], colour="#2f7bc4"),
            Series(name="decode", xs=schemes, ys=[row.decode_gbs for row in rows], colour="#3c9d68"),
        ],
        y="GB/s",
        log_y=True,
    )


def _accuracy(rows: Sequence[AccuracyRow]) -> Panel:
    plain = next((row.accuracy for row in rows if row.scheme == PLAIN), None)
    series = series_of(
        [row for row in rows if row.scheme != PLAIN],
        lambda row: f"{row.scheme.partition('+')[0]}: {row.bits:.3g} bit",
        "difference",
        lambda row: "with error feedback" if row.feedback else "without error feedback",
        {"without error feedback": "#2f7bc4", "with error feedback": "#d97a2b"},
    )
    return bar_panel(
        f"{rows[0].model} on {rows[0].data}: accuracy less that of fp32, points",
        series,
        at=f"fp32: {plain} %; test split, paired by seed, 95 % interval; bits of a gradient's value on the wire",
        y="points",
    )
