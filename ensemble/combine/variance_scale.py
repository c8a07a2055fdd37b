"""The calibrator of Gaussians: a factor of all variances."""

from __future__ import annotations

import math

import numpy as np

from ensemble.combine import formulas
from ensemble.combine.calibrators import Calibrator
from ensemble.combine.formulas import Values
from ensemble.combine.metrics import Array
from ensemble.spec.task import Task


class VarianceScale(Calibrator):
    """Multiplies all variances by a factor (Laves et al. 2020, "Well-calibrated regression uncertainty in medical
    imaging with deep learning", eq. 13).
    """

    kinds = ("gaussian",)

    def fit(self, task: Task, values: Array, target: Array, per_sample: int) -> float:
        """The factor of least NLL, the mean of error^2 / variance; 1.0 where it gains nothing."""
        factor = float(np.mean((target - values[:, 0]) ** 2 / values[:, 1]))
        gain = 0.5 * (factor - 1 - math.log(factor)) if factor > 0 else 0.0
        return factor if gain > 1e-9 and math.isfinite(factor) else 1.0

    def apply(self, task: Task, values: Values, parameters: float) -> Values:
        """The same means with other variances."""
        stack = formulas.find_namespace(values).stack
        return stack([values[..., 0], values[..., 1] * parameters], -1)
