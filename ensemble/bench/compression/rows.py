"""What the compression study found: a row for each case of its parts, and what rows say beside each other."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from ensemble.bench.compression.schemes import PLAIN
from ensemble.bench.intervals import Interval, flat


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

    part: str = field(default="codec", init=False)
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
        reached_bps: bit/s that the plain exchange of this message came to on a host's link: a little less than the
            link's rate (headers), or much less where not the link but the machine limits it.
        what: the message, such as "16 MiB", or the network whose gradient it was.  values: in it.
        scheme: what it travelled as.
        time_ms: an exchange, the median of the slowest rank; low_ms, high_ms: its quartiles.
        speedup: times as fast as the plain exchange.
        sent_mb: 10^6 bytes a rank sent, by the communicator's count.  wire_mb: the same at the busiest host's
            interface, with headers and acknowledgements; None on the loopback.
        ratio: of the plain exchange's sent bytes to these.
        error: relative error of the sum.
        step_ms: a training step with this exchange, computed for real on the cores that all ranks share.
    """

    part: str = field(default="exchange", init=False)
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
        bps: bit/s that the plain exchange comes to on a host's link there; None where there is no such rate among
            those measured: `verdict` says which it is.
        verdict: "pays below", "pays always", "never pays".
        at_ms: of both exchanges at the crossover.
    """

    part: str = field(default="crossover", init=False)
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
        model, data: what was trained.  scheme: what gradients travelled as.  feedback: with error feedback.
        bits: of a gradient's value on the wire, on the average over the model; small parameters travel as fp32.
        accuracy: percent on the test split, mean and interval over seeds.
        difference: from fp32 with the same seed, percentage points.
        note: why something is missing.
    """

    part: str = field(default="accuracy", init=False)
    model: str
    data: str
    scheme: str
    feedback: bool
    bits: float
    accuracy: Interval | None = None
    difference: Interval | None = None
    note: str | None = None


@dataclass(frozen=True, kw_only=True)
class Found:
    """All rows of a study."""

    codecs: Sequence[CodecRow] = ()
    exchanges: Sequence[ExchangeRow] = ()
    accuracies: Sequence[AccuracyRow] = ()

    def crossovers(self) -> list[Crossover]:
        """For each number of hosts, message and scheme."""
        return list(_crossovers(self.exchanges))

    def as_dicts(self) -> list[dict[str, Any]]:
        """For programs: `part` says which columns a row has."""
        rows: list[CodecRow | ExchangeRow | Crossover] = [*self.codecs, *self.exchanges, *self.crossovers()]
        accuracies = [{"part": row.part, **flat(vars(row), "accuracy", "difference")} for row in self.accuracies]
        return [asdict(row) for row in rows] + accuracies

    def tables(self) -> Iterator[tuple[str, list[dict[str, Any]]]]:
        """For people."""
        if self.codecs:
            yield "Codecs on one core (GB/s of fp32)", [_without(row, "part") for row in self.codecs]
        if self.exchanges:
            hidden = ("part", "reached_bps", "values", "low_ms", "high_ms")
            rows = [_without(replace(row, rate=row.rate or "unlimited"), *hidden) for row in self.exchanges]
            if all(row.step_ms is None for row in self.exchanges):
                rows = [{name: value for name, value in row.items() if name != "step_ms"} for row in rows]
            yield "Exchanges", rows
            crossovers = [
                {
                    "hosts": c.hosts,
                    "what": c.what,
                    "scheme": c.scheme,
                    "faster than fp32": c.verdict.removeprefix("pays ").replace("never pays", "never")
                    + ("" if c.bps is None else f" {said_bps(c.bps)}"),
                }
                for c in self.crossovers()
            ]
            yield "Where compression pays, by the link's rate (of those measured)", crossovers
        if self.accuracies:
            yield "Accuracy against bits", [_accuracy(row) for row in self.accuracies]


def _without(row: Any, *hidden: str) -> dict[str, Any]:
    return {name: value for name, value in asdict(row).items() if name not in hidden}


def _accuracy(row: AccuracyRow) -> dict[str, Any]:
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


def said_bps(bps: float) -> str:
    """A rate for people."""
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
    return "pays below", _between(rate, next_rate, share), _between(plain, next_plain, share)


def _between(low: float, high: float, share: float) -> float:
    return math.exp(math.log(low) + share * (math.log(high) - math.log(low)))


def _crossovers(rows: Sequence[ExchangeRow]) -> Iterator[Crossover]:
    plain = {(row.hosts, row.what, row.rate): row.time_ms for row in rows if row.scheme == PLAIN}
    for hosts, what, scheme in dict.fromkeys((row.hosts, row.what, row.scheme) for row in rows):
        points = [
            (row.reached_bps, plain[hosts, what, row.rate], row.time_ms)
            for row in rows
            if (row.hosts, row.what, row.scheme) == (hosts, what, scheme)
        ]
        if scheme != PLAIN and len(points) > 1:
            verdict, bps, at_ms = crossover(points)
            yield Crossover(hosts=hosts, what=what, scheme=scheme, verdict=verdict, bps=bps, at_ms=at_ms)


def findings(found: Found) -> Iterator[str]:
    """What follows, a line each."""
    for row in found.codecs:
        if row.scheme == "qsgd4":
            yield (
                f"qsgd4 by {row.form}: {row.ratio:.2f} x fewer bytes, encodes {row.encode_gbs:.2f} GB/s, decodes "
                f"{row.decode_gbs:.2f} GB/s of fp32 on one core"
            )
    for hosts, what in dict.fromkeys((row.hosts, row.what) for row in found.exchanges):
        here = [row for row in found.exchanges if (row.hosts, row.what) == (hosts, what)]
        slowest = min(here, key=lambda row: row.reached_bps).rate
        there = [row for row in here if row.rate == slowest and row.scheme != PLAIN]
        each = ", ".join(f"{row.scheme} {row.speedup:.2f} x ({row.ratio:.1f} x fewer bytes)" for row in there)
        if each:
            yield f"{what}, {hosts} hosts, links {slowest or 'unlimited'}, against fp32: {each}"
        pays = [c for c in found.crossovers() if (c.hosts, c.what) == (hosts, what)]
        if pays:
            said = [f"{c.scheme} {c.verdict}{'' if c.bps is None else ' ' + said_bps(c.bps)}" for c in pays]
            yield f"{what}, {hosts} hosts: {', '.join(said)}"
    for accuracy in found.accuracies:
        difference = accuracy.difference
        if accuracy.scheme != PLAIN and difference is not None and difference.holds(0.0) is False:
            yield (
                f"{accuracy.model}: {accuracy.scheme} differs from fp32 by {difference} points "
                f"at {accuracy.bits:.3g} bits a value"
            )
