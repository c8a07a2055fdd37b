"""Fits and applies a combination of members' predictions, by any of the four methods or the user's function."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ensemble.combine.methods import average_weights, list_representatives, share_out
from ensemble.combine.metrics import Array, CombineError
from ensemble.combine.tasks import TaskMath, find_math
from ensemble.spec import COMBINERS, unknown_name
from ensemble.spec.task import CLASSIFICATION, LABELS, Task
from pipelines.providers import import_object

if TYPE_CHECKING:
    from ensemble.combine.prediction_matrix import PredictionMatrix
    from ensemble.spec import Ensemble

Combine = Callable[..., object]
"""`combine(values [m, n, ...]) -> [n, ...]` of torch tensors."""

CALIBRATION_SAMPLES = 50
"""Below so many validation samples (positions count) a calibration that is fitted makes figures worse."""

FUNCTION = "function"
"""The method of a combination by the user's function."""


@dataclass(frozen=True)
class Combination:
    """How members become one model.

    Attributes:
        method: average, weighted, greedy, stack or function: what was really done.
        weights: float64 [m], sum 1. For a stack they only tell how much each member weighs in it; a function sees
            all members alike.
        calibration: the parameters of the calibrator, applied last, such as the temperature; 1.0 for none.
        calibrator: its name in `ensemble.spec.fields.CALIBRATORS`; None: the task's own.
        stack: the regression of a stack (`ensemble.combine.stacks.Stack`), else None.
        reason: why `method` is not the one that was asked for, else None.
        task: what is predicted.
        function: the user's function, else None.
        thresholds: by which classes or labels are predicted, float64 [C] (`ensemble.combine.thresholds`), or None.
    """

    method: str
    weights: Array
    calibration: Any = 1.0
    calibrator: str | None = None
    stack: Any = None
    reason: str | None = None
    task: Task = CLASSIFICATION
    function: Combine | None = None
    thresholds: Array | None = None

    def predict(self, values: Sequence[Array]) -> Array:
        """Calibrated values float64 [n, ...] from m arrays [n, ...], in the order of the weights."""
        if len(values) != len(self.weights):
            raise CombineError(f"{len(self.weights)} members were combined, predictions of {len(values)} given")
        return find_math(self.task).calibrate(self._pool(values), self.calibration, self.calibrator)

    def _pool(self, values: Sequence[Array]) -> Array:
        if self.function is not None:
            return call_function(self.function, values, self.task)
        if self.stack is not None:
            return np.asarray(self.stack.predict(values))
        return find_math(self.task).mix(values, self.weights)


def read_calibration(record: Mapping[str, Any] | None) -> tuple[Any, str | None]:
    """Parameters and calibrator of `calibration` of a `combined` event; 1.0 where nothing was calibrated."""
    value = (record or {}).get("value")
    return 1.0 if value is None else value, (record or {}).get("method")


def call_function(function: Combine, values: Sequence[Array], task: Task) -> Array:
    """What the user's function makes of the members' values, float64 [n, ...]. It is given and gives torch
    tensors, as in a loaded ensemble.

    Raises:
        CombineError: it fails, gives something else than predictions of the task for the same samples, or other
            ones of a sample where other samples are with it: a loaded ensemble is given batches.
    """
    name = getattr(function, "__name__", repr(function))
    made = _call(function, name, values)
    if made.shape[:1] != values[0].shape[:1]:
        shape = [len(values), *values[0].shape]
        raise CombineError(f"Ensemble.combine={name} gives {list(made.shape)} for {shape}; expected [n, ...]")
    invalid = find_math(task).explain_invalid(made)
    if invalid is None and task.kind != "free" and made.shape != values[0].shape:
        invalid = f"values of shape {list(made.shape)}, not {list(values[0].shape)}"
    if invalid is not None:
        raise CombineError(f"Ensemble.combine={name} gives no predictions of the task {task.kind}: {invalid}")
    again = _call(function, name, [own[::2] for own in values])
    # Kernels may round otherwise for fewer rows; a mean and its variance have units of their own.
    has_one_unit = task.kind in LABELS or made.ndim < 2 or made.shape != values[0].shape
    axes = None if has_one_unit else tuple(range(made.ndim - 1))
    rounding = 1e-5 * np.max([np.abs(own).max(axis=axes) for own in values], axis=0)
    if again.shape != made[::2].shape or not np.allclose(again, made[::2], rtol=1e-3, atol=rounding):
        raise CombineError(
            f"Ensemble.combine={name} gives one sample different values in different batches: a sample's result "
            "must depend on the members' values of that sample alone, [m, n, ...] -> [n, ...] for any n"
        )
    return np.asarray(find_math(task).normalise(made), dtype=np.float64)


def _call(function: Combine, name: str, values: Sequence[Array]) -> Array:
    import torch

    try:
        with torch.no_grad():
            stacked = np.stack([np.asarray(own, dtype=np.float32) for own in values])
            return np.asarray(torch.as_tensor(function(torch.from_numpy(stacked))).cpu(), dtype=np.float64)
    except Exception as error:  # whatever a user's function raises
        why = " ".join(f"{type(error).__name__}: {error}".split())
        raise CombineError(
            f"Ensemble.combine={name} failed for values {[len(values), *values[0].shape]}: {why}"
        ) from error


def fit(
    method: str | Combine,
    values: Sequence[Array],
    target: Array | None,
    *,
    task: Task = CLASSIFICATION,
    objective: str | None = None,
    calibrate: bool | str = True,
) -> Combination:
    """Fit a combination to validation predictions; see `fit_held_out`."""
    return fit_held_out(method, values, target, task=task, objective=objective, calibrate=calibrate)[0]


def is_enough(target: Array) -> bool:
    """Whether a calibration that is fitted to these targets is worth it."""
    return np.asarray(target).size >= CALIBRATION_SAMPLES


def fit_stack(
    math: TaskMath, values: Sequence[Array], target: Array, groups: Sequence[int] | None
) -> tuple[Any, Array]:
    """`TaskMath.fit_stack`, of configurations: the coefficients of each are shared out to its members, so that the
    mean of their logarithms, logits or points takes the place of its out-of-fold predictions.
    """
    stack, held_out = math.fit_stack([values[at] for at in list_representatives(groups, len(values))], target)
    return stack if groups is None else stack.share_out(groups), held_out


def fit_held_out(
    method: str | Combine,
    values: Sequence[Array],
    target: Array | None,
    *,
    task: Task = CLASSIFICATION,
    objective: str | None = None,
    calibrate: bool | str = True,
    groups: Sequence[int] | None = None,
) -> tuple[Combination, Array]:
    """Fit a combination to validation predictions.

    Selection and calibration see the same rows, so that scores on them are optimistic, and the calibration comes
    out a little too sure. A stack is calibrated on out-of-fold predictions.

    Args:
        method: one of `ensemble.spec.COMBINERS`, or a function (`Combine`).
        values: m arrays [n, ...], rows aligned, laid out by the task.
        target: [n, ...]; None (unknown) leaves nothing but the plain average or a function, uncalibrated.
        task: what is predicted.
        objective: the criterion by which greedy selection is never worse on these rows than the best single
            member; None for the task's own. It selects by the task's own, which tells more per row, and by the
            objective only where that falls short.
        calibrate: whether to calibrate; or the name of a calibrator, instead of the task's own.
        groups: see `PredictionMatrix.groups`: what is selected are then configurations, whose members share the
            weight.

    Returns:
        The combination, and its calibrated predictions of the same rows; of a stack, out-of-fold ones.

    Raises:
        CombineError: no such method, or none for the task; no members; targets that are not the task's.
    """
    if not callable(method) and method not in COMBINERS:
        raise CombineError(unknown_name("there is no way to combine called", method, COMBINERS))
    if not values:
        raise CombineError("there are no members to combine")
    function = method if callable(method) else None
    # One row for each configuration; without groups these are all.
    chosen = [values[at] for at in list_representatives(groups, len(values))]
    equal = share_out(average_weights(len(chosen)), groups)
    name = FUNCTION if function is not None else str(method)
    if target is None:
        why = "the validation predictions have no target, so nothing can be selected or calibrated"
        combination = Combination("average", equal, reason=why, task=task)
        if function is not None:
            combination = Combination(name, equal, task=task, function=function)
        return combination, combination.predict(values)
    math, target = find_math(task), np.asarray(target)
    for own in values:
        math.check_target(own, target)
    weights, stack, reason = equal, None, None
    held_out: Array | None = None
    if function is not None:
        held_out = call_function(function, values, task)
    elif name == "stack":
        try:
            stack, held_out = fit_stack(math, values, target, groups)
            weights = stack.shares()
        except CombineError as error:
            name, reason = "average", f"{error}; averaged instead"
    elif name == "weighted":
        weights = share_out(math.weighted_weights(chosen, target), groups)
    elif name == "greedy":
        weights = math.greedy_weights(chosen, target)
        wanted = objective or math.default_criterion
        if wanted != math.default_criterion and not math.is_at_least_best(chosen, target, weights, wanted):
            weights = math.greedy_weights(chosen, target, wanted)
        weights = share_out(weights, groups)
    if held_out is None:
        held_out = math.mix(values, weights)
    calibrator = calibrate if isinstance(calibrate, str) else None
    calibration = math.fit_calibration(held_out, target, calibrator) if calibrate and is_enough(target) else 1.0
    combination = Combination(name, weights, calibration, calibrator, stack, reason, task, function)
    return combination, math.calibrate(held_out, calibration, calibrator)


def fit_declared(
    ensemble: Ensemble, valid: PredictionMatrix, method: str | Combine | None = None
) -> tuple[Combination, Array]:
    """The combination that an ensemble declares, or by another method, fitted to the validation predictions.

    Returns:
        It, and its calibrated predictions of the same rows; see `fit_held_out`.

    Raises:
        CombineError: see `fit_held_out` and `fit_thresholds`.
    """
    task_math = find_math(valid.task)
    combination, held_out = fit_held_out(
        ensemble.combine if method is None else method,
        valid.values,
        valid.target,
        task=valid.task,
        objective=task_math.choose_criterion(ensemble.objective, ensemble.mode) if task_math.criteria else None,
        calibrate=ensemble.calibrate,
        groups=valid.groups,
    )
    if ensemble.thresholds is not None and valid.target is not None:
        fit_thresholds = import_object("ensemble.combine.thresholds:fit_thresholds")
        thresholds = fit_thresholds(valid.task, held_out, valid.target, ensemble.thresholds)
        combination = replace(combination, thresholds=thresholds)
    return combination, held_out
