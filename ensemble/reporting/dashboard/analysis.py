"""The documents of the combined model's quality and of the search: from saved predictions and finished members.

Both are made anew when members have finished, not with every event. Neither function raises: where something
cannot be computed, `missing` says why in one line.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ensemble.events import NOT_COMBINED, Combined
from ensemble.reporting.dashboard.plots import plot_numbers, plot_reliability
from ensemble.reporting.dashboard.run_section import explain_failure
from ensemble.reporting.dashboard.search_plots import plot_search
from ensemble.reporting.dashboard.tiles import describe_model, describe_origin
from ensemble.reporting.model_figures import list_figures
from ensemble.reporting.ranking import finite_or_none, rank_members, varied_parameters
from ensemble.reporting.sections import Cell, Table, quality, scored
from ensemble.spec import SpecError
from ensemble.store.regular_files import measure
from pipelines.providers import import_object

if TYPE_CHECKING:
    from ensemble.combine.metrics import Array
    from ensemble.combine.per_class import PerClass
    from ensemble.combine.prediction_matrix import PredictionMatrix
    from ensemble.combine.tasks import TaskMath
    from ensemble.store import RunDir, RunState

#: Members of which predictions are read, those of the combined model and the best first.
MOST_MEMBERS = 300
MOST_BYTES = 256 * 2**20


@dataclass(frozen=True)
class Evaluated:
    """The predictions that are shown.

    Attributes:
        combined: the run's event.
        split: "test" or "valid".
        valid, shown: the predictions on the validation split, and on `split`.
        best: the best member by the objective.
    """

    combined: Combined
    split: str
    valid: PredictionMatrix
    shown: PredictionMatrix
    best: str

    @property
    def rows_of(self) -> dict[str, Array]:
        """Member -> its predictions [n, ...] on the split."""
        return dict(zip(self.shown.members, self.shown.values, strict=True))

    def combine(self) -> Array | None:
        """The combined model's predictions [n, ...], as the run combined; None where they do not determine it."""
        from ensemble.combine.recorded import combine_again

        both = [member for member in self.valid.members if member in self.shown.members]
        valid, measured = self.valid.select(both), self.shown.select(both)
        return combine_again(self.combined, valid, measured, is_valid=self.split == "valid")


def read_evaluated(run_dir: RunDir, state: RunState) -> Evaluated | None:
    """Reads the predictions that are shown; None while no member has saved any, with targets if its task has some.

    Raises:
        DamagedError: predictions are not what the log says that was saved.
        CombineError: members predicted other samples.
    """
    from ensemble.combine.prediction_matrix import read_prediction_matrix

    state = state.as_finished()
    combined = state.combined or NOT_COMBINED
    chosen = _choose_members(run_dir, state)
    valid = read_prediction_matrix(run_dir, state, chosen, "valid")
    split, shown = "valid", valid
    if combined.split != "valid":
        test = read_prediction_matrix(run_dir, state, chosen, "test")
        if test.members and test.target is not None:
            split, shown = "test", test
    if not shown.members or (shown.target is None and shown.task.kind != "free"):
        return None
    best = combined.best_member
    best = best if best in shown.members else shown.members[0]  # they are ranked
    return Evaluated(combined, split, valid, shown, best)


def _choose_members(run_dir: RunDir, state: RunState) -> list[str]:
    """Finished members, those of the combined model first, then the best, as far as they can be held in memory."""
    finished = [member.id for member in rank_members(state) if member.state == "finished"]
    finished_names = set(finished)
    order = [member for member in (state.combined or NOT_COMBINED).members if member in finished_names]
    chosen: list[str] = []
    size = 0
    for member in dict.fromkeys([*order, *finished]):
        size += measure(run_dir.predictions(member)) or 0
        if chosen and (size > MOST_BYTES or len(chosen) == MOST_MEMBERS):
            break
        chosen.append(member)
    return sorted(chosen, key=finished.index)


Document = dict[str, Any]

SPREAD = " The pale bar is from the lowest to the highest share over resamples of the trials (bootstrap)."
NOT_YET = "The run combines its members at its end."
MOST_LISTED = 30  # classes, confusions
MODELS = {"combined": "combined model", "best": "best member"}


def read_importances(run_dir: RunDir, state: RunState, *, computes: bool = True) -> Document:
    """How much each hyperparameter matters, and figures of the search: the document `importances`.

    Args:
        computes: whether importances are computed, which takes seconds; else `missing` says so.

    Returns:
        `importances`: [name, share, lowest, highest] each, the largest first; `method`, `missing`; `plots`.
    """
    importances: list[list[Any]] = []
    method, missing = "", None
    if not computes:
        missing = "The report has importances of searches; `ensemble dashboard` computes those of a list."
    else:
        try:
            shares, method, spread = import_object("ensemble.search.importance:compute_importances")(state)
            importances = [
                [name, share, *spread.get(name, (share, share))]
                for name, share in shares.items()
                if finite_or_none(share) is not None
            ]
        except SpecError as error:
            missing = str(error)
        except Exception as error:
            missing = f"The importances cannot be computed: {explain(error)}."
    try:
        varied = varied_parameters(state.members.values())
        plots = plot_search(state, [name for name, *_ in importances] or varied)
    except Exception as error:
        explain_failure("figures of the search", error)
        plots = []
    method += SPREAD if importances else ""
    return {"importances": importances, "method": method, "missing": missing, "plots": plots}


def read_quality(run_dir: RunDir, state: RunState) -> Document:
    """The combined model beside its members on the same samples, from the predictions in the run directory.

    Returns:
        The document `quality`: `title`, `origin` (what the figures are of), `tiles`, `names` of models, `plots`,
        `matrices` (confusions by model: `of`, `names`, `cells` [true, predicted, count, share of the true class]),
        `tables`, and `missing`: why there is nothing.
    """
    try:
        evaluated = None if state.combined is None else read_evaluated(run_dir, state)
        if evaluated is not None:
            return _measure(evaluated, state)
        missing = NOT_YET if state.combined is None else "No member has saved predictions with their true targets."
    except Exception as error:
        missing = f"The saved predictions cannot be compared: {explain(error)}."
    return {
        "title": "The combined model",
        "origin": "" if state.combined is None else describe_origin(state.combined),
        "tiles": [],
        "names": {},
        "plots": [],
        "matrices": [],
        "tables": [table.as_dict() for table in quality.tabulate(state)],
        "missing": missing,
    }


def explain(error: Exception) -> str:
    """What was raised, in one line; an error of this project or of the operating system says enough itself."""
    from ensemble.combine import CombineError
    from ensemble.store import StoreError

    why = " ".join(str(error).split())
    return why if isinstance(error, (CombineError, StoreError, OSError)) else f"{type(error).__name__}: {why}"


def _measure(evaluated: Evaluated, state: RunState) -> Document:
    from ensemble.combine.tasks import find_math

    combined, shown = evaluated.combined, evaluated.shown
    names = {"best": f"best member ({evaluated.best})", "combined": "combined"}
    values = evaluated.combine()
    models = {"best": evaluated.rows_of[evaluated.best]} | ({} if values is None else {"combined": values})
    plots, matrices, tables = list[Document](), list[Document](), [_tabulate_models(evaluated, state)]
    if shown.target is not None:
        task_math = find_math(shown.task)
        curves = {of: task_math.reliability(values, shown.target) for of, values in models.items()}
        if combined.reliability:
            curves["combined"] = combined.reliability["ensemble"]
        drawn_curves = {of: curve for of, curve in curves.items() if curve}
        plots += plot_reliability(shown.task.kind, drawn_curves, names)
        plots += plot_numbers(shown.task, models, shown.target)
        matrices, class_tables = _describe_classes(evaluated, models)
        tables += class_tables
    left_out = sum(member.state == "finished" for member in state.members.values()) - len(shown.members)
    return {
        "title": "The combined model",
        "origin": describe_origin(combined, len(shown.index), evaluated.split, left_out),
        "tiles": [vars(tile) for tile in describe_model(combined, (state.objective, state.direction))],
        "names": names,
        "plots": plots,
        "matrices": matrices,
        "tables": [table.as_dict() for table in (*tables, *quality.tabulate(state))],
        "missing": None,
    }


def _tabulate_models(evaluated: Evaluated, state: RunState) -> Table:
    """The figures of the combined model and of each member that was read, with their weights."""
    from ensemble.combine.tasks import find_math

    combined, shown = evaluated.combined, evaluated.shown
    members = _measure_members(find_math(shown.task), evaluated)
    ours = (combined.metrics or {}).get("ensemble") or {}
    names = dict.fromkeys(name for figures in (ours, *members.values()) for name in figures)
    figures = list_figures(names, shown.task, (state.objective, state.direction))
    weights = combined.weights or {}
    head = [("model", "text"), *((figure.heading, "") for figure in figures), ("weight", "")]
    rows: list[list[Cell]] = (
        [["combined", *(scored(ours.get(figure.name)) for figure in figures), None]] if ours else []
    )
    for member, own in members.items():
        weight = weights.get(member)
        cell = None if weight is None else (f"{weight:.1%}", weight)
        name = f"{member} (best)" if member == evaluated.best else member
        rows.append([name, *(scored(own.get(figure.name)) for figure in figures), cell])
    about = 'On the same samples; "best" is the best member by the objective on validation.'
    return Table("models", "Combined model and members", about, head, rows)


def _measure_members(task_math: TaskMath, evaluated: Evaluated) -> dict[str, Mapping[str, float]]:
    """The figures of each member; of functions that the user gave only the run knows them, of the best member."""
    from ensemble.spec.split_metrics import KNOWN

    combined, shown = evaluated.combined, evaluated.shown
    measured = (combined.metrics or {}).get("best") or {}
    members: dict[str, Mapping[str, float]] = {member: {} for member in shown.members}
    if shown.target is not None:
        more = [name for name in measured if name in KNOWN and shown.task.kind in KNOWN[name].kinds]
        for member, values in zip(shown.members, shown.values, strict=True):
            members[member] = task_math.measure(values, shown.target, more)
    if combined.best_member == evaluated.best:
        members[evaluated.best] = {**measured, **members[evaluated.best]}
    return members


def _describe_classes(evaluated: Evaluated, models: Mapping[str, Array]) -> tuple[list[Document], list[Table]]:
    """The confusion matrices of models, and tables of classes; none where the task has no classes."""
    from ensemble.combine.per_class import MOST_SHOWN, compute_per_class, take_part
    from ensemble.spec.task import LABELS

    shown, combined = evaluated.shown, evaluated.combined
    if shown.task.kind not in LABELS:
        return [], []
    figures: dict[str, PerClass] = {}
    for of in MODELS:
        if of in models:
            part = take_part(replace(shown, members=[of], values=[models[of]]), combined)
            assert part.target is not None
            figures[of] = compute_per_class(shown.task, part.values[0], part.target, combined.classes)
    of, first = next(iter(figures.items()))
    is_classification = shown.task.kind == "classification"
    has_matrix = is_classification and len(first.support) <= MOST_SHOWN
    tables = [_tabulate_classes(of, first)]
    if is_classification and not has_matrix:
        tables.append(_tabulate_confusions(of, first))
    return [_make_matrix(*pair) for pair in figures.items()] if has_matrix else [], tables


def _make_matrix(of: str, figures: PerClass) -> Document:
    cells = [[t, p, n, round(n / int(figures.support[t]), 5)] for t, p, n in figures.cells.tolist()]
    return {"of": MODELS[of], "names": [figures.name(i) for i in range(len(figures.support))], "cells": cells}


def _tabulate_classes(of: str, figures: PerClass) -> Table:
    what = "label" if figures.task == "multilabel" else "class"
    order = sorted(range(len(figures.support)), key=lambda i: (figures.support[i] == 0, figures.f1[i], i))
    rows: list[list[Cell]] = [
        [
            figures.name(i),
            *(scored(float(column[i])) for column in (figures.precision, figures.recall, figures.f1)),
            float(figures.support[i]),
        ]
        for i in order[:MOST_LISTED]
    ]
    omitted = f" The {len(rows)} worst of {len(order)}; results.json has all." if len(order) > len(rows) else ""
    reading = f"Of the {MODELS[of]}, the lowest F1 first; support is how many samples are of the {what}.{omitted}"
    head = [(what, "text"), ("precision", ""), ("recall", ""), ("F1", ""), ("support", "")]
    return Table("per-class", f"Figures of each {what}", reading, head, rows)


def _tabulate_confusions(of: str, figures: PerClass) -> Table:
    rows: list[Sequence[Cell]] = [
        [row["true"], row["predicted"], row["count"], (f"{row['share']:.1%}", row["share"])]
        for row in figures.list_confusions(MOST_LISTED)
    ]
    reading = f"Of the {MODELS[of]}, the {MOST_LISTED} most frequent at most; the share is that of the true class."
    head = [("true class", "text"), ("predicted as", "text"), ("samples", ""), ("share", "")]
    return Table("confusions", "Classes taken for others", reading, head, rows)
