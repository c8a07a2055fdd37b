"""Many members, one better model: metrics, averaging, selection, stacking, calibration, loading.

Names are imported when they are first used; torch only by `load`, scikit-learn and SciPy only by what fits.
What depends on what is predicted is in `tasks`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pipelines.providers import find_attribute

if TYPE_CHECKING:
    from ensemble.combine.combination import Combination, fit
    from ensemble.combine.conformal import ConformalInterval, ConformalSets, load_conformal
    from ensemble.combine.loading import load
    from ensemble.combine.metrics import CombineError
    from ensemble.combine.run import combine, combine_samples, describe_method, refuse
    from ensemble.combine.tasks import find_math

__all__ = [
    "Combination",
    "CombineError",
    "ConformalInterval",
    "ConformalSets",
    "combine",
    "combine_samples",
    "describe_method",
    "find_math",
    "fit",
    "load",
    "load_conformal",
    "refuse",
]

_NAMES_OF = {
    "combination": "Combination fit",
    "conformal": "ConformalInterval ConformalSets load_conformal",
    "loading": "load",
    "metrics": "CombineError",
    "run": "combine combine_samples describe_method refuse",
    "tasks": "find_math",
}
_HOME_OF = {name: f"{__name__}.{home}" for home, names in _NAMES_OF.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    value = globals()[name] = find_attribute(__name__, _HOME_OF, name)
    return value
