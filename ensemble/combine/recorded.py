"""Makes a run's combined predictions again, from its `combined` event and the members' saved predictions."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from ensemble.combine.combination import (
    FUNCTION,
    Combine,
    call_function,
    fit_stack,
    read_calibration,
)
from ensemble.combine.metrics import Array, CombineError
from ensemble.combine.prediction_matrix import PredictionMatrix, read_prediction_matrix
from ensemble.combine.tasks import find_math
from ensemble.events import NOT_COMBINED, Combined
from ensemble.user_code.fingerprint import fingerprint_function

if TYPE_CHECKING:
    from ensemble.store import Predictions, RunDir, RunState

METHODS = ("average", "weighted", "greedy", "stack")
"""Those whose combined predictions follow from weights, or from a fit on the same predictions."""


def combine_again(
    combined: Combined,
    valid: PredictionMatrix,
    shown: PredictionMatrix,
    *,
    is_valid: bool,
    function: Combine | None = None,
) -> Array | None:
    """What the combined model predicts on a split, float64 [n, ...]: bit by bit what the run's figures are of.

    Args:
        combined: the `combined` event.
        valid, shown: predictions on the validation split and on the split.
        is_valid: whether the split is the validation split; a stack is then measured on rows that it was not
            fitted on.
        function: the run's own `Ensemble.combine`, where that is a function.

    Returns:
        None where the members at hand do not determine it.
    """
    task_math, method, weights = find_math(shown.task), combined.method, combined.weights
    if not weights or not set(weights) <= set(shown.members):
        return None
    if method == "stack":
        candidates = combined.candidates or []
        if not set(candidates) <= set(valid.members):
            return None
        fitted = valid.select(candidates).thin()  # as in the run
        if fitted.target is None:
            return None
        if is_valid and fitted.part != valid.part:  # of the others nothing is known out of fold
            return None
        stack, held_out = fit_stack(task_math, fitted.values, fitted.target, fitted.groups)
        values = held_out if is_valid else stack.predict(shown.select(candidates).values)
    elif method == FUNCTION and function is not None:
        values = call_function(function, shown.select(list(weights)).values, shown.task)
    elif method in METHODS:
        part = shown.select(list(weights))
        values = task_math.mix(part.values, np.array(list(weights.values())))
    else:
        return None
    return task_math.calibrate(values, *read_calibration(combined.calibration))


def read_combined(
    run_dir: RunDir, state: RunState, split: str, load_function: Callable[[], Any] | None = None
) -> Predictions:
    """The combined model's predictions on a split; of a stack, on the validation split, those of rows that it was
    not fitted on.

    Args:
        load_function: returns the run's `Ensemble.combine`; called only where the run combined by a function.

    Raises:
        CombineError: nothing was combined, or predictions are missing or no longer determine it.
    """
    from ensemble.store import Predictions

    combined = state.combined or NOT_COMBINED
    if not combined.weights:
        why = combined.reason or "the run has not combined its members"
        raise CombineError(f"{run_dir.path} has no combined model: {why}")
    members = list(dict.fromkeys([*combined.weights, *(combined.candidates or ())]))
    shown = read_prediction_matrix(run_dir, state, members, split)
    missing = [member for member in combined.weights if member not in shown.members]
    if missing:
        raise CombineError(f"{run_dir.path}: {missing[0]}: {shown.left_out[missing[0]]}")
    valid = shown if split == "valid" else read_prediction_matrix(run_dir, state, members, "valid")
    function: Any = None
    if combined.method == FUNCTION:
        function = load_function() if load_function is not None else run_dir.load_ensemble().combine
        if not callable(function) or combined.code != fingerprint_function(function):
            raise CombineError(f"{run_dir.path}: the function by which the run was combined has changed")
    values = combine_again(combined, valid, shown, is_valid=split == "valid", function=function)
    if values is None:
        raise CombineError(f"{run_dir.path}: the saved predictions do not determine the combined ones any more")
    return Predictions(values, shown.index, shown.target, shown.task, shown.positions)
