"""What the live page tells about quality and hyperparameters: of saved predictions and finished members.

Both documents are made anew when members have finished, not with every event. Neither function raises: where
something cannot be computed, `missing` says why in one line.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ensemble.events import Combined
from ensemble.reporting.dashboard.class_figures import describe_classes
from ensemble.reporting.dashboard.search_plots import describe_search, plot_search, read_trials
from ensemble.reporting.dashboard.tables import explain_failure
from ensemble.reporting.dashboard.task_plots import plot_task
from ensemble.reporting.dashboard.tiles import describe_quality
from ensemble.reporting.evaluated import Evaluated, read_evaluated
from ensemble.reporting.model_figures import list_figures
from ensemble.reporting.ranking import cost_origin, finite_or_none, varied_parameters
from ensemble.reporting.sections import quality as quality_tables

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ensemble.combine.metrics import Array
    from ensemble.combine.prediction_matrix import PredictionMatrix
    from ensemble.combine.tasks import TaskMath
    from ensemble.store import RunDir, RunState

Document = dict[str, Any]

#: Members in the matrix of disagreement, and on the curve of what each added member gains.
MOST_COMPARED = 50
MOST_ADDED = 40
MOST_ROWS = 100_000  # positions that the matrix of disagreement looks at, evenly chosen
SPREAD = " The pale bar is from the lowest to the highest share over resamples of the trials (bootstrap)."
NO_PREDICTIONS = "No member has saved predictions with their true targets yet."
SO_FAR = "Not the run's result: the members that have finished so far, combined by greedy selection."


def read_importances(run_dir: RunDir, state: RunState) -> Document:
    """How much each hyperparameter matters, and figures of the search: the document `importances`.

    Returns:
        `importances`: [name, share, lowest, highest] each, the largest first; `method`, `missing`; `plots`, of the
        form of `plots`.
    """
    from ensemble.search.importance import NoImportancesError, compute_importances

    try:
        shares, method, spread = compute_importances(state)
        found = [
            [name, share, *spread.get(name, (share, share))]
            for name, share in shares.items()
            if finite_or_none(share) is not None
        ]
        document: Document = {"importances": found, "method": method + SPREAD, "missing": None}
    except NoImportancesError as error:
        document = {"importances": [], "method": "", "missing": str(error)}
    except Exception as error:
        why = f"The importances cannot be computed: {explain(error)}."
        document = {"importances": [], "method": "", "missing": why}
    return document | {"plots": _plot_search(state, [name for name, *_ in document["importances"]])}


def _plot_search(state: RunState, important: list[str]) -> list[Document]:
    """The figures of the search; none where they cannot be made, which the log says."""
    try:
        important = important or varied_parameters(state.members.values())
        return plot_search(read_trials(state), describe_search(state, important, cost_origin(state)))
    except Exception as error:
        explain_failure("figures of the search", error)
        return []


def read_quality(run_dir: RunDir, state: RunState) -> Document:
    """Members and combined model on the same samples, from the predictions in the run directory.

    Returns:
        The document `quality`:

        - `task`: its kind; `figures`: the figures of models (`model_figures.Figure`), those that say most first.
        - `split`: what the figures are of; `rows`: its samples; `left_out`: finished members that were not read.
        - `members`: id -> figures by name.  `best`: the best by the objective on the validation split.
        - `combined`: the same of the combined model; `combination`: its method, members, weights, calibration,
          note, and whether it is `so_far` only, because the run has not combined its members.
        - `intervals`, `noise`: as in the `combined` event; None where it has none.
        - `curves`: reliability of `best` and `combined`: [confidence, accuracy, samples] of each bin.
        - `classes`: figures of each class, and which are taken for which (`class_figures`).
        - `plots`: what shows whether models are right and calibrated (`plots`, `task_plots`).
        - `gain`: figures of the plain average of k members, each added where it improves the `criterion` on the
          validation split most.
        - `disagreement`: how far two members differ on the same samples, in a `unit`: "share" or "value".
        - `tables`: uncertainty, conformal and selective prediction, shifted samples (`sections.quality`).
        - `missing`: why there is nothing.
        - what of it is in words (`tiles.describe_quality`).
    """
    try:
        return _measure(run_dir, state)
    except Exception as error:
        return _nothing(state, f"The saved predictions cannot be compared: {explain(error)}.")


def explain(error: Exception) -> str:
    """What was raised, in one line; an error of this project or of the operating system says enough itself."""
    from ensemble.combine import CombineError
    from ensemble.store import StoreError

    why = " ".join(str(error).split())
    return why if isinstance(error, (CombineError, StoreError, OSError)) else f"{type(error).__name__}: {why}"


def _measure(run_dir: RunDir, state: RunState) -> Document:
    from ensemble.combine.per_class import take_part
    from ensemble.combine.tasks import find_math

    found = read_evaluated(run_dir, state)
    if found is None:
        return _nothing(state, NO_PREDICTIONS)
    combined, shown, best, rows = found.combined, found.shown, found.best, found.rows_of
    task_math = find_math(shown.task)
    document = EMPTY | {
        "task": shown.task.kind,
        "split": found.split,
        "rows": len(shown.index),
        "members": _measure_members(task_math, shown, combined, best),
        "best": best,
        "disagreement": _disagreement(shown.select_configurations()),
        "left_out": sum(m.state == "finished" for m in state.members.values()) - len(rows),
        "tables": [table.as_dict() for table in quality_tables.tabulate(state)],
    }
    known, measured = found.valid.select(found.both), shown.select(found.both)
    models = {"best": rows[best]}
    if known.target is not None and found.both and task_math.criteria:
        document["criterion"] = task_math.default_criterion
        distinct = known.select_configurations()
        document["gain"] = _gain_curve(task_math, distinct, measured.select(distinct.members))
    if state.combined is not None:
        document |= _describe_combined(combined)
        values = found.combine()
        models |= {} if values is None else {"combined": values}
    elif found.both and task_math.criteria:
        values, fields = _combine_so_far(state, task_math, found)
        document |= fields
        models["combined"] = values
    if shown.target is not None:
        curves = {of: task_math.reliability(values, shown.target) for of, values in models.items()}
        if combined.reliability:
            curves["combined"] = combined.reliability["ensemble"]
        document["curves"] = {of: curve for of, curve in curves.items() if curve}
        own = {of: take_part(replace(shown, members=[of], values=[each]), combined) for of, each in models.items()}
        part, target = {of: model.values[0] for of, model in own.items()}, own["best"].target
        assert target is not None
        document["classes"] = describe_classes(shown.task, part, target, combined.classes)
        document["plots"] = plot_task(shown.task, models, shown.target, combined.classes)
    ranking = (state.objective, state.direction)
    names = [*(document["combined"] or {}), *(name for each in document["members"].values() for name in each)]
    document["figures"] = [figure.as_document() for figure in list_figures(names, shown.task, ranking)]
    return document | describe_quality(document, ranking, shown.task, has_ended=state.ended is not None)


#: The document before anything is known.
EMPTY: Document = {
    "task": "classification",
    "figures": [],
    "split": "valid",
    "rows": 0,
    "members": {},
    "combined": None,
    "combination": None,
    "intervals": None,
    "noise": None,
    "best": None,
    "curves": {},
    "plots": [],
    "classes": None,
    "criterion": None,
    "gain": [],
    "disagreement": None,
    "tables": [],
    "left_out": 0,
    "missing": None,
}


def _nothing(state: RunState, missing: str) -> Document:
    """The document where nothing can be compared: what the run says of its combined model, and why."""
    combination = None if state.combined is None else _describe_combination(state.combined)
    document = EMPTY | {"combination": combination, "missing": missing}
    return document | describe_quality(document, (state.objective, state.direction), has_ended=False)


def _measure_members(
    task_math: TaskMath, shown: PredictionMatrix, combined: Combined, best: str
) -> dict[str, dict[str, float]]:
    """The figures of each member; of functions that the user gave only the run knows them, of the best member."""
    measured = (combined.metrics or {}).get("best") or {}
    found: dict[str, dict[str, float]] = {member: {} for member in shown.members}
    if shown.target is not None:
        more = _list_split_metrics(task_math, measured)
        for member, values in zip(shown.members, shown.values, strict=True):
            found[member] = task_math.measure(values, shown.target, more)
    if combined.best_member == best:
        found[best] = {**measured, **found[best]}
    return found


def _list_split_metrics(task_math: TaskMath, measured: Mapping[str, float]) -> list[str]:
    """The metrics of the whole split which the run reported and whose names say how to compute them."""
    from ensemble.spec.split_metrics import KNOWN

    return [name for name in measured if name in KNOWN and task_math.task.kind in KNOWN[name].kinds]


def _describe_combination(combined: Combined) -> Document:
    names = ("method", "members", "weights", "temperature", "calibration", "note", "reason")
    return {name: getattr(combined, name) for name in names} | {"so_far": False}


def _describe_combined(combined: Combined) -> Document:
    """The fields of the combined model that the run has made."""
    fields: Document = {
        "combination": _describe_combination(combined),
        "intervals": combined.intervals,
        "noise": combined.noise,
    }
    if combined.metrics:
        fields["combined"] = combined.metrics["ensemble"]
    return fields


def _gain_curve(task_math: TaskMath, valid: PredictionMatrix, shown: PredictionMatrix) -> list[Document]:
    """Figures on the shown split after each added member; the members are chosen on the validation split."""
    assert valid.target is not None and shown.target is not None
    curve: list[Document] = []
    average: Array | None = None
    for k, i in enumerate(task_math.selection_order(valid.values, valid.target, MOST_ADDED), start=1):
        added = shown.values[i]
        average = added if average is None else task_math.mix([average, added], np.array([1 - 1 / k, 1 / k]))
        curve.append(
            {"members": k, "added": shown.members[i], **task_math.measure(np.asarray(average), shown.target)}
        )
    return curve


def _disagreement(shown: PredictionMatrix) -> Document | None:
    """How far two members differ, of the best members, by rank."""
    if len(shown.members) < 2:
        return None
    kind = shown.task.kind
    rows = [_thin(_decide(shown, values)) for values in shown.values[:MOST_COMPARED]]
    if len({len(row) for row in rows}) > 1:
        return None
    if kind in ("classification", "multilabel"):
        what = "name different classes" if kind == "classification" else "decide otherwise on a label"
        unit, reading, compare = "share", f"Share of samples for which two members {what}.", _share_of_different
    else:
        unit, compare = "value", _root_mean_square
        what = "outputs" if kind == "free" else "predictions, in the unit of the target"
        reading = f"Root mean square difference of two members' {what}."
    return {
        "members": shown.members[:MOST_COMPARED],
        "matrix": [[compare(a, b) for b in rows] for a in rows],
        "unit": unit,
        "reading": reading,
    }


def _decide(shown: PredictionMatrix, values: Array) -> Array:
    """What a member decides at each position that takes part: a class, a label, a number; [k]."""
    from ensemble.combine.metrics import find_known

    flat: Array = shown.task.decide(values).ravel()
    return flat if shown.task.kind == "free" or shown.target is None else flat[find_known(shown.target).ravel()]


def _thin(row: Array) -> Array:
    if len(row) <= MOST_ROWS:
        return row
    thinned: Array = row[np.linspace(0, len(row) - 1, MOST_ROWS).astype(int)]
    return thinned


def _share_of_different(first: Array, second: Array) -> float:
    return round(float(np.mean(first != second)), 5)


def _root_mean_square(first: Array, second: Array) -> float:
    return float(f"{np.sqrt(np.mean((first.astype(np.float64) - second) ** 2)):.6g}")


def _combine_so_far(state: RunState, task_math: TaskMath, found: Evaluated) -> tuple[Array, Document]:
    """What the members finished so far would predict together, and the fields of the document about them."""
    assert found.shown.target is not None
    combination = found.combine_so_far(state, task_math)
    predicted = combination.predict(found.shown.select(found.both).values)
    weights = {m: float(w) for m, w in zip(found.both, combination.weights, strict=True) if w > 0}
    about = {"method": combination.method, "members": list(weights), "weights": weights, "so_far": True}
    factor = {"method": task_math.calibration, "value": combination.temperature, "reason": None}
    about |= {"temperature": combination.temperature, "calibration": factor, "note": SO_FAR}
    about["reason"] = combination.reason
    return predicted, {"combined": task_math.measure(predicted, found.shown.target), "combination": about}
