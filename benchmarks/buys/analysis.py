"""What the cells say: quality over CPU-seconds by method, and each method against two others, seed by seed."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from benchmarks.buys.cells import METHODS, PLAIN, Cell
from ensemble.bench.charts import PALETTE, Panel
from ensemble.bench.results import Interval, Outcome, Spread, group_by, outcome_of, paired_interval, series_of

RANDOM = "random"
#: The plain script's model with a temperature fitted to the validation split: the same cells.
SCALED = "optuna, scaled"
COLOURS = dict(zip((*METHODS, SCALED), ("#8a94a3", *PALETTE), strict=False)) | {SCALED: "#4a5563"}


@dataclass(frozen=True, kw_only=True)
class MethodRow:
    """One method on one task with one budget; medians over seeds, with the least and the most.

    Attributes:
        task, method, budget_s: see `Cell`.
        work_cpu_s: what it took.
        nll: nats, of the final model on the test split.  raw_nll: without a temperature.
        accuracy: in percent.
        best_nll: of the best single model among those that it trained.
        trained, combined: models trained to their end, and those of the final model.
        seeds: that finished; `failed`: that did not.
    """

    task: str
    method: str
    budget_s: float
    work_cpu_s: Spread
    nll: Spread
    raw_nll: Spread
    accuracy: Spread
    best_nll: Spread
    trained: Spread
    combined: Spread
    seeds: int
    failed: int


@dataclass(frozen=True, kw_only=True)
class PairRow:
    """A method less another one, seed by seed: below 0 it is better in NLL, above 0 in accuracy.

    Attributes:
        task, method, budget_s: see `Cell`.  other: what it is compared with.
        nll: nats, mean difference and interval; `raw_nll`: neither with a temperature.
        accuracy: percentage points.
        verdict: "better", "worse" or "" where the interval of the NLL has 0 in it.
        plain_cpu_s: CPU-seconds after which the plain script had this NLL, the median of seeds in which it came to
            that within its largest budget; None where it did in none.
        reached: the number of these seeds; `seeds`: those that are compared.
    """

    task: str
    method: str
    other: str
    budget_s: float
    nll: Interval
    raw_nll: Interval
    accuracy: Interval
    verdict: str
    plain_cpu_s: float | None
    reached: int
    seeds: int


def method_rows(cells: Sequence[Cell]) -> list[MethodRow]:
    """A row for each task, budget and method with a cell that has not failed."""
    rows = []
    for (task, budget_s, method), alike in _group(cells).items():
        done = [cell for cell in alike if cell.nll is not None]
        if not done:
            continue

        def spread(of: Callable[[Cell], float | None], done: list[Cell] = done) -> Spread:
            values = [value for cell in done if (value := of(cell)) is not None]
            return Spread(statistics.median(values), min(values), max(values))

        rows.append(
            MethodRow(
                task=task,
                method=method,
                budget_s=budget_s,
                work_cpu_s=spread(lambda cell: cell.work_cpu_s),
                nll=spread(lambda cell: cell.nll),
                raw_nll=spread(lambda cell: cell.raw_nll),
                accuracy=spread(_percent),
                best_nll=spread(lambda cell: cell.best_nll),
                trained=spread(lambda cell: cell.trained),
                combined=spread(lambda cell: cell.combined),
                seeds=len(done),
                failed=len(alike) - len(done),
            )
        )
    return rows


def _percent(cell: Cell) -> float | None:
    return None if cell.accuracy is None else 100 * cell.accuracy


def _group(cells: Sequence[Cell]) -> dict[tuple[str, float, str], list[Cell]]:
    """By task, budget and method, in the order of the cells; the scaled plain script is a method of its own."""
    scaled = [
        dataclasses.replace(cell, method=SCALED, nll=cell.scaled_nll) for cell in cells if cell.method == PLAIN
    ]
    order = [*METHODS[:1], SCALED, *METHODS[1:]]
    tasks = list(dict.fromkeys(cell.task for cell in cells))
    ranked = sorted([*cells, *scaled], key=lambda c: (tasks.index(c.task), c.budget_s, order.index(c.method)))
    return group_by(ranked, lambda cell: (cell.task, cell.budget_s, cell.method))


def pair_rows(cells: Sequence[Cell]) -> list[PairRow]:
    """Each method beside the plain script, the same with a temperature, and random search."""
    groups, rows = _group(cells), list[PairRow]()
    for (task, budget_s, method), own in groups.items():
        for other in (PLAIN, SCALED, RANDOM):
            theirs = {cell.seed: cell for cell in groups.get((task, budget_s, other), [])}
            if method in (PLAIN, SCALED, other) or not theirs:
                continue
            pairs = [(cell, theirs[cell.seed]) for cell in own if cell.seed in theirs]

            def less(
                of: Callable[[Cell], float | None], pairs: list[tuple[Cell, Cell]] = pairs
            ) -> Interval | None:
                return paired_interval([of(cell) for cell, _ in pairs], [of(cell) for _, cell in pairs])

            nll, raw, accuracy = less(lambda cell: cell.nll), less(lambda cell: cell.raw_nll), less(_percent)
            if nll is None or raw is None or accuracy is None:
                continue
            times = [found for cell in own if (found := find_plain_time(cell, cells, other)) is not None]
            rows.append(
                PairRow(
                    task=task,
                    method=method,
                    other=other,
                    budget_s=budget_s,
                    nll=nll,
                    raw_nll=raw,
                    accuracy=accuracy,
                    verdict={-1: "better", 0: "", 1: "worse"}[nll.sign],
                    plain_cpu_s=statistics.median(times) if times else None,
                    reached=len(times),
                    seeds=nll.n,
                )
            )
    return rows


def find_plain_time(cell: Cell, cells: Sequence[Cell], other: str = PLAIN) -> float | None:
    """The CPU-seconds after which the plain script first had a cell's NLL, by its longest search of the same seed.

    Args:
        other: `SCALED` for its NLL with a temperature.

    Returns:
        None where it never had, or `other` is another method.
    """
    place = {PLAIN: 1, SCALED: 2}.get(other)
    traces = [
        each
        for each in cells
        if each.method == PLAIN and (each.task, each.seed) == (cell.task, cell.seed) and each.trace
    ]
    if place is None or not traces or cell.nll is None:
        return None
    longest = max(traces, key=lambda each: each.budget_s)
    return next((point[0] for point in longest.trace if point[place] <= cell.nll), None)


def findings(pairs: Sequence[PairRow], cells: Sequence[Cell]) -> Iterator[str]:
    """Where each method is better or worse than the others by the intervals of NLL, and cells that failed."""
    for (method, other), own in group_by(pairs, lambda row: (row.method, row.other)).items():
        said = []
        for verdict in ("better", "worse", ""):
            where = [f"{row.task} {row.budget_s:g}" for row in own if row.verdict == verdict]
            said += [f"{verdict or 'no difference seen'}: {', '.join(where) or 'nowhere'}"]
        yield f"{method} against {other}, NLL by task and CPU-seconds: {'; '.join(said)}"
    for cell in cells:
        if cell.error:
            yield f"{cell.task} {cell.budget_s:g} {cell.method}, seed {cell.seed}, failed: {cell.error}"


def panels(rows: Sequence[MethodRow]) -> Iterator[Panel]:
    """NLL over CPU-seconds, a panel for each task."""
    for task, own in group_by(rows, lambda row: row.task).items():
        yield Panel(
            title=task,
            at="median, least and most over seeds",
            x="CPU-seconds of work",
            y="test NLL, nats",
            series=series_of(own, lambda row: round(row.work_cpu_s.median, 1), "nll", "method", COLOURS),
            x_scale="log",
        )


def show(cells: Sequence[Cell], imports: dict[str, float]) -> Outcome:
    """What the study prints, writes and draws; its rows hold the cells, too."""
    rows, pairs = method_rows(cells), pair_rows(cells)
    columns = "task budget_s method work_cpu_s nll raw_nll accuracy best_nll trained combined seeds"
    found = outcome_of(
        rows,
        "Quality by method and CPU-seconds",
        columns,
        part="method",
        findings=findings(pairs, cells),
        panels=panels(rows),
        title="What a CPU-second buys",
        notes=["test NLL of the final model"],
    )
    found += outcome_of(pairs, "Method by method, seed by seed", part="pair")
    imported = [{"part": "imports", "program": name, "cpu_s": used} for name, used in imports.items()]
    kept = outcome_of(cells, part="cell").rows
    return found + Outcome(tables=[("Imports", imported)], rows=[*imported, *kept])
