"""Measures a combined model beside its members: the measured fields of the `combined` event."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ensemble.combine.bootstrap import Resampled, find_noise, intervals
from ensemble.combine.combination import Combination, is_enough
from ensemble.combine.metrics import Array, compute_defined
from ensemble.combine.prediction_matrix import PredictionMatrix
from ensemble.combine.tasks import Statistic, TaskMath, find_math
from ensemble.combine.tasks.base import Model
from ensemble.combine.uncertainty import Quantified
from ensemble.spec.positions import list_pieces, take_positions
from ensemble.spec.recipe import Recipe, has_own_loop, list_split_metrics
from ensemble.spec.split_metrics import bind_fields, list_fields, name_of

if TYPE_CHECKING:
    from ensemble.spec import Ensemble

TOO_MANY = "there are too many predictions to resample"

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
    target, recipe, notes = report.target, ensemble.recipe, []
    wanted = list(getattr(recipe, "split_metrics", ()))
    if isinstance(recipe, Recipe) and not has_own_loop(recipe):
        wanted = list_split_metrics(recipe, str(ensemble.objective), task_math.task)
    for metric in [one for one in wanted if not report.fields.keys() >= set(list_fields(one))]:
        wanted.remove(metric)
        notes.append(f"the metric {name_of(metric)!r} is not computed: no member saved the fields that it needs")
    more = [bind_fields(metric, report.fields) for metric in wanted]
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
    calibrator = combination.calibrator
    is_calibrated = ensemble.calibrate and (calibrator or task_math.calibrator) and is_enough(valid.target)
    if is_calibrated and combined.best is not None:  # of the same part of the positions as the calibration
        parameters = task_math.fit_calibration(valid.values[at], valid.target, calibrator)
        rival = task_math.calibrate(combined.best, parameters, calibrator)
        calibrated = task_math.measure(rival, combined.target, [] if is_part else more)
    for of, values in (("ensemble", whole), ("best", report.values[at])):
        drawn = {name for statistic in statistics[of] for name in statistic(None)}
        resampled = [metric for metric in wanted if name_of(metric) not in drawn]
        split = Resampled(resampled, values, target, task_math.task, report.fields)
        statistics[of] += [split] if resampled else []
    bounds = intervals(statistics, len(target))
    missing = [one for one in more if not isinstance(one, str) and name_of(one) not in metrics["ensemble"]]
    failed = compute_defined(missing, whole, target, task_math.task)[1]
    models = {"ensemble": combined.values, "best": combined.best}
    curves = {of: task_math.reliability(own, combined.target) for of, own in models.items() if own is not None}
    fields = {
        "metrics": {
            **metrics,
            "mean": {name: float(np.mean([one[name] for one in alone if name in one])) for name in alone[0]},
        },
        "intervals": bounds,
        "noise": find_noise(bounds, [name for name in metrics["ensemble"] if name in metrics["best"]]),
        "best_member": best,
        "best_calibrated": calibrated,
        "reliability": {of: [list(point) for point in curve] for of, curve in curves.items() if curve} or None,
    }
    notes += [f"the metric {name!r} cannot be computed: {why}" for name, why in failed.items()]
    drawn = {name for statistic in statistics["ensemble"] for name in statistic(None)}
    without = [name for name in map(name_of, wanted) if name in metrics["ensemble"] and name not in drawn]
    return fields, [*notes, *(f"{name} has no interval: {TOO_MANY}" for name in without)]


def _predict_whole(combination: Combination, report: PredictionMatrix) -> Array:
    """What the combined model predicts of all positions, float32 as members' predictions, made some at a time."""
    whole, tail = np.empty(report.values[0].shape, np.float32), find_math(report.task).tail
    for rows, at in list_pieces(report.task, whole.shape):
        some = combination.predict([take_positions(own[rows], at, tail) for own in report.values])
        take_positions(whole[rows], at, tail)[...] = some
    return whole
