"""Ways to share a node's energy between members, beside the Shapley value as ground truth.

All of them share the same joules: what the node used beyond its idle energy while all members ran. Idle energy
is left out: nobody causes it, so that how it is shared is a rule (by reservation) and not a matter of
measurement.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.energy.coalitions import Bed, Window, measure_all
from benchmarks.energy.members import Member
from benchmarks.energy.shapley import shapley_values
from ensemble.bench.charts import PREDICTED, Panel, Series, bar_panel
from ensemble.bench.energy.parts import PartOutcome, round_figures
from ensemble.bench.results import Report, group_by, median_row, tabulate

OURS, DECLARED, EVEN = "ours", "share x time", "even"
SPLITS = (OURS, DECLARED, EVEN)
_COLOURS = {OURS: "#2f7bc4", DECLARED: "#d97a2b", EVEN: "#6aa84f"}


@dataclass(frozen=True)
class CoalitionRow:
    """Mean power of a coalition's windows; `beyond_idle_w`: beyond that of the empty coalition."""

    coalition: str
    watts: float
    beyond_idle_w: float
    runs: int = 1


@dataclass(frozen=True)
class SplitRow:
    """Joules of one member by one split, beside its Shapley value."""

    split: str
    member: str
    shapley_j: float
    joules: float
    error_pct: float
    runs: int = 1


def split_energy(windows: Sequence[Window], members: Sequence[Member]) -> list[SplitRow]:
    """All splits of the energy of the window of all members.

    Args:
        windows: one of each coalition.
    """
    together = max(windows, key=lambda window: len(window.members))
    values = {frozenset(each.members): each.watts * together.seconds for each in windows}
    truth = shapley_values(values)
    to_share = sum(truth.values())
    weights: dict[str, Mapping[str, float]] = {
        OURS: together.attributed_j,
        DECLARED: {member.name: member.gpu_share or member.cpus for member in members},
        EVEN: {member.name: 1.0 for member in members},
    }
    rows = []
    for split, of in weights.items():
        for member in members:
            joules = to_share * of[member.name] / sum(of[each.name] for each in members)
            error_pct = 100 * (joules / truth[member.name] - 1)
            rows.append(SplitRow(split, member.name, truth[member.name], joules, error_pct))
    return rows


def study(
    bed: Bed, seconds: float, repeats: int, run_dir: Path | None, most_s: float | None, report: Report
) -> PartOutcome:
    """Measure all coalitions, and compare the splits with the Shapley values: medians over repeats.

    Args:
        run_dir, most_s: see `measure_all`.
    """
    windows = measure_all(bed, seconds, repeats, run_dir, most_s, report)
    everything = 2 ** len(bed.members)
    complete = [found for found in group_by(windows, lambda w: w.repeat).values() if len(found) == everything]
    findings = []
    if len(windows) < repeats * everything:
        findings.append(
            f"shapley: {len(windows)} of {repeats * everything} windows are measured; "
            f"call it again with --run-dir {run_dir} for the others"
        )
    coalitions = [row for found in complete for row in _describe(found)]
    splits = [row for found in complete for row in split_energy(found, bed.members)]
    by_coalition = [median_row(rows) for rows in group_by(coalitions, lambda row: row.coalition).values()]
    by_split = [median_row(rows) for rows in group_by(splits, lambda row: (row.split, row.member)).values()]
    return PartOutcome(
        tables=[
            ("Coalitions", round_figures(tabulate(by_coalition))),
            ("Joules beyond idle, beside the Shapley value", round_figures(tabulate(by_split))),
        ],
        rows=[{"bed": bed.name, **vars(row)} for row in (*by_coalition, *by_split)],
        findings=[*findings, *judge(by_split)],
        notes=["Shapley value: from the energy of all coalitions"],
        panels=[_panel(bed.name, by_split)] if by_split else [],
    )


def judge(rows: Sequence[SplitRow]) -> Iterator[str]:
    """Each split's errors against the Shapley values."""
    for split, found in group_by(rows, lambda row: row.split).items():
        errors = [abs(row.error_pct) for row in found]
        worst = max(found, key=lambda row: abs(row.error_pct))
        yield (
            f"shapley: {split}: median error {statistics.median(errors):.1f} %, "
            f"worst {worst.error_pct:+.1f} % ({worst.member})"
        )


def _describe(windows: Sequence[Window]) -> Iterator[CoalitionRow]:
    idle_w = next(each.watts for each in windows if not each.members)
    for each in windows:
        yield CoalitionRow(" + ".join(each.members) or "nobody", each.watts, each.watts - idle_w)


def _panel(bed: str, rows: Sequence[SplitRow]) -> Panel:
    names = list(dict.fromkeys(row.member for row in rows))
    true = {row.member: row.shapley_j for row in rows}
    shapley = [true[name] for name in names]
    series = [Series(name="Shapley value", xs=names, ys=shapley, colour="#8a94a3", dash=PREDICTED)]
    for split, found in group_by(rows, lambda row: row.split).items():
        series.append(Series(name=split, xs=names, ys=[row.joules for row in found], colour=_COLOURS[split]))
    return bar_panel("Joules beyond idle", series, y="joules", at=f"{bed}, three members")
