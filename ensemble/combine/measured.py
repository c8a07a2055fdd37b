"""Measures a combined model beside its members: the measured fields of the `combined` event."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from ensemble.combine.bootstrap import Resampled, find_noise, intervals, resample
from ensemble.combine.combination import Combination, is_enough
from ensemble.combine.metrics import Array, compute_defined, find_known
from ensemble.combine.prediction_matrix import PredictionMatrix
from ensemble.combine.quantify import Quantified
from ensemble.combine.tasks import Statistic, TaskMath, find_math
from ensemble.combine.tasks.base import Model
from ensemble.spec.positions import list_pieces, take_positions
from ensemble.spec.recipe import Recipe, has_own_loop, reported_metrics
from ensemble.spec.split_metrics import KNOWN, SplitMetricLike, bind_fields, list_fields, name_of

if TYPE_CHECKING:
    from ensemble.spec import Ensemble

TOO_MANY = "there are too many predictions to compute it again for other samples"

UNMEASURED = dict.fromkeys(("metrics", "best_member", "best_calibrated", "reliability", "intervals", "noise"))


def measure(
    task_math: TaskMath,
    valid: PredictionMatrix,
    report: PredictionMatrix,
    combination: Combination,
    combined: Quantified,
    best: str | None,
    ensemble: Ensemble,
) -> tuple[dict[str, Any], list[str]]:
    """The measured fields of the `combined` event, and what is to be noted.

    `combined` are the ensemble's predictions of `report`, or of a part of its positions: then all are predicted
    once more, some at a time. `best`: the best member on `valid`, None where there is no target.
    """
    if best is None:
        return UNMEASURED, []
    assert valid.target is not None and report.target is not None and combined.target is not None
    target = report.target
    asked, notes = list_split_metrics(task_math, ensemble), []
    for metric in [one for one in asked if not report.fields.keys() >= set(list_fields(one))]:
        asked.remove(metric)
        notes.append(f"the metric {name_of(metric)!r} is not computed: no member has kept the fields it asks for")
    more = [bind_fields(metric, report.fields) for metric in asked]
    at, is_part = valid.members.index(best), combined.values.shape != report.values[0].shape

    def measure_model(model: Model, arrays: Sequence[Array]) -> tuple[list[Statistic], dict[str, float]]:
        own = task_math.statistics_of(model, arrays, target)
        return own, task_math.finish(own, lambda: model(arrays), target, more)

    take_first = operator.itemgetter(0)
    # Metrics of the whole split need all of it in memory.
    whole = _predict_whole(combination, report) if is_part and more else combined.values
    parts = (combination.predict, report.values) if is_part and not more else (take_first, [whole])
    statistics, metrics, alone = {}, {}, []
    statistics["ensemble"], metrics["ensemble"] = measure_model(*parts)
    for number, own in enumerate(report.values):
        of_member, figures = measure_model(take_first, [own])
        alone.append(figures)
        if number == at:
            statistics["best"], metrics["best"] = of_member, figures
    calibrated: dict[str, float] | None = None
    is_calibrated = ensemble.calibrate and task_math.calibration is not None and is_enough(valid.target)
    if is_calibrated and combined.best is not None:  # of the same part of the positions as the calibration
        factor = task_math.fit_calibration(valid.values[at], valid.target)
        alike = [combined.best], combined.target
        known = task_math.statistics_of(lambda arrays: task_math.calibrate(arrays[0], factor), *alike)
        whole_best = partial(task_math.calibrate, combined.best, factor)
        calibrated = task_math.finish(known, whole_best, combined.target, [] if is_part else more)
    for of, values in (("ensemble", whole), ("best", report.values[at])):
        drawn = {name for statistic in statistics[of] for name in statistic(None)}
        if left := [metric for metric in asked if name_of(metric) not in drawn]:
            split = Resampled(left, values, target, task_math.task, report.fields)
            statistics[of] += resample(split, metrics[of])
    found = intervals(statistics, len(target))
    missing = [one for one in more if not isinstance(one, str) and name_of(one) not in metrics["ensemble"]]
    failed = compute_defined(missing, whole, target, task_math.task)[1]
    models = {"ensemble": combined.values, "best": combined.best}
    curves = {of: task_math.reliability(own, combined.target) for of, own in models.items() if own is not None}
    fields = {
        "metrics": {
            **metrics,
            "mean": {name: float(np.mean([one[name] for one in alone if name in one])) for name in alone[0]},
        },
        "intervals": found,
        "noise": find_noise(found, [name for name in metrics["ensemble"] if name in metrics["best"]]),
        "best_member": best,
        "best_calibrated": calibrated,
        "reliability": {of: [list(point) for point in curve] for of, curve in curves.items() if curve} or None,
    }
    if is_part:
        error = _measure_error(task_math, combined)
        notes.append(f"by that part alone, {task_math.default_criterion} has a standard error of {error:.2g}")
    notes += [f"the metric {name!r} cannot be computed: {why}" for name, why in failed.items()]
    if asked and not any(isinstance(each, Resampled) for each in statistics["ensemble"]):
        drawn = {name for statistic in statistics["ensemble"] for name in statistic(None)}
        without = [name for name in map(name_of, asked) if name in metrics["ensemble"] and name not in drawn]
        notes += [f"{name} has no interval: {TOO_MANY}" for name in without]
    return fields, notes


def _predict_whole(combination: Combination, report: PredictionMatrix) -> Array:
    """What the combined model predicts of all positions, float32 as members' predictions, made some at a time."""
    found, tail = np.empty(report.values[0].shape, np.float32), find_math(report.task).tail
    for rows, at in list_pieces(report.task, found.shape):
        some = combination.predict([take_positions(own[rows], at, tail) for own in report.values])
        take_positions(found[rows], at, tail)[...] = some
    return found


def _measure_error(task_math: TaskMath, combined: Quantified) -> float:
    """The standard error of the criterion as a figure of a part of the positions, by eight groups of these."""
    parts = [(combined.values[:, at::8], cast("Array", combined.target)[:, at::8]) for at in range(8)]
    found = [task_math.measure(*one)[task_math.default_criterion] for one in parts if find_known(one[1]).any()]
    return float(np.std(found) / max(1, len(found) - 1) ** 0.5)


def list_split_metrics(task_math: TaskMath, ensemble: Ensemble) -> list[SplitMetricLike]:
    """The metrics of the whole split: those of the recipe, and the objective where the members' evaluation
    added it, rather than the user's code, which may mean something else by its name.
    """
    recipe, objective = ensemble.recipe, str(ensemble.objective)
    more = list(getattr(recipe, "split_metrics", ()))
    known = KNOWN.get(objective)
    if (
        known is None
        or task_math.task.kind not in known.kinds
        or not isinstance(recipe, Recipe)
        or has_own_loop(recipe)
    ):
        return more
    reported = reported_metrics(recipe)
    return more if reported is None or objective in reported else [*more, objective]
