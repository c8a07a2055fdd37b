"""What the cells say: quality over CPU-seconds by method, and each method against two others, seed by seed."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.results import Interval, Outcome, Spread, group_by, outcome_of, paired_interval
from benchmarks.what_it_buys.cells import METHODS, PLAIN, Cell
from benchmarks.what_it_buys.tasks import TASKS

RANDOM = "random"
Block = tuple[str, int, float]
#: The plain script's model with a temperature fitted to the validation split: the same cells.
SCALED = "optuna, scaled"


@dataclass(frozen=True, kw_only=True)
class MethodRow:
    """One method on one task with one budget; medians over seeds, with the least and the most.

    Attributes:
        task, method, budget_s: see `Cell`.  at: task and budget, for people.
        work_cpu_s: what it took.
        nll: nats, of the final model on the test split.  raw_nll: without a temperature.
        accuracy: in percent.
        best_nll: of the best single model among those that it trained.
        trained, combined: models trained to their end, and those of the final model.
        model_cpu_s: what it took for each model trained.
        seeds: that finished; `failed`: that did not.
    """

    task: str
    method: str
    budget_s: float
    at: str
    work_cpu_s: Spread
    nll: Spread
    raw_nll: Spread
    accuracy: Spread
    best_nll: Spread | None
    trained: Spread
    combined: Spread | None
    model_cpu_s: Spread | None
    seeds: int
    failed: int


@dataclass(frozen=True, kw_only=True)
class PairRow:
    """A method less another one, seed by seed: below 0 it is better in NLL, above 0 in accuracy.

    Attributes:
        task, method, budget_s: see `Cell`.  other: what it is compared with.
        at: task and budget, for people.
        nll: nats, mean difference and interval; `raw_nll`: neither with a temperature.
        accuracy: percentage points.
        verdict: "better", "worse", or "" where the interval of the NLL has 0 in it.
        won: seeds in which the NLL is lower, of `seeds` that are compared.
    """

    task: str
    method: str
    other: str
    budget_s: float
    at: str
    nll: Interval
    raw_nll: Interval
    accuracy: Interval
    verdict: str
    won: int
    seeds: int


@dataclass(frozen=True, kw_only=True)
class VerdictRow:
    """Where a method is better or worse than another by the interval of the NLL: tasks and budgets.

    Attributes:
        method, other: see `PairRow`.
        better, worse, unclear: with commas between them; "nowhere".
        won: seeds in which the NLL is lower, of all tasks and budgets, as text.
    """

    method: str
    other: str
    better: str
    worse: str
    unclear: str
    won: str


def method_rows(cells: Sequence[Cell]) -> list[MethodRow]:
    """A row for each task, budget and method with a cell that has not failed."""
    rows = []
    for (task, budget_s, method), alike in _group(cells).items():
        done = [cell for cell in alike if cell.nll is not None]
        if not done:
            continue

        def spread(of: Callable[[Cell], float | None], done: list[Cell] = done) -> Any:
            values = [value for cell in done if (value := of(cell)) is not None]
            return Spread(statistics.median(values), min(values), max(values)) if values else None

        rows.append(
            MethodRow(
                task=task,
                method=method,
                budget_s=budget_s,
                at=f"{task}, {budget_s:g}",
                work_cpu_s=spread(lambda cell: cell.work_cpu_s),
                nll=spread(lambda cell: cell.nll),
                raw_nll=spread(lambda cell: cell.raw_nll),
                accuracy=spread(_percent),
                best_nll=spread(lambda cell: cell.best_nll),
                trained=spread(lambda cell: cell.trained),
                combined=spread(lambda cell: cell.combined),
                model_cpu_s=spread(lambda cell: (cell.work_cpu_s or 0.0) / cell.trained if cell.trained else None),
                seeds=len(done),
                failed=len(alike) - len(done),
            )
        )
    return rows


def _percent(cell: Cell) -> float | None:
    return None if cell.accuracy is None else 100 * cell.accuracy


def plain_at(cell: Cell, cpu_s: float, method: str = PLAIN) -> Cell | None:
    """The plain script's cell as it was after so many CPU-seconds; None: its first trial had not ended.

    Args:
        method: `PLAIN`, or `SCALED` for its model with a temperature.
    """
    points = [point for point in cell.trace if point[0] <= cpu_s]
    if not points:
        return None
    at_s, nll, scaled_nll, accuracy = points[-1]
    own = scaled_nll if method == SCALED else nll
    figures: dict[str, Any] = {"nll": own, "raw_nll": nll, "scaled_nll": scaled_nll, "best_nll": own}
    figures |= {"accuracy": accuracy, "best_accuracy": accuracy, "work_cpu_s": at_s}
    return dataclasses.replace(
        cell, method=method, trained=len(points), combined=1, trace=(), cpu_s=None, wall_s=None, **figures
    )


def _group(cells: Sequence[Cell]) -> dict[tuple[str, float, str], list[Cell]]:
    """By task, budget and method, in the order of `TASKS`; the plain script is what it was at the budget."""
    shown = [cell for cell in cells if not cell.trace]
    for cell in (cell for cell in cells if cell.trace):
        plain_cells = [plain_at(cell, cell.budget_s, method) for method in (PLAIN, SCALED)]
        shown += [plain_cell for plain_cell in plain_cells if plain_cell is not None]
    tasks, order = [*TASKS], [PLAIN, SCALED, *METHODS[1:]]
    ranked = sorted(shown, key=lambda c: (tasks.index(c.task), c.budget_s, order.index(c.method), c.seed))
    return group_by(ranked, lambda cell: (cell.task, cell.budget_s, cell.method))


def pair_rows(cells: Sequence[Cell]) -> list[PairRow]:
    """Each method beside the plain script, the same with a temperature, and random search.

    The plain script is taken as it was after the CPU-seconds that the method took, its combination included.
    """
    plain = {_block(cell): cell for cell in cells if cell.trace}
    groups, rows = _group(cells), list[PairRow]()
    for (task, budget_s, method), own in groups.items():
        for other in (PLAIN, SCALED, RANDOM):
            if method in (PLAIN, SCALED, other):
                continue
            alike = {cell.seed: cell for cell in groups.get((task, budget_s, other), [])}
            pairs = list[tuple[Cell, Cell]]()
            for cell in own:
                long = plain.get(_block(cell))
                if other == RANDOM:
                    plain_cell = alike.get(cell.seed)
                else:
                    plain_cell = plain_at(long, cell.work_cpu_s, other) if long and cell.work_cpu_s else None
                pairs += [(cell, plain_cell)] if plain_cell is not None else []

            def less(
                of: Callable[[Cell], float | None], pairs: list[tuple[Cell, Cell]] = pairs
            ) -> Interval | None:
                return paired_interval([of(cell) for cell, _ in pairs], [of(cell) for _, cell in pairs])

            nll, raw, accuracy = less(lambda cell: cell.nll), less(lambda cell: cell.raw_nll), less(_percent)
            if nll is None or raw is None or accuracy is None:
                continue
            rows.append(
                PairRow(
                    task=task,
                    method=method,
                    other=other,
                    budget_s=budget_s,
                    at=f"{task}, {budget_s:g}",
                    nll=nll,
                    raw_nll=raw,
                    accuracy=accuracy,
                    verdict={-1: "better", 0: "", 1: "worse"}[nll.sign],
                    won=sum(is_lower(*pair) for pair in pairs),
                    seeds=nll.n,
                )
            )
    return rows


def _block(cell: Cell) -> Block:
    return cell.task, cell.seed, cell.budget_s


def is_lower(cell: Cell, other: Cell) -> bool:
    """Whether both have an NLL and the first one's is lower."""
    return cell.nll is not None and other.nll is not None and cell.nll < other.nll


def verdict_rows(pairs: Sequence[PairRow]) -> list[VerdictRow]:
    """A row for each two methods that are compared; where one seed is all there is, nothing is said."""
    rows, certain = [], [row for row in pairs if row.nll.half is not None]
    for (method, other), own in group_by(certain, lambda row: (row.method, row.other)).items():
        where = {kind: [row.at for row in own if row.verdict == kind] for kind in ("better", "worse", "")}
        better, worse, unclear = ("; ".join(places) or "nowhere" for places in where.values())
        won = f"{sum(row.won for row in own)} of {sum(row.seeds for row in own)}"
        rows.append(VerdictRow(method=method, other=other, better=better, worse=worse, unclear=unclear, won=won))
    return rows


def findings(cells: Sequence[Cell]) -> Iterator[str]:
    """Cells that failed."""
    for cell in cells:
        if cell.error:
            yield f"{cell.task} {cell.budget_s:g} {cell.method}, seed {cell.seed}, failed: {cell.error}"


def show(cells: Sequence[Cell]) -> Outcome:
    """What the study prints and writes; its rows hold the cells, too."""
    rows, pairs = method_rows(cells), pair_rows(cells)
    columns = "task budget_s method work_cpu_s nll raw_nll accuracy best_nll trained combined model_cpu_s seeds"
    shown = outcome_of(rows, "Quality by method and CPU-seconds", columns, part="method", findings=findings(cells))
    columns = "at method other nll raw_nll accuracy verdict won seeds"
    shown += outcome_of(pairs, "Method less other, seed by seed", columns, part="pair")
    shown += outcome_of(verdict_rows(pairs), "Where the interval of the NLL says so", part="verdict")
    return shown + Outcome(tables=[], rows=outcome_of(cells, part="cell").rows)
