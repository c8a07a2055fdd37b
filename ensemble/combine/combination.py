"""Fits and applies a combination of members' class probabilities, by any of the four methods."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ensemble.combine.calibrate import apply_temperature, fit_temperature
from ensemble.combine.methods import (
    Criterion,
    average_weights,
    check_targets,
    greedy_weights,
    is_at_least_best,
    mix,
    weighted_weights,
)
from ensemble.combine.metrics import Array, CombineError
from ensemble.combine.stack import Stacker, fit_stack
from ensemble.spec import COMBINERS, unknown_name


@dataclass(frozen=True)
class Combination:
    """How members become one model.

    Attributes:
        method: average, weighted, greedy or stack: what was really done.
        weights: float64 [m], sum 1. For a stack they only tell how much each member weighs in it.
        temperature: of the calibration, applied last; 1.0 for none.
        stacker: the regression of a stack, else None.
        reason: why `method` is not the one that was asked for, else None.
    """

    method: str
    weights: Array
    temperature: float = 1.0
    stacker: Stacker | None = None
    reason: str | None = None

    def predict(self, probabilities: Sequence[Array]) -> Array:
        """Probabilities float64 [n, C] from m arrays [n, C], in the order of the weights."""
        if len(probabilities) != len(self.weights):
            raise CombineError(
                f"{len(self.weights)} members were combined, predictions of {len(probabilities)} given"
            )
        pooled = mix(probabilities, self.weights) if self.stacker is None else self.stacker.predict(probabilities)
        return apply_temperature(pooled, self.temperature)


def fit(
    method: str,
    probabilities: Sequence[Array],
    target: Array | None,
    *,
    objective: Criterion = "nll",
    calibrate: bool = True,
) -> Combination:
    """Fit a combination to validation predictions.

    Selection and calibration see the same rows here. Splitting them would waste rows that both need; the price is
    that scores on these rows are optimistic, and that the temperature is fitted to members chosen to look good on
    them, so it comes out a little too low (too sure). A stack is calibrated on out-of-fold predictions.

    Args:
        method: one of `ensemble.spec.COMBINERS`.
        probabilities: m arrays [n, C], rows aligned.
        target: int [n]; None (unknown) leaves nothing but the plain average, uncalibrated.
        objective: by which greedy selection is never worse on these rows than the best single member. It
            selects by NLL, which tells more per row than accuracy does (on small validation sets it gives test
            accuracy as good and a better NLL); only where that falls short does it select by the objective.
        calibrate: whether to fit a temperature.

    Raises:
        CombineError: for an unknown method, no members, or targets that are not classes.
    """
    if method not in COMBINERS:
        raise CombineError(unknown_name("there is no way to combine called", method, COMBINERS))
    if not probabilities:
        raise CombineError("there are no members to combine")
    members = len(probabilities)
    if target is None:
        why = "the validation predictions have no target, so nothing can be selected or calibrated"
        return Combination("average", average_weights(members), reason=why)
    target = np.asarray(target)
    check_targets(probabilities, target)
    stacker: Stacker | None = None
    reason: str | None = None
    held_out: Array | None = None
    if method == "stack":
        try:
            stacker, held_out = fit_stack(probabilities, target)
            weights = stacker.shares()
        except CombineError as error:
            method, weights, reason = "average", average_weights(members), f"{error}; averaged instead"
    elif method == "weighted":
        weights = weighted_weights(probabilities, target)
    elif method == "greedy":
        weights = greedy_weights(probabilities, target, "nll")
        if objective != "nll" and not is_at_least_best(probabilities, target, weights, objective):
            weights = greedy_weights(probabilities, target, objective)
    else:
        weights = average_weights(members)
    if held_out is None:
        held_out = mix(probabilities, weights)
    temperature = fit_temperature(held_out, target) if calibrate else 1.0
    return Combination(method, weights, temperature, stacker, reason)
