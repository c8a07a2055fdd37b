"""Many members, one better model: metrics, averaging, selection, stacking, calibration, loading.

The pure parts are functions of numpy arrays; torch is imported only by `load`, and scikit-learn and SciPy only
by what fits something.
"""

from __future__ import annotations

from ensemble.combine.calibrate import apply_temperature, fit_temperature
from ensemble.combine.combination import Combination, fit
from ensemble.combine.loading import load
from ensemble.combine.methods import average_weights, greedy_weights, mix, weighted_weights
from ensemble.combine.metrics import CombineError, accuracy, all_metrics, brier, ece, nll, reliability
from ensemble.combine.run import combine
from ensemble.combine.stack import Stacker, fit_stack

__all__ = [
    "Combination",
    "CombineError",
    "Stacker",
    "accuracy",
    "all_metrics",
    "apply_temperature",
    "average_weights",
    "brier",
    "combine",
    "ece",
    "fit",
    "fit_stack",
    "fit_temperature",
    "greedy_weights",
    "load",
    "mix",
    "nll",
    "reliability",
    "weighted_weights",
]
