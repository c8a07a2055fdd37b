"""Fits and applies a combination of members' predictions, by any of the four methods or the user's function."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import numpy as np

from ensemble.combine.methods import average_weights, list_representatives, share_out
from ensemble.combine.metrics import Array, CombineError
from ensemble.combine.tasks import Stack, TaskMath, find_math
from ensemble.spec import COMBINERS, unknown_name
from ensemble.spec.task import CLASSIFICATION, LABELS, Task
from ensemble.user_code.fingerprint import code_of

if TYPE_CHECKING:
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
        temperature: the factor of the calibration, applied last: of a Gaussian that of the variance; 1.0 for none.
        stacker: the regression of a stack, else None.
        reason: why `method` is not the one that was asked for, else None.
        task: what is predicted.
        function: the user's function, else None.
        thresholds: by which classes or labels are predicted, float64 [C] (`ensemble.combine.thresholds`), or None.
    """

    method: str
    weights: Array
    temperature: float = 1.0
    stacker: Stack | None = None
    reason: str | None = None
    task: Task = CLASSIFICATION
    function: Combine | None = None
    thresholds: Array | None = None

    def predict(self, values: Sequence[Array]) -> Array:
        """Calibrated values float64 [n, ...] from m arrays [n, ...], in the order of the weights."""
        if len(values) != len(self.weights):
            raise CombineError(f"{len(self.weights)} members were combined, predictions of {len(values)} given")
        return find_math(self.task).calibrate(self._pool(values), self.temperature)

    def _pool(self, values: Sequence[Array]) -> Array:
        if self.function is not None:
            return call_function(self.function, values, self.task)
        if self.stacker is not None:
            return self.stacker.predict(values)
        return find_math(self.task).mix(values, self.weights)


def call_function(function: Combine, values: Sequence[Array], task: Task) -> Array:
    """What the user's function makes of the members' values, float64 [n, ...]. It is given and gives torch
    tensors, as in a loaded ensemble.

    Raises:
        CombineError: it fails, gives something else than predictions of the task for the same samples, or other
            ones of a sample where other samples are with it: a loaded ensemble is given batches.
    """
    name = getattr(function, "__name__", repr(function))
    found = _call(function, name, values)
    if found.shape[:1] != values[0].shape[:1]:
        given = [len(values), *values[0].shape]
        raise CombineError(f"Ensemble.combine={name} gives {list(found.shape)} for {given}; expected [n, ...]")
    invalid = find_math(task).explain_invalid(found)
    if invalid is None and task.kind != "free" and found.shape != values[0].shape:
        invalid = f"values of shape {list(found.shape)}, not {list(values[0].shape)}"
    if invalid is not None:
        raise CombineError(f"Ensemble.combine={name} gives no predictions of the task {task.kind}: {invalid}")
    again = _call(function, name, [own[::2] for own in values])
    rounding = 1e-5 * _find_largest(values, found, task)  # kernels may round otherwise for fewer rows
    if again.shape != found[::2].shape or not np.allclose(again, found[::2], rtol=1e-3, atol=rounding):
        raise CombineError(
            f"Ensemble.combine={name} gives other values for a sample when the batch has other samples: a "
            "sample's result must depend on the members' values of that sample alone, [m, n, ...] -> [n, ...] "
            "for any n"
        )
    return np.asarray(find_math(task).normalise(found), dtype=np.float64)


def _find_largest(values: Sequence[Array], found: Array, task: Task) -> Array:
    """The largest absolute values of the members: one for each column of the last axis, as a mean and its variance
    have units of their own; one of all where columns share a unit, or `found` has other columns.
    """
    is_one = task.kind in LABELS or found.ndim < 2 or found.shape != values[0].shape
    axes = None if is_one else tuple(range(found.ndim - 1))
    return np.asarray(np.max([np.abs(own).max(axis=axes) for own in values], axis=0))


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


def fingerprint_function(function: Combine) -> str:
    """A digest of the user's function and of the code that it uses.

    It tells whether a calibration was fitted for this function. The fingerprint of the code that members train
    with leaves it out, as it trains nobody.
    """
    nothing = dict.fromkeys(("train", "valid", "test", "shifted"))
    return code_of(cast("Ensemble", SimpleNamespace(recipe=partial(function), **nothing))).fingerprint


def fit(
    method: str | Combine,
    values: Sequence[Array],
    target: Array | None,
    *,
    task: Task = CLASSIFICATION,
    objective: str | None = None,
    calibrate: bool = True,
) -> Combination:
    """Fit a combination to validation predictions; see `fit_held_out`."""
    return fit_held_out(method, values, target, task=task, objective=objective, calibrate=calibrate)[0]


def is_enough(target: Array) -> bool:
    """Whether a calibration that is fitted to these targets is worth it."""
    return np.asarray(target).size >= CALIBRATION_SAMPLES


def fit_stack(
    math: TaskMath, values: Sequence[Array], target: Array, groups: Sequence[int] | None
) -> tuple[Stack, Array]:
    """`TaskMath.fit_stack`, of configurations: the coefficients of each are shared out to its members, so that the
    mean of their logarithms, logits or points takes the place of its out-of-fold predictions.
    """
    stacker, held_out = math.fit_stack([values[at] for at in list_representatives(groups, len(values))], target)
    return stacker if groups is None else stacker.share_out(groups), held_out


def fit_held_out(
    method: str | Combine,
    values: Sequence[Array],
    target: Array | None,
    *,
    task: Task = CLASSIFICATION,
    objective: str | None = None,
    calibrate: bool = True,
    groups: Sequence[int] | None = None,
) -> tuple[Combination, Array]:
    """Fit a combination to validation predictions.

    Selection and calibration see the same rows here. Splitting them would waste rows that both need; the price is
    that scores on these rows are optimistic, and that the calibration is fitted to members chosen to look good on
    them, so it comes out a little too sure. A stack is calibrated on out-of-fold predictions.

    Args:
        method: one of `ensemble.spec.COMBINERS`, or a function (`Combine`).
        values: m arrays [n, ...], rows aligned, laid out by the task.
        target: [n, ...]; None (unknown) leaves nothing but the plain average or a function, uncalibrated.
        task: what is predicted.
        objective: the criterion by which greedy selection is never worse on these rows than the best single
            member; None for the task's own. It selects by the task's own, which tells more per row (the NLL more
            than the accuracy: on small validation sets it gives test accuracy as good and a better NLL); only
            where that falls short does it select by the objective.
        calibrate: whether to calibrate.
        groups: see `PredictionMatrix.groups`: what is selected are then configurations, whose members share the
            weight.

    Returns:
        The combination, and its calibrated predictions of the same rows: of a stack, those of rows that it was not
        fitted on.

    Raises:
        CombineError: for an unknown method, no members, targets that are not the task's, or a method that has no
            meaning for it.
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
        known = Combination("average", equal, reason=why, task=task)
        if function is not None:
            known = Combination(name, equal, task=task, function=function)
        return known, known.predict(values)
    math, target = find_math(task), np.asarray(target)
    for own in values:
        math.check_target(own, target)
    weights, stacker, reason = equal, None, None
    held_out: Array | None = None
    if function is not None:
        held_out = call_function(function, values, task)
    elif name == "stack":
        try:
            stacker, held_out = fit_stack(math, values, target, groups)
            weights = stacker.shares()
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
    factor = math.fit_calibration(held_out, target) if calibrate and is_enough(target) else 1.0
    return Combination(name, weights, factor, stacker, reason, task, function), math.calibrate(held_out, factor)
