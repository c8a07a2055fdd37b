"""What compression is expected to save and to cost, each figure with its paper, beside what was measured."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from benchmarks.compression.accuracy import PLAIN, AccuracyRow
from benchmarks.compression.steps import StepRow
from benchmarks.results import Claim, Outcome, group_by, outcome_of, show_claims

PAPER = "Grubic et al. 2018"
#: Its speed-ups on 8 accelerators by reduce-and-broadcast over MPI, without NCCL.
SPEEDUPS = (1.1, 2.05)
QSGD_PAPER = "Alistarh et al. 2017 (QSGD)"
#: Its accuracies in percent: fp32, and with as many bits.
ACCURACIES = {
    "AlexNet": (59.50, 60.05, 4),
    "ResNet-50": (74.68, 74.76, 4),
    "ResNet-110 on CIFAR-10": (93.86, 94.19, 4),
    "ResNet-152": (77.00, 76.74, 8),
    "LSTM on AN4": (81.13, 81.15, 4),
}
#: Schemes whose published accuracy is that of fp32 (QSGD of 8 and 4 bits, 1-bit SGD with error feedback): QSGD of
#: 2 bits lost 1.73 points, and PowerSGD is younger.
LOSSLESS = ("fp16", "qsgd16", "qsgd8", "qsgd4", "onebit+ef", "onebit-zero+ef", "onebit-tensor+ef")
#: From this speed-up on a scheme pays.
PAYS = 1.05
_SLOW = "10gbit"  # of the paper's two kinds of fabrics
_STEP_COLUMNS = "net device workers rate scheme step_ms low_ms high_ms samples_per_s sent_mb messages"
_WINNER_COLUMNS = "net device workers rate scheme step_ms plain_ms speedup fastest fastest_speedup"
_ACCURACY_COLUMNS = "model data scheme bits seeds accuracy difference note"


@dataclass(frozen=True, kw_only=True)
class WinnerRow:
    """The fastest exchange of one network, device, number of workers and link.

    Attributes:
        net, device, workers, rate: see `StepRow`.
        scheme, step_ms: the fastest without a published loss of accuracy: fp32's where none is faster.
        plain_ms: a step with fp32.  speedup: of these.
        fastest, fastest_speedup: the fastest of all schemes.
    """

    net: str
    device: str
    workers: int
    rate: str
    scheme: str
    step_ms: float
    plain_ms: float
    speedup: float
    fastest: str
    fastest_speedup: float


def winners(rows: Sequence[StepRow]) -> Iterator[WinnerRow]:
    """The fastest of each combination of which fp32 was measured."""
    for key, own in group_by(rows, lambda row: (row.net, row.device, row.workers, row.rate)).items():
        plain = next((row for row in own if row.scheme == PLAIN), None)
        if plain is None:
            continue
        best = min((row for row in own if row.scheme in (PLAIN, *LOSSLESS)), key=lambda row: row.step_ms)
        fastest = min(own, key=lambda row: row.step_ms)
        net, device, workers, rate = key
        yield WinnerRow(
            net=net,
            device=device,
            workers=workers,
            rate=rate,
            scheme=best.scheme,
            step_ms=best.step_ms,
            plain_ms=plain.step_ms,
            speedup=plain.step_ms / best.step_ms,
            fastest=fastest.scheme,
            fastest_speedup=plain.step_ms / fastest.step_ms,
        )


def show_steps(rows: Sequence[StepRow]) -> Outcome:
    """What the part 'steps' prints and writes."""
    best = list(winners(rows))
    return (
        show_claims([*step_claims(best), *column_claims(rows)])
        + outcome_of(best, "The fastest without a published loss, beside fp32", _WINNER_COLUMNS, part="winner")
        + outcome_of(rows, "Steps, measured with emulated accelerators", _STEP_COLUMNS, part="step")
    )


def step_claims(best: Sequence[WinnerRow]) -> Iterator[Claim]:
    """The paper's speed-ups without NCCL, beside those of the most workers over its slower link."""
    slow = [row for row in best if row.rate == _SLOW]
    own = [row for row in slow if row.workers == max(other.workers for other in slow)]
    if own:
        gains = sorted(row.speedup for row in own)
        none = [f"{row.net} ({row.device})" for row in own if row.speedup < PAYS]
        faster = (
            "; AlexNet computes as fast as in batches of 512" if any(row.net == "alexnet" for row in own) else ""
        )
        yield Claim(
            paper=PAPER,
            claim=f"On 8 workers without NCCL low precision trains faster (here {own[0].workers}, {_SLOW})",
            published=f"{SPEEDUPS[0]} to {SPEEDUPS[1]} x",
            measured=f"{gains[0]:.2f} to {gains[-1]:.2f} x, accelerators emulated{faster}",
            ratio=gains[-1] / SPEEDUPS[1],
            spread=f"{len(gains)} networks and accelerators",
            loses=f"no gain: {', '.join(none)}" if none else "",
        )


def column_claims(rows: Sequence[StepRow]) -> Iterator[Claim]:
    """1-bit SGD with a tensor's own columns against reshaped ones, and against fp32, by what a rank sends."""
    sent = {(row.net, row.scheme): row.sent_mb for row in sorted(rows, key=lambda row: row.workers)}
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


def show_accuracies(rows: Sequence[AccuracyRow]) -> Outcome:
    """What the part 'accuracy' prints and writes."""
    headings, remarks = {"accuracy": "accuracy, %", "difference": "less fp32"}, findings(rows)
    shown = outcome_of(
        rows, "Accuracy against bits", _ACCURACY_COLUMNS, headings=headings, part="accuracy", findings=remarks
    )
    return show_claims(list(claims(rows))) + shown


def claims(rows: Sequence[AccuracyRow]) -> Iterator[Claim]:
    """The published accuracy of 8 and 4 bits beside that of networks trained here."""
    for bits in (8, 4):
        losses = [packed - plain for plain, packed, packed_bits in ACCURACIES.values() if packed_bits == bits]
        compressed = [row for row in rows if row.scheme == f"qsgd{bits}" and row.difference is not None]
        if compressed:
            lost = [
                row.model
                for row in compressed
                if row.difference and row.difference.mean < -(row.difference.half or 0)
            ]
            yield Claim(
                paper=QSGD_PAPER,
                claim=f"{bits} bits lose no accuracy",
                published=f"{min(losses):+.2f} to {max(losses):+.2f} points, of {len(losses)} networks"
                if len(losses) > 1
                else f"{losses[0]:+.2f} points, of one network",
                measured=", ".join(f"{row.model} {row.difference} points" for row in compressed),
                spread=f"{compressed[0].seeds} seeds, 95 %",
                loses=f"accuracy of {', '.join(lost)}" if lost else "",
            )


def findings(rows: Sequence[AccuracyRow]) -> Iterator[str]:
    """Schemes whose accuracy differs from that of fp32."""
    for row in rows:
        difference = row.difference
        if difference is not None and difference.half is not None and abs(difference.mean) > difference.half:
            yield f"{row.model}: {row.scheme} at {row.bits:.3g} bits a value less fp32 is {difference.describe()}"
