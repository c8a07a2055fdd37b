"""Who wins where: the tables, crossovers, claims and plot of the compression study's training steps."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.compression.cells import MEASURED, PREDICTED, StepRow, fastest_of
from benchmarks.compression.measure import PLAIN, UNLIMITED
from benchmarks.compression.predict import PAYS, Costs, PaysRow
from benchmarks.compression.published import LOSSLESS, PAPER, SPEEDUPS
from ensemble.bench.charts import PREDICTED as DASHED
from ensemble.bench.charts import Panel, bar_panel
from ensemble.bench.launch.hosts import rate_bps
from ensemble.bench.results import Claim, Outcome, Rows, Spread, group_by, outcome_of, series_of, show_claims

# Of the paper's two kinds of fabrics.
_SLOW, _FAST = "10gbit", "100gbit"
_EMULATED = "accelerators are emulated by timed waits of published length"
_STEP_COLUMNS = (
    "net device workers hosts rate primitive scheme step_ms low_ms high_ms samples_per_s sent_mb messages"
)
_CHECK_COLUMNS = "net device workers hosts rate primitive scheme predicted_ms step_ms error"
_PAYS_COLUMNS = "net device workers hosts fabric pays scheme"


@dataclass(frozen=True, kw_only=True)
class WinnerRow(StepRow):
    """The fastest exchange of one network, device, number of workers and of their hosts, and link.

    Its step is the fastest without a published loss of accuracy: fp32's where none is faster.

    Attributes:
        plain_ms: a step with fp32 over `plain_primitive`, its fastest.
        speedup: of these.
        fastest, fastest_speedup: the fastest of all schemes.
    """

    plain_ms: float
    plain_primitive: str
    speedup: float
    fastest: str
    fastest_speedup: float


@dataclass(frozen=True, kw_only=True)
class CheckRow(StepRow):
    """A predicted cell that was measured.

    Attributes:
        predicted_ms: a step on shared cores.  error: predicted over measured, less 1.
    """

    predicted_ms: float
    error: float


@dataclass(frozen=True, kw_only=True)
class CostRow:
    """A fitted cost of the model (`predict.Costs`): of a scheme or a primitive."""

    what: str
    name: str
    value: float


def winners(rows: Iterable[StepRow]) -> Iterator[WinnerRow]:
    """Of each network, device, number of workers, of hosts, link and origin."""
    same = operator.attrgetter("net", "device", "workers", "hosts", "rate", "origin")
    for own in group_by(rows, same).values():
        plain = fastest_of(own, (PLAIN,))
        best, fastest = fastest_of(own, (PLAIN, *LOSSLESS)), fastest_of(own)
        if plain is not None and best is not None and fastest is not None:
            yield WinnerRow(
                **vars(best),
                plain_ms=plain.step_ms,
                plain_primitive=plain.primitive,
                speedup=plain.step_ms / best.step_ms,
                fastest=fastest.scheme,
                fastest_speedup=plain.step_ms / fastest.step_ms,
            )


# --- what is shown -------------------------------------------------------------------------------------------


def show_steps(
    measured: Sequence[StepRow],
    checks: Sequence[CheckRow],
    limits: str,
    predicted: Sequence[StepRow],
    direct: Sequence[StepRow],
    pays: Sequence[PaysRow],
    costs: Costs,
) -> Outcome:
    """What the part 'steps' prints, writes and draws; the claims first.

    Args:
        limits: how many predicted steps cannot be measured here, and why.
        predicted, direct: over TCP, and over a fabric that costs the processor nothing.
    """
    best = [*winners(measured), *winners(predicted)]
    outcome = show_claims(list(claims(best, list(winners(direct)), pays, measured, checks)))
    for origin, about in ((MEASURED, "measured"), (PREDICTED, "predicted, a core for each rank's exchange")):
        heading = f"Who wins where: times as fast as the fastest fp32 ({about})"
        outcome += Outcome(tables=[(heading, winner_table(best, origin))], rows=[])
    checked, fitted = (
        "Predicted steps that were measured, on shared cores",
        "Costs of the model: ns, and shares of a rate",
    )
    outcome += outcome_of(pays, "Up to which link low precision pays (predicted)", _PAYS_COLUMNS, part="step-pays")
    outcome += outcome_of(checks, checked, _CHECK_COLUMNS, part="step-check")
    outcome += outcome_of(measured, "Steps, measured with emulated accelerators", _STEP_COLUMNS, part="step")
    outcome += outcome_of(list(cost_rows(costs)), fitted, part="step-cost")
    more: dict[str, Sequence[Any]] = {
        "winner": best,
        "step-predicted": _fastest(predicted),
        "step-direct": _fastest(direct),
    }
    for part, rows in more.items():
        outcome += Outcome(tables=[], rows=outcome_of(rows, part=part).rows)
    panels = [*_gain_panels(best), *_step_panels(measured)]
    found = [limits, *([f"{len(checks)} of the others were measured: {_errors(checks)}"] if checks else [])]
    return outcome + Outcome(tables=[], rows=[], findings=found, notes=[_EMULATED], panels=panels)


def cost_rows(costs: Costs) -> Iterator[CostRow]:
    """The fitted costs, ns a byte or a message, and shares of a rate."""
    for what, found in vars(costs).items():
        scale = 1 if what == "efficiency" else 1e9
        yield from (CostRow(what=what, name=name, value=scale * cost) for name, cost in found.items())


def winner_table(best: Iterable[WinnerRow], origin: str) -> Rows:
    """A line for each network, device and number of workers, a column for each rate."""
    own = [row for row in best if row.origin == origin]
    rates = sorted({row.rate for row in own}, key=_bps)
    table: Rows = []
    same = ("net", "device", "workers", "hosts")
    for key, here in group_by(own, operator.attrgetter(*same)).items():
        cells = {row.rate: _describe(row) for row in here}
        table.append(dict(zip(same, key, strict=True)) | {rate: cells.get(rate) for rate in rates})
    return table


def _describe(row: WinnerRow) -> str:
    faster = f" ({row.fastest} {row.fastest_speedup:.2f})" if row.fastest_speedup >= PAYS * row.speedup else ""
    if row.speedup < PAYS:
        return f"fp32 {row.plain_primitive}{faster}"
    return f"{row.scheme} {row.primitive} {row.speedup:.2f}{faster}"


def _fastest(rows: Iterable[StepRow]) -> list[StepRow]:
    """Of each scheme the fastest primitive."""
    groups = group_by(rows, operator.attrgetter("net", "device", "workers", "hosts", "rate", "scheme"))
    return [min(own, key=lambda row: row.step_ms) for own in groups.values()]


def claims(
    best: Sequence[WinnerRow],
    direct: Sequence[WinnerRow],
    pays: Sequence[PaysRow],
    measured: Sequence[StepRow],
    checks: Sequence[CheckRow],
) -> Iterator[Claim]:
    """The paper's answers beside these; those of which rows are missing are left out."""
    within = f"checked on shared cores: {_errors(checks)}" if checks else "predictions not checked"
    by_rate = group_by((row for row in best if (row.origin, row.workers) == (PREDICTED, 8)), lambda row: row.rate)
    if _SLOW in by_rate:
        yield _compare(
            by_rate[_SLOW],
            f"On 8 workers without NCCL low precision makes training faster (here over {_SLOW} links)",
            f"{SPEEDUPS[0]} to {SPEEDUPS[1]} x",
            SPEEDUPS[1],
            within,
        )
    if fast := [row for row in direct if row.rate == _FAST]:
        about = f"With NCCL over a fast fabric it gains little (here {_FAST}, at no cost of the processor)"
        yield _compare(fast, about, "about 1 x", 1.0, "no such fabric is here to check it")
    eight = {(row.net, row.device): row for row in pays if (row.workers, row.fabric) == (8, "tcp")}
    pairs = [(row, eight[net, "p100"]) for (net, device), row in eight.items() if device == "k80"]
    if pairs:
        not_more = [slow.net for slow, quick in pairs if quick.limit_bps <= slow.limit_bps]
        yield Claim(
            paper=PAPER,
            claim="The faster the accelerator, the more low precision gains: it pays up to faster links",
            published="a P100 gains more than a K80 (from memory of the paper)",
            measured="; ".join(f"{slow.net} {slow.pays}, then {quick.pays}" for slow, quick in pairs)
            + " (predicted)",
            spread=within,
            loses=f"no faster links with the faster one: {', '.join(not_more)}" if not_more else "",
        )
    yield from _claim_columns(measured)


def _compare(rows: Sequence[WinnerRow], claim: str, published: str, figure: float, within: str) -> Claim:
    gains = [row.speedup for row in rows]
    none = [f"{row.net} ({row.device})" for row in rows if row.speedup < PAYS]
    faster = "; AlexNet computes as fast as in batches of 512" if any(row.net == "alexnet" for row in rows) else ""
    return Claim(
        paper=PAPER,
        claim=claim,
        published=published,
        measured=f"{min(gains):.2f} to {max(gains):.2f} x (predicted{faster})",
        ratio=max(gains) / figure,
        spread=f"{len(gains)} networks and accelerators, {within}",
        loses=f"no gain: {', '.join(none)}" if none else "",
    )


def _claim_columns(measured: Sequence[StepRow]) -> Iterator[Claim]:
    """1-bit SGD with a tensor's own columns against reshaped ones, and against fp32, by what a rank sends."""
    flat = sorted((row for row in measured if row.primitive != "hierarchical"), key=lambda row: row.workers)
    sent = {(row.net, row.scheme): row.sent_mb for row in flat}  # with the most workers
    nets = [net for net, scheme in sent if scheme == "onebit-tensor+ef" and (net, PLAIN) in sent]
    if nets:
        shown = [f"{net} {sent[net, PLAIN] / sent[net, 'onebit-tensor+ef']:.2g} x" for net in nets]
        worse = [net for net in nets if sent[net, "onebit-tensor+ef"] > sent[net, PLAIN]]
        yield Claim(
            paper=PAPER,
            claim="1-bit SGD with each layer's own columns saves little on convolutions; reshaped it does",
            published="a column of height 3: 12 bytes of 12",
            measured=f"fewer bytes than fp32: {', '.join(shown)}",
            spread="none: bytes are counted",
            loses=f"more bytes than fp32: {', '.join(worse)}" if worse else "",
        )


def _errors(checks: Sequence[CheckRow]) -> str:
    errors = sorted(abs(row.error) for row in checks)
    within = f"median error {errors[len(errors) // 2]:.0%}, nine in ten within {errors[len(errors) * 9 // 10]:.0%}"
    return f"{within}, the largest {errors[-1]:.0%}"


def _gain_panels(best: Iterable[WinnerRow]) -> Iterator[Panel]:
    """Of each device the predicted speed-up of each network on 8 workers, over the rate."""
    rows = (row for row in best if (row.origin, row.workers) == (PREDICTED, 8))
    for device, own in group_by(rows, lambda row: row.device).items():
        series = series_of(own, lambda row: _bps(row.rate), "speedup", "net", dash=DASHED)
        text = {_bps(row.rate): row.rate for row in own}
        at = "8 workers, predicted; the fastest scheme without a published loss over the fastest fp32"
        axes: dict[str, Any] = {"x": "rate of each host's link", "y": "times as fast", "x_scale": "log"}
        yield Panel(title=f"Low precision on {device}", series=series, at=at, x_text=text, **axes)


def _step_panels(measured: Sequence[StepRow]) -> Iterator[Panel]:
    """Of each network and device the fastest step of each scheme on the most workers, a bar for each link."""
    for (net, device), own in group_by(measured, lambda row: (row.net, row.device)).items():
        most = max(row.workers for row in own)
        best = _fastest(row for row in own if row.workers == most)
        series = series_of(best, "rate", lambda row: Spread(row.step_ms, row.low_ms, row.high_ms), "scheme")
        at = f"{most} workers, the fastest primitive; without an exchange {1e3 * own[0].step_s:.0f} ms"
        yield bar_panel(f"{net} on {device}: a step, ms", series, at=at, y="ms", log_y=True)


def _bps(rate: str) -> float:
    return math.inf if rate == UNLIMITED else rate_bps(rate)
