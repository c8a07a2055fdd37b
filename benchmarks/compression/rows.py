"""The rows of the compression study, one for each case of its parts, and the findings from them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.compression.schemes import PLAIN, UNLIMITED
from ensemble.bench.results import Interval, group_by, quartiles


@dataclass(frozen=True, kw_only=True)
class CodecRow:
    """One codec on one core.

    Attributes:
        scheme: the compression.  form: what runs it: "numba", "torch".
        ratio: fp32 bytes over packed bytes.  bits: of a packed value.
        encode_gbs, feedback_gbs, decode_gbs: 10^9 bytes of fp32 a second; feedback: with the error in place.
        error: relative error of a message of normally distributed values.
        mean_error, fed_error: of the mean of 16 messages of the same values, without and with error feedback.
    """

    scheme: str
    form: str
    ratio: float
    bits: float
    encode_gbs: float
    feedback_gbs: float
    decode_gbs: float
    error: float
    mean_error: float
    fed_error: float


@dataclass(frozen=True, kw_only=True)
class ExchangeRow:
    """One scheme over one link.

    Attributes:
        hosts, rate: hosts, a rank each, and the rate of their links; None for no limit.
        reached_bps: bit/s that the plain exchange of this message reached on a host's link: a little less than the
            link's rate (headers), or much less where not the link but the machine limits it.
        what: the message, such as "16 MiB", or the network whose gradient it was.  values: in it.
        scheme: its compression.
        time_ms: an exchange, the median of the slowest rank; low_ms, high_ms: its quartiles.
        speedup: times as fast as the plain exchange.
        sent_mb: 10^6 bytes a rank sent, by the communicator's count.  wire_mb: the same at the busiest host's
            interface, with headers and acknowledgements; None on the loopback.
        ratio: of the plain exchange's sent bytes to these.
        error: relative error of the sum.
        step_ms: a training step with this exchange, computed for real on the cores that all ranks share.
    """

    hosts: int
    rate: str | None
    reached_bps: float
    what: str
    values: int
    scheme: str
    time_ms: float
    low_ms: float
    high_ms: float
    speedup: float
    sent_mb: float
    wire_mb: float | None
    ratio: float
    error: float
    step_ms: float | None


@dataclass(frozen=True, kw_only=True)
class Crossover:
    """The rate below which a scheme is faster than the plain exchange.

    Attributes:
        hosts, what, scheme: as above.
        bps: bit/s of the plain exchange on a host's link at the crossover; None where no such rate was measured:
            `verdict` is then one of the other two.
        verdict: "pays below", "pays always", "never pays".
        at_ms: of both exchanges at the crossover.
    """

    hosts: int
    what: str
    scheme: str
    verdict: str
    bps: float | None
    at_ms: float | None


@dataclass(frozen=True, kw_only=True)
class AccuracyRow:
    """One scheme's accuracy.

    Attributes:
        model, data: what was trained.  scheme: their compression.  feedback: with error feedback.
        bits: of a gradient's value on the wire, on the average over the model; small parameters travel as fp32.
        accuracy: percent on the test split, mean and interval over seeds.
        difference: from fp32 with the same seed, percentage points.
        note: the reason why something is missing.
    """

    model: str
    data: str
    scheme: str
    feedback: bool
    bits: float
    accuracy: Interval | None = None
    difference: Interval | None = None
    note: str | None = None


@dataclass(frozen=True, kw_only=True)
class Results:
    """All rows of a study."""

    codecs: Sequence[CodecRow] = ()
    exchanges: Sequence[ExchangeRow] = ()
    accuracies: Sequence[AccuracyRow] = ()

    def crossovers(self) -> list[Crossover]:
        """For each number of hosts, message and scheme."""
        return list(_crossovers(self.exchanges))


def exchange_rows(
    count: int, rate: str, label: str, values: int, by_rank: Sequence[dict[str, dict[str, Any]]], on_wire: bool
) -> Iterator[ExchangeRow]:
    """The rows of `measure.measure`.

    Args:
        count: of hosts.  label: what was exchanged.  values: in it.
        by_rank: what each rank returned.
        on_wire: whether an interface counted the bytes.
    """
    slowest = {
        scheme: max((rank[scheme]["times"] for rank in by_rank), key=statistics.median) for scheme in by_rank[0]
    }
    plain_s, plain_sent = statistics.median(slowest[PLAIN]), max(rank[PLAIN]["sent"] for rank in by_rank)
    for scheme, times in slowest.items():
        middle, (low, high) = statistics.median(times), quartiles(times)
        sent = max(rank[scheme]["sent"] for rank in by_rank)
        steps = max((rank[scheme]["steps"] for rank in by_rank), key=lambda each: statistics.median(each or [0.0]))
        yield ExchangeRow(
            hosts=count,
            rate=None if rate == UNLIMITED else rate,
            reached_bps=8 * plain_sent / plain_s,
            what=label,
            values=values,
            scheme=scheme,
            time_ms=1e3 * middle,
            low_ms=1e3 * low,
            high_ms=1e3 * high,
            speedup=plain_s / middle,
            sent_mb=sent / 1e6,
            wire_mb=max(rank[scheme]["wire"] for rank in by_rank) / 1e6 if on_wire else None,
            ratio=plain_sent / sent,
            error=by_rank[0][scheme]["error"],
            step_ms=1e3 * statistics.median(steps) if steps else None,
        )


def format_bps(bps: float) -> str:
    """A rate with its unit."""
    return f"{bps / 1e9:.3g} Gbit/s" if bps >= 1e9 else f"{bps / 1e6:.3g} Mbit/s"


def crossover(points: Sequence[tuple[float, float, float]]) -> tuple[str, float | None, float | None]:
    """Where a compressed exchange stops being faster, by interpolation between rates, on logarithmic scales.

    Args:
        points: (rate, plain exchange's time, compressed exchange's time), two or more of different rates.

    Returns:
        verdict, rate and time as `Crossover` has them; of several crossings the one at the highest rate.
    """
    ordered = sorted(points)
    gains = [math.log(plain / packed) for _, plain, packed in ordered]
    if gains[-1] > 0:
        return "pays always", None, None
    last = next((i for i in range(len(gains) - 1, -1, -1) if gains[i] > 0), None)
    if last is None:
        return "never pays", None, None
    share = gains[last] / (gains[last] - gains[last + 1])
    (rate, plain, _), (next_rate, next_plain, _) = ordered[last : last + 2]
    return "pays below", _interpolate(rate, next_rate, share), _interpolate(plain, next_plain, share)


def _interpolate(low: float, high: float, share: float) -> float:
    return math.exp(math.log(low) + share * (math.log(high) - math.log(low)))


def _crossovers(rows: Sequence[ExchangeRow]) -> Iterator[Crossover]:
    plain = {(row.hosts, row.what, row.rate): row.time_ms for row in rows if row.scheme == PLAIN}
    for (hosts, what, scheme), own in group_by(rows, lambda row: (row.hosts, row.what, row.scheme)).items():
        points = [(row.reached_bps, plain[hosts, what, row.rate], row.time_ms) for row in own]
        if scheme != PLAIN and len(points) > 1:
            verdict, bps, at_ms = crossover(points)
            yield Crossover(hosts=hosts, what=what, scheme=scheme, verdict=verdict, bps=bps, at_ms=at_ms)


def findings(results: Results) -> Iterator[str]:
    """Conclusions, one line each."""
    for row in results.codecs:
        if row.scheme == "qsgd4":
            yield (
                f"qsgd4 by {row.form}: {row.ratio:.2f} x fewer bytes, encodes {row.encode_gbs:.2f} GB/s, decodes "
                f"{row.decode_gbs:.2f} GB/s of fp32 on one core"
            )
    for (hosts, what), here in group_by(results.exchanges, lambda row: (row.hosts, row.what)).items():
        slowest = min(here, key=lambda row: row.reached_bps).rate
        there = [row for row in here if row.rate == slowest and row.scheme != PLAIN]
        each = ", ".join(f"{row.scheme} {row.speedup:.2f} x ({row.ratio:.1f} x fewer bytes)" for row in there)
        if each:
            yield f"{what}, {hosts} hosts, links {slowest or 'unlimited'}, against fp32: {each}"
        pays = [c for c in results.crossovers() if (c.hosts, c.what) == (hosts, what)]
        if pays:
            verdicts = [f"{c.scheme} {c.verdict}{'' if c.bps is None else ' ' + format_bps(c.bps)}" for c in pays]
            yield f"{what}, {hosts} hosts: {', '.join(verdicts)}"
    for accuracy in results.accuracies:
        difference = accuracy.difference
        if accuracy.scheme != PLAIN and difference is not None and difference.contains(0.0) is False:
            yield (
                f"{accuracy.model}: {accuracy.scheme} differs from fp32 by {difference} points "
                f"at {accuracy.bits:.3g} bits a value"
            )
