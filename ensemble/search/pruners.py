"""A pruner beside those of Optuna: by the trend of a trial's values."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from optuna.pruners import BasePruner
from optuna.study import StudyDirection
from optuna.trial import TrialState

if TYPE_CHECKING:
    from optuna.study import Study
    from optuna.trial import FrozenTrial

#: Exponents of the power laws between which the values decide.
EXPONENTS = (0.25, 0.5, 1.0, 2.0)


class TrendPruner(BasePruner):
    """Ends a trial of which the trend says that it will not come up to the best trial that has finished.

    The trend is that of `extrapolate`. A trial is ended when its expected last value is worse than the best by
    `sigmas` standard deviations.

    Args:
        epochs: of a trial.
        min_epochs: before which no trial is ended.
        startup_trials: that have to finish before any is ended.
    """

    def __init__(self, epochs: int, min_epochs: int, startup_trials: int, sigmas: float) -> None:
        self._epochs, self._min_epochs = epochs, min_epochs
        self._startup_trials, self._sigmas = startup_trials, sigmas

    def prune(self, study: Study, trial: FrozenTrial) -> bool:
        """Whether to end a trial."""
        values = [value for _, value in sorted(trial.intermediate_values.items())]
        if len(values) < self._min_epochs or not all(map(math.isfinite, values)):
            return False
        finished = [
            each.intermediate_values[each.last_step]
            for each in study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
            if each.last_step is not None
        ]
        if len(finished) < max(1, self._startup_trials):
            return False
        sign = 1.0 if study.direction == StudyDirection.MAXIMIZE else -1.0
        mean, deviation = extrapolate(values, self._epochs)
        return sign * mean + self._sigmas * deviation < max(sign * value for value in finished)


def extrapolate(values: Sequence[float], epochs: int) -> tuple[float, float]:
    """The value after so many epochs by the trend of the first ones, and its standard deviation.

    Each law a + b n^-c of some exponents c is fitted to the values after n = 1, 2, ... epochs by least squares,
    and the laws are averaged by how well they fit (Bayesian information criterion). The deviation is that of the
    residuals, and of what the laws say. After Domhan et al., "Speeding up automatic hyperparameter optimization
    of deep neural networks by extrapolation of learning curves", 2015, with closed forms in place of sampling.

    Args:
        values: at least three.
    """
    y, n = np.asarray(values, np.float64), np.arange(1, len(values) + 1, dtype=np.float64)
    means, variances, residuals = [], [], []
    for exponent in EXPONENTS:
        design = np.stack([np.ones_like(n), n**-exponent], axis=1)
        inverse = np.linalg.inv(design.T @ design)
        fitted = inverse @ design.T @ y
        squares = float(((y - design @ fitted) ** 2).sum())
        at = np.array([1.0, float(epochs) ** -exponent])
        means.append(float(at @ fitted))
        variances.append(squares / (len(y) - 2) * (1.0 + float(at @ inverse @ at)))
        residuals.append(squares)
    floor = 1e-12 * float(np.var(y)) + 1e-300  # a perfect fit does not outweigh all others beyond measure
    evidence = -0.5 * len(y) * np.log(np.array(residuals) + floor)
    weights = np.exp(evidence - evidence.max())
    weights /= weights.sum()
    mean = float(weights @ means)
    variance = float(weights @ (np.array(variances) + (np.array(means) - mean) ** 2))
    return mean, math.sqrt(variance)
