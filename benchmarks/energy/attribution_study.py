"""The part `attribution` of the study: all scenarios, several runs of each, what follows from them."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence

from benchmarks.energy import gpu_attribution
from benchmarks.energy.attribution import (
    BUSY,
    DRIVER,
    HALF,
    MEMBERS,
    RESTING,
    UNLIKE,
    AttributionRow,
    compare,
    is_exact,
    measure,
)
from benchmarks.energy.members import Member
from benchmarks.energy.truth import IDLE, OTHER
from ensemble.bench.charts import PREDICTED, Panel, Series, bar_panel
from ensemble.bench.energy.parts import PartOutcome, round_figures
from ensemble.bench.results import Report, group_by, median_row, tabulate
from ensemble.meter import ledger

PROCESSORS, UNLIKE_WORK = "processors", "processors, unlike work"
_ROLES = (DRIVER, OTHER, IDLE)


def study(seconds: float, repeats: int, report: Report) -> PartOutcome:
    """All scenarios, the medians of that many runs."""
    scenarios: dict[str, Callable[[], tuple[list[AttributionRow], bool]]] = {
        "processors and memory": lambda: run_processors(PROCESSORS, seconds, MEMBERS),
        "unlike work on processors": lambda: run_processors(UNLIKE_WORK, seconds, UNLIKE),
        "GPUs": lambda: gpu_attribution.run_with_stand_in(gpu_attribution.WHOLE, seconds),
        "a GPU in MIG mode": lambda: gpu_attribution.run_with_stand_in(gpu_attribution.MIG, seconds),
    }
    runs: list[AttributionRow] = []
    exact: list[bool] = []
    left_out: dict[str, str] = {}
    for number in range(repeats):
        for name, run in scenarios.items():
            report(f"attribution: {name}, {seconds:g} s, {number + 1} of {repeats}")
            try:
                rows, is_sum_exact = run()
            except RuntimeError as error:
                left_out[name] = str(error)
                continue
            runs += rows
            exact.append(is_sum_exact)
    rows = [median_row(found) for found in group_by(runs, lambda row: (row.scenario, row.name)).values()]
    return PartOutcome(
        tables=[("Attributed joules beside the true ones", round_figures(tabulate(rows)))],
        rows=[vars(row) for row in rows],
        findings=[
            *(f"attribution: {name} are left out: {why}" for name, why in left_out.items()),
            _judge_sums(exact),
            *_judge_errors(rows),
            *_judge_ratios(rows),
        ],
        notes=["attribution: a synthetic node of known power, real processes, meter and ledger"],
        panels=[_panel(scenario, found) for scenario, found in group_by(rows, lambda row: row.scenario).items()],
    )


def run_processors(scenario: str, seconds: float, members: Sequence[Member]) -> tuple[list[AttributionRow], bool]:
    """One run on the processors; returns the rows, and whether the sums were exact."""
    measured = measure(seconds, members)
    return compare(scenario, measured), is_exact(ledger(measured.events), measured.events)


def _judge_sums(exact: Sequence[bool]) -> str:
    wrong = exact.count(False)
    if not wrong:
        return f"attribution: in all of {len(exact)} runs the rows add up to what the meter counted, to the tick"
    return f"attribution: in {wrong} of {len(exact)} runs the rows do NOT add up to what the meter counted"


def _judge_errors(rows: Sequence[AttributionRow]) -> Iterator[str]:
    for scenario, found in group_by(rows, lambda row: row.scenario).items():
        members = [row for row in found if row.name not in _ROLES]
        worst = max(members, key=lambda row: abs(row.error_pct))
        middle = statistics.median(abs(row.error_pct) for row in members)
        yield (
            f"attribution: {scenario}: median error {middle:.1f} %, worst {worst.error_pct:+.1f} % ({worst.name})"
        )


def _judge_ratios(rows: Sequence[AttributionRow]) -> Iterator[str]:
    """The ratios of members that are equal, half as busy, or at rest, beyond idle energy."""
    found = {row.name: row for row in rows if row.scenario == PROCESSORS}
    first = found[BUSY[0]]
    for name in (BUSY[1], HALF, RESTING):
        row = found[name]
        attributed = (row.attributed_j - row.idle_j) / (first.attributed_j - first.idle_j)
        true = (row.true_j - row.idle_j) / (first.true_j - first.idle_j)
        yield (
            f"attribution: {PROCESSORS}: beyond idle {name} has {attributed:.3f} of the joules of {first.name}, "
            f"in truth {true:.3f}"
        )


def _panel(scenario: str, rows: Sequence[AttributionRow]) -> Panel:
    shown = [row for row in rows if row.name not in _ROLES]
    names = [row.name for row in shown]
    true = Series(name="true", xs=names, ys=[row.true_j for row in shown], colour="#8a94a3", dash=PREDICTED)
    attributed = Series(name="attributed", xs=names, ys=[row.attributed_j for row in shown], colour="#2f7bc4")
    return bar_panel(scenario, [true, attributed], y="joules", at="synthetic, true and attributed joules")
