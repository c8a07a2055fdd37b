"""Many members, one better model: metrics, averaging, selection, stacking, calibration, loading.

The pure parts are functions of numpy arrays; torch is imported only by `load`, and scikit-learn and SciPy only
by what fits something. What depends on what is predicted is in `tasks`; the functions of this module's face that
take probabilities are those of classification.
"""

from __future__ import annotations

from ensemble.combine.combination import Combination, fit
from ensemble.combine.conformal import ConformalInterval, ConformalSets, load_conformal
from ensemble.combine.loading import load
from ensemble.combine.methods import average_weights, mix
from ensemble.combine.metrics import CombineError
from ensemble.combine.run import combine, combine_samples, describe_method, refuse
from ensemble.combine.tasks import find_math
from ensemble.combine.tasks.classification import (
    accuracy,
    all_metrics,
    apply_temperature,
    brier,
    ece,
    fit_stack,
    fit_temperature,
    greedy_weights,
    nll,
    reliability,
    weighted_weights,
)
from ensemble.combine.tasks.stacks import Stacker

__all__ = [
    "Combination",
    "CombineError",
    "ConformalInterval",
    "ConformalSets",
    "Stacker",
    "accuracy",
    "all_metrics",
    "apply_temperature",
    "average_weights",
    "brier",
    "combine",
    "combine_samples",
    "describe_method",
    "ece",
    "find_math",
    "fit",
    "fit_stack",
    "fit_temperature",
    "greedy_weights",
    "load",
    "load_conformal",
    "mix",
    "nll",
    "refuse",
    "reliability",
    "weighted_weights",
]
