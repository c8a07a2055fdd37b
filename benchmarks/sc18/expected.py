"""What Pittman et al. (SC18) claim, beside rows of this study that answer the same question."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence

from benchmarks.results import Claim, Outcome, group_by, outcome_of, show_claims
from benchmarks.sc18.config import ACROSS, ALONE, INDEPENDENT, NODE
from benchmarks.sc18.power import TITAN, PowerRow, compare_power
from benchmarks.sc18.study import PipelineRow, describe, format_count

PAPER = "Pittman et al., SC18"
# Its figures, from least to most: CPU time less than that of a pipeline each; speed; mean power less.
_LESS_CPU, _FASTER, _LESS_POWER = (2.0, 11.0), (None, 10.0), (5.0, 16.0)
_EQUALLY_FAST = 1.05  # times the samples/s, at most
_ALL, _OF_THE_PAPER = "all", ("all", "single", "multi")
# In what two rows are alike that are compared.
_ALIKE = ("members", "prep_workers", "cores", "nodes", "batch_size", "step_ms", "link")

Pair = tuple[PipelineRow, PipelineRow]


def show_designs(rows: Sequence[PipelineRow]) -> Outcome:
    """What the part 'designs' prints and writes."""
    names = [field.name for field in dataclasses.fields(PipelineRow)]
    columns = [name for name in names if any(getattr(row, name) is not None for row in rows)]
    shown = outcome_of(rows, columns=" ".join(columns), part="design", findings=findings(rows))
    watts = [compare_power(*pair) for pair in pairs(rows) if pair[1].design == INDEPENDENT and pair[0].step_ms]
    power = outcome_of(watts, f"Mean power, modelled of a {TITAN} for each member", part="power")
    return show_claims([*claims(rows), *claim_power(watts)]) + shown + power


def pairs(rows: Sequence[PipelineRow]) -> Iterator[Pair]:
    """Rows that ran alike, of one pipeline with each without sharing."""
    for row in rows:
        compared = ALONE if row.design == NODE else (INDEPENDENT,) if row.design in ACROSS else ()
        for other in rows:
            if other.design in compared and configuration(row) == configuration(other):
                yield row, other


def configuration(row: PipelineRow) -> tuple[object, ...]:
    """In what rows are alike that are compared."""
    return tuple(getattr(row, name) for name in _ALIKE)


def findings(rows: Sequence[PipelineRow]) -> Iterator[str]:
    """Each row against those that it is to be compared with, a line each."""
    for row, other in pairs(rows):
        yield (
            f"{describe(row)}: {faster((row, other)):.3g} x the samples/s of {other.design}, "
            f"1/{less_cpu((row, other)):.3g} of the CPU-seconds per sample"
        )


def claims(rows: Sequence[PipelineRow]) -> list[Claim]:
    """The paper's claims of which these rows say something."""
    shared = [pair for pair in pairs(rows) if pair[1].design == INDEPENDENT and _shares(pair[0])]
    by_cores = group_by(shared, lambda pair: f"on {format_count(pair[0].cores, 'core')}")
    made = []
    for where, own in by_cores.items():
        made.append(_claim_ratio("CPU time during training is lower", less_cpu, own, _LESS_CPU, where))
        made.append(_claim_ratio("faster where processor cores are limited", faster, own, _FASTER, where))
    return [*made, *_claim_designs(rows)]


def _shares(row: PipelineRow) -> bool:
    """Whether any two members have one pipeline; on a node each, only where nodes share."""
    return row.members > (1 if row.design in ACROSS else row.nodes)


def less_cpu(pair: Pair) -> float:
    """CPU-seconds per sample of the second over those of the first."""
    return pair[1].cpu_per_1000 / pair[0].cpu_per_1000


def faster(pair: Pair) -> float:
    """Samples/s of the first over those of the second."""
    return pair[0].samples_per_s / pair[1].samples_per_s


def _claim_ratio(
    claim: str,
    value: Callable[[Pair], float],
    own: Sequence[Pair],
    published: tuple[float | None, float],
    where: str,
) -> Claim:
    """How many times a figure of each pair is the better one; it loses below the paper's least, or below 1."""
    worst = min(own, key=value)
    loses = f"{value(worst):.2g} times: {describe(worst[0])}" if value(worst) < (published[0] or 1.0) else ""
    numbers = sorted({row.members for row, _ in own})
    members = format_count(numbers[0], "member") if len(numbers) == 1 else f"{numbers[0]} to {numbers[-1]} members"
    return _claim_up_to(claim, map(value, own), published, "times", f", {where}, {members}", loses)


def claim_power(rows: Sequence[PowerRow]) -> Iterator[Claim]:
    """Mean power where both sides are equally fast: the faster one keeps accelerators busier, and draws more."""
    if not rows:
        return
    alike = [row.less_percent for row in rows if 1 / _EQUALLY_FAST < row.faster < _EQUALLY_FAST]
    worst = min(rows, key=lambda row: row.less_percent)
    loses = (
        f"{-worst.less_percent:.2g} % more, with {worst.energy:.2g} times the energy, where sharing is "
        f"{worst.faster:.2g} times as fast (step {worst.step_ms:g} ms)"
    )
    claim, where = (
        f"less mean power; here of a {TITAN}",
        " where both sides are equally fast, modelled, not measured",
    )
    unlike = _claim_up_to(claim, alike, _LESS_POWER, "%", where, loses if worst.less_percent < 0 else "")
    yield dataclasses.replace(unlike, ratio=None)


def _claim_up_to(
    claim: str,
    figures: Iterable[float],
    published: tuple[float | None, float],
    unit: str,
    where: str,
    loses: str,
) -> Claim:
    """The most of these figures beside the most that is published."""
    values, (low, high) = sorted(figures), published
    most = values[-1] if values else None
    return Claim(
        paper=PAPER,
        claim=claim,
        published=f"{'up' if low is None else format(low, 'g')} to {high:g} {unit}",
        measured="nothing" + where if most is None else f"up to {most:.3g} {unit}{where}",
        ratio=None if most is None else most / high,
        spread="" if most is None else f"{values[0]:.3g} to {most:.3g} {unit}",
        loses=loses,
    )


def _claim_designs(rows: Iterable[PipelineRow]) -> Iterator[Claim]:
    """Whether the design in which every node prepares a part is the fastest of the paper's three."""
    alike = group_by((row for row in rows if row.design in _OF_THE_PAPER), configuration).values()
    compared = [group for group in alike if len({row.design for row in group}) == len(_OF_THE_PAPER)]
    if not compared:
        return
    best = [max(group, key=lambda row: row.samples_per_s) for group in compared]
    share = [
        max(row.samples_per_s for row in group if row.design == _ALL) / first.samples_per_s
        for group, first in zip(compared, best, strict=True)
    ]
    others = [row for row in best if row.design != _ALL]
    yield Claim(
        paper=PAPER,
        claim="all-shared is usually the best design",
        published="usually",
        measured=f"the fastest of three in {len(best) - len(others)} of {len(best)} configurations",
        spread=f"{min(share):.3g} to {max(share):.3g} times the fastest",
        loses=f"to {describe(others[0])}" if others else "",
    )
