"""What Pittman et al. (SC18) claim, beside rows of this study that answer the same question."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from ensemble.bench.pipelines.config import ACROSS, ALONE, DATALOADER, EMULATED, LOADER, WITH_PREPARERS
from ensemble.bench.pipelines.study import PipelineRow, describe, format_count
from ensemble.bench.results import Claim, group_by

PAPER = "Pittman et al., SC18"
# Its figures, from least to most: CPU time less than that of a pipeline each; speed; mean power less.
_LESS_CPU, _FASTER, _LESS_POWER = (2.0, 11.0), (None, 10.0), (5.0, 16.0)
_EQUALLY_FAST = 1.05  # times the samples/s, at most
_ALONE, _ALL = "independent", "all"
# Design -> the designs that it is compared with.
_COMPARED = {
    "node": ALONE,
    LOADER: (DATALOADER,),
    **dict.fromkeys(ACROSS, (_ALONE,)),
}
# In what two rows are alike that are compared.
_ALIKE = ("members", "prep_workers", "cores", "nodes", "batch_size", "step", "link")

Pair = tuple[PipelineRow, PipelineRow]


def pairs(rows: Sequence[PipelineRow]) -> Iterator[Pair]:
    """Rows that ran alike: of one pipeline with each without sharing, of loaders with DataLoaders."""
    for row in rows:
        for other in rows:
            if other.design in _COMPARED.get(row.design, ()) and configuration(row) == configuration(other):
                yield row, other


def configuration(row: PipelineRow) -> tuple[object, ...]:
    """In what rows are alike that are compared; a model's step takes what it takes."""
    return row.step_ms if row.step == EMULATED else None, *(getattr(row, name) for name in _ALIKE)


def claims(rows: Sequence[PipelineRow]) -> list[Claim]:
    """The paper's claims of which these rows say something."""
    shared = [pair for pair in pairs(rows) if pair[1].design == _ALONE and _shares(pair[0])]
    by_step = group_by(shared, lambda pair: _step(pair[0]))
    by_cores = group_by(shared, lambda pair: f"on {format_count(pair[0].cores, 'core')}")
    cpu, speed = "CPU time during training is lower", "faster where processor cores are limited"
    found = [_claim_ratio(cpu, less_cpu, each, _LESS_CPU, where) for where, each in by_step.items()]
    found += [_claim_ratio(speed, faster, each, _FASTER, where) for where, each in by_cores.items()]
    for where, each in by_step.items():
        if all(_is_metered(row) for pair in each for row in pair):
            found.append(claim_power("less mean power", list(map(_compare_power, each)), f"measured, {where}"))
    return [*found, *_claim_designs(rows), *_claim_reading(rows)]


def _shares(row: PipelineRow) -> bool:
    """Whether any two members have one pipeline; on a node each, only where nodes share."""
    return row.members > (1 if row.design in ACROSS else row.nodes)


def less_cpu(pair: Pair) -> float:
    """CPU-seconds per sample of the second over those of the first."""
    return pair[1].cpu_per_1000 / pair[0].cpu_per_1000


def faster(pair: Pair) -> float:
    """Samples/s of the first over those of the second."""
    return pair[0].samples_per_s / pair[1].samples_per_s


def _is_metered(row: PipelineRow) -> bool:
    return row.watts is not None and row.energy_origin == "measured"


def _claim_ratio(
    claim: str,
    value: Callable[[Pair], float],
    found: Sequence[Pair],
    published: tuple[float | None, float],
    where: str,
) -> Claim:
    """How many times a figure of each pair is the better one; it loses below the paper's least, or below 1."""
    worst = min(found, key=value)
    loses = f"{value(worst):.2g} times: {describe(worst[0])}" if value(worst) < (published[0] or 1.0) else ""
    return _claim_up_to(claim, map(value, found), published, "times", f", {where}, {_members(found)}", loses)


@dataclass(frozen=True, kw_only=True)
class PowerPair:
    """Mean power of one pipeline beside that of a pipeline each.

    Attributes:
        shared_w, own_w: watts, measured or modelled alike.
        faster: samples/s of the first over those of the second.
        case: in which, in words.
    """

    shared_w: float
    own_w: float
    faster: float
    case: str

    @property
    def less(self) -> float:
        """By how many percent sharing lowers the mean power."""
        return 100 * (1 - self.shared_w / self.own_w)

    @property
    def energy(self) -> float:
        """Times that of a pipeline each, for the same samples."""
        return self.shared_w / self.own_w / self.faster


def _compare_power(pair: Pair) -> PowerPair:
    shared, own = pair
    watts = {"shared_w": shared.watts or 0.0, "own_w": own.watts or 1.0}
    return PowerPair(**watts, faster=faster(pair), case=describe(shared))


def claim_power(claim: str, found: Sequence[PowerPair], where: str) -> Claim:
    """Mean power where both sides are equally fast: the faster one keeps accelerators busier, and draws more."""
    alike = [pair.less for pair in found if 1 / _EQUALLY_FAST < pair.faster < _EQUALLY_FAST]
    worst = min(found, key=lambda pair: pair.less)
    loses = (
        f"{-worst.less:.2g} % more, with {worst.energy:.2g} times the energy, where sharing is "
        f"{worst.faster:.2g} times as fast ({worst.case})"
    )
    where = f" where both sides are equally fast, {where}"
    return _claim_up_to(claim, alike, _LESS_POWER, "%", where, loses if worst.less < 0 else "")


def _claim_up_to(
    claim: str,
    found: Iterable[float],
    published: tuple[float | None, float],
    unit: str,
    where: str,
    loses: str,
) -> Claim:
    """The most of what was found beside the most that is published."""
    values, (low, high) = sorted(found), published
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
    alike = group_by((row for row in rows if row.design in (_ALL, *WITH_PREPARERS)), configuration).values()
    compared = [group for group in alike if len({row.design for row in group}) == 1 + len(WITH_PREPARERS)]
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


def _claim_reading(rows: Iterable[PipelineRow]) -> Iterator[Claim]:
    """What a record costs to read, of which every member would do as much, against what it costs to prepare."""
    own = next((row for row in rows if row.design == _ALONE and row.read_ms), None)
    if own is None or own.read_ms is None:
        return
    prepare_ms = 1000 * own.prep_cpu_s / own.samples
    yield Claim(
        paper=PAPER,
        claim="redundant reads do not matter, redundant preprocessing does",
        published="no figure",
        measured=f"to read a cached record takes {100 * own.read_ms / prepare_ms:.2g} % of the {prepare_ms:.3g} "
        "CPU-ms that prepare it",
    )


def _members(found: Iterable[Pair]) -> str:
    numbers = sorted({row.members for row, _ in found})
    return format_count(numbers[0], "member") if len(numbers) == 1 else f"{numbers[0]} to {numbers[-1]} members"


def _step(row: PipelineRow) -> str:
    return "step emulated by a wait" if row.step == EMULATED else f"step of a real {row.step}"
