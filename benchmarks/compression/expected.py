"""What compression is expected to save and to cost: the tables, findings and plot of the compression study."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from benchmarks.compression.measure import PLAIN, AccuracyRow, CodecRow, ExchangeRow, SameTimeRow
from benchmarks.compression.published import ACCURACIES, QSGD_PAPER
from ensemble.bench.charts import Mark, Panel, bar_panel
from ensemble.bench.results import Claim, Outcome, group_by, outcome_of, series_of, show_claims

_COLOURS = {
    PLAIN: "#8a94a3",
    "fp16": "#b58a3c",
    "bf16": "#d9a62a",
    "qsgd16": "#24a0b3",
    "qsgd8": "#3c9d68",
    "qsgd4": "#2f7bc4",
    "qsgd2": "#7a5bc4",
    "onebit": "#c4432f",
    "powersgd": "#d97a2b",
}
_COLOURS |= {f"{name}+ef": colour for name, colour in _COLOURS.items()}
_WITH, _WITHOUT = "with error feedback", "without error feedback"
_FEEDBACK = {_WITHOUT: "#2f7bc4", _WITH: "#d97a2b"}
_EXCHANGE_COLUMNS = "hosts rate what scheme time_ms speedup sent_mb wire_mb ratio error"
_SAME_TIME_COLUMNS = "model data rate scheme step_ms speedup trained seeds accuracy difference note"
_ACCURACY_COLUMNS = "model data scheme bits seeds accuracy difference note"


@dataclass(frozen=True, kw_only=True)
class Crossover:
    """Where a scheme is faster than the plain exchange: "below" a rate, "always", "never".

    Attributes:
        hosts, what, scheme: as of an `ExchangeRow`.
        bps: bit/s of the plain exchange on a host's link at the crossover; None where no such rate was measured.
        at_ms: of both exchanges at the crossover.
    """

    hosts: int
    what: str
    scheme: str
    kind: str
    bps: float | None
    at_ms: float | None

    @property
    def is_faster(self) -> str:
        """For people."""
        return self.kind if self.bps is None else f"{self.kind} {format_bps(self.bps)}"


def show_codecs(rows: Sequence[CodecRow]) -> Outcome:
    """What the part 'codecs' prints and writes."""
    return outcome_of(rows, "Codecs on one core (GB/s of fp32)", part="codec")


def show_exchanges(rows: Sequence[ExchangeRow]) -> Outcome:
    """What the part 'exchanges' prints, writes and draws."""
    found, crossed = list(crossovers(rows)), "Where compression pays, by the link's rate (of those measured)"
    notes = ("gradients exchanged by scatter-reduce and all-gather", "links shaped by tbf, a rank a host")
    drawn = _exchange_panels(rows, found)
    columns, headings = "hosts what scheme is_faster", {"is_faster": "faster than fp32"}
    exchanges = outcome_of(rows, "Exchanges", _EXCHANGE_COLUMNS, part="exchange", notes=notes, panels=drawn)
    return exchanges + outcome_of(found, crossed, columns, headings=headings, part="crossover")


def show_accuracies(rows: Sequence[AccuracyRow], same_time: Sequence[SameTimeRow] = ()) -> Outcome:
    """What the part 'accuracy' prints, writes and draws."""
    return (
        show_claims(list(claims(rows)))
        + _show_table(rows)
        + outcome_of(
            same_time,
            "Accuracy when fp32 has finished",
            _SAME_TIME_COLUMNS,
            headings={"accuracy": "accuracy, %", "difference": "less fp32"},
            part="same-time",
        )
    )


def claims(rows: Sequence[AccuracyRow]) -> Iterator[Claim]:
    """The published accuracy of 8 and 4 bits beside that of networks trained here."""
    for bits in (8, 4):
        told = [packed - plain for plain, packed, each in ACCURACIES.values() if each == bits]
        found = [row for row in rows if row.scheme == f"qsgd{bits}" and row.difference is not None]
        if found:
            lost = [
                row.model for row in found if row.difference and row.difference.mean < -(row.difference.half or 0)
            ]
            yield Claim(
                paper=QSGD_PAPER,
                claim=f"{bits} bits lose no accuracy",
                published=f"{min(told):+.2f} to {max(told):+.2f} points, of {len(told)} networks"
                if len(told) > 1
                else f"{told[0]:+.2f} points, of one network",
                measured=", ".join(f"{row.model} {row.difference} points" for row in found),
                spread=f"{found[0].seeds} seeds, 95 %",
                loses=f"accuracy of {', '.join(lost)}" if lost else "",
            )


def _show_table(rows: Sequence[AccuracyRow]) -> Outcome:
    return outcome_of(
        rows,
        "Accuracy against bits",
        _ACCURACY_COLUMNS,
        headings={"accuracy": "accuracy, %", "difference": "less fp32"},
        part="accuracy",
        findings=findings(rows),
        panels=_accuracy_panels(rows),
    )


def findings(rows: Sequence[AccuracyRow]) -> Iterator[str]:
    """Schemes whose accuracy differs from that of fp32."""
    for row in rows:
        found = row.difference
        if found is not None and found.half is not None and abs(found.mean) > found.half:
            yield f"{row.model}: {row.scheme} at {row.bits:.3g} bits a value less fp32 is {found.describe()}"


def format_bps(bps: float) -> str:
    """A rate with its unit."""
    return f"{bps / 1e9:.3g} Gbit/s" if bps >= 1e9 else f"{bps / 1e6:.3g} Mbit/s"


def crossovers(rows: Sequence[ExchangeRow]) -> Iterator[Crossover]:
    """For each number of hosts, message and scheme, where several rates were measured."""
    plain = {(row.hosts, row.what, row.rate): row.time_ms for row in rows if row.scheme == PLAIN}
    for (hosts, what, scheme), own in group_by(rows, lambda row: (row.hosts, row.what, row.scheme)).items():
        points = [(row.reached_bps, plain[hosts, what, row.rate], row.time_ms) for row in own]
        if scheme != PLAIN and len(points) > 1:
            kind, bps, at_ms = crossover(points)
            yield Crossover(hosts=hosts, what=what, scheme=scheme, kind=kind, bps=bps, at_ms=at_ms)


def crossover(points: Sequence[tuple[float, float, float]]) -> tuple[str, float | None, float | None]:
    """Where a compressed exchange stops being faster, by interpolation between rates, on logarithmic scales.

    Args:
        points: (rate, plain exchange's time, compressed exchange's time), two or more of different rates.

    Returns:
        kind, rate and time as `Crossover` has them; of several crossings the one at the highest rate.
    """
    ordered = [
        (math.log(plain / packed), math.log(rate), math.log(plain)) for rate, plain, packed in sorted(points)
    ]
    last = max((number for number, (gain, _, _) in enumerate(ordered) if gain > 0), default=-1)
    if last in (-1, len(ordered) - 1):
        return "never" if last == -1 else "always", None, None
    (gain, rate, time), (next_gain, next_rate, next_time) = ordered[last : last + 2]
    share = gain / (gain - next_gain)
    return "below", math.exp(rate + share * (next_rate - rate)), math.exp(time + share * (next_time - time))


def _exchange_panels(rows: Sequence[ExchangeRow], found: Sequence[Crossover]) -> Iterator[Panel]:
    """The time of each message over the rate."""
    for (hosts, what), here in group_by(rows, lambda row: (row.hosts, row.what)).items():
        text = {row.reached_bps: format_bps(row.reached_bps) for row in here}
        by_rate = sorted(here, key=lambda row: row.reached_bps)
        own = [each for each in found if (each.hosts, each.what) == (hosts, what)]
        if len(text) > 1:
            yield Panel(
                title=f"Exchange of {what}, ms",
                at=f"{hosts} hosts; marked: where a scheme stops being faster than fp32 ({PLAIN})",
                x="rate of each host's link, as fp32 reached it",
                y="ms",
                series=series_of(by_rate, "reached_bps", "time_ms", "scheme", _COLOURS),
                x_scale="log",
                log_y=True,
                marks=[Mark(each.bps, each.at_ms, each.scheme) for each in own if each.bps and each.at_ms],
                x_text=text,
            )


def _accuracy_panels(rows: Sequence[AccuracyRow]) -> Iterator[Panel]:
    """Each model's accuracy less that of fp32, by scheme and bits."""
    for model, own in group_by(rows, lambda row: row.model).items():
        series = series_of(
            own,
            lambda row: f"{row.scheme.removesuffix('+ef')}: {row.bits:.3g} bit",
            "difference",
            lambda row: _WITH if row.scheme.endswith("+ef") else _WITHOUT,
            _FEEDBACK,
        )
        plain = next((row.accuracy for row in own if row.scheme == PLAIN), None)
        at = f"fp32: {plain} %; test split, paired by seed, 95 % interval; bits of a gradient's value on the wire"
        yield bar_panel(f"{model} on {own[0].data}: accuracy less that of fp32, points", series, at=at, y="points")
