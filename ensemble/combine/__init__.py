"""Many members, one better model: metrics, averaging, selection, stacking, calibration, loading.

The pure parts are functions of numpy arrays; torch is imported only by `load`, and scikit-learn and SciPy only
by what fits something. What depends on what is predicted is in `tasks`.
"""

from __future__ import annotations

from ensemble.combine.combination import Combination, fit
from ensemble.combine.conformal import ConformalInterval, ConformalSets, load_conformal
from ensemble.combine.loading import load
from ensemble.combine.metrics import CombineError
from ensemble.combine.run import combine, combine_samples, describe_method, refuse
from ensemble.combine.tasks import find_math
from ensemble.combine.tasks.stacks import Stacker

__all__ = [
    "Combination",
    "CombineError",
    "ConformalInterval",
    "ConformalSets",
    "Stacker",
    "combine",
    "combine_samples",
    "describe_method",
    "find_math",
    "fit",
    "load",
    "load_conformal",
    "refuse",
]
