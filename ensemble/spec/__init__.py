"""What a user declares: an `Ensemble` of `Member`s or a `Search`, a `Recipe` that trains them, their `Resources`.

Everything here is a frozen dataclass that checks itself when it is made. A mistake is a `SpecError` of one line
that says what was given, where, and what would be valid. Names are imported when they are first used; nothing here
imports torch, Ray or Optuna.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pipelines.providers import find_attribute

if TYPE_CHECKING:
    from ensemble.spec.callbacks import GradientNorm, MemberCallback
    from ensemble.spec.energy import Energy
    from ensemble.spec.ensemble import PREDICTED_SPLITS as PREDICTED_SPLITS
    from ensemble.spec.ensemble import Ensemble
    from ensemble.spec.ensemble_checks import check_ensemble as check_ensemble
    from ensemble.spec.fields import COMBINERS as COMBINERS
    from ensemble.spec.identity import Identity
    from ensemble.spec.limits import resolve_notify as resolve_notify
    from ensemble.spec.loggers import LoggerOptions as LoggerOptions
    from ensemble.spec.loggers import MLflow, TensorBoard, WandB
    from ensemble.spec.loggers import check_installed as check_installed
    from ensemble.spec.loggers import resolve_loggers as resolve_loggers
    from ensemble.spec.loops import EMA, SWA, EarlyStopping
    from ensemble.spec.member import Member, Resources, seeds
    from ensemble.spec.objectives import Implied as Implied
    from ensemble.spec.objectives import Mode as Mode
    from ensemble.spec.objectives import check_ranking as check_ranking
    from ensemble.spec.objectives import describe_missing_objective as describe_missing_objective
    from ensemble.spec.objectives import resolve_ranking as resolve_ranking
    from ensemble.spec.options import TRAINING_OPTIONS as TRAINING_OPTIONS
    from ensemble.spec.options import NamedOptions as NamedOptions
    from ensemble.spec.options import resolve as resolve
    from ensemble.spec.options import resolve_training_options as resolve_training_options
    from ensemble.spec.out_of_fold import cross_validated as cross_validated
    from ensemble.spec.recipe import Recipe
    from ensemble.spec.sample_weights import Bootstrap, ClassWeights, Folds
    from ensemble.spec.search import Search
    from ensemble.spec.search_space import Dimension, choice, integer, loguniform, uniform
    from ensemble.spec.task import CLASSIFICATION as CLASSIFICATION
    from ensemble.spec.task import Task, quantiles
    from ensemble.spec.validation import SpecError, unknown_name
    from ensemble.spec.validation import as_json_value as as_json_value
    from ensemble.spec.validation import check_choice as check_choice
    from ensemble.spec.validation import check_number as check_number
    from ensemble.spec.validation import option_class as option_class

__all__ = [
    "GradientNorm",
    "MemberCallback",
    "EMA",
    "SWA",
    "Bootstrap",
    "ClassWeights",
    "Dimension",
    "EarlyStopping",
    "Energy",
    "Ensemble",
    "Folds",
    "Identity",
    "MLflow",
    "Member",
    "Recipe",
    "Resources",
    "Search",
    "SpecError",
    "Task",
    "TensorBoard",
    "WandB",
    "choice",
    "integer",
    "loguniform",
    "quantiles",
    "seeds",
    "uniform",
    "unknown_name",
]

_NAMES_OF = {
    "callbacks": "GradientNorm MemberCallback",
    "energy": "Energy",
    "ensemble": "PREDICTED_SPLITS Ensemble",
    "ensemble_checks": "check_ensemble",
    "fields": "COMBINERS",
    "identity": "Identity",
    "loggers": "LoggerOptions MLflow TensorBoard WandB check_installed resolve_loggers",
    "loops": "EMA SWA EarlyStopping",
    "member": "Member Resources seeds",
    "limits": "resolve_notify",
    "objectives": "Implied Mode check_ranking describe_missing_objective resolve_ranking",
    "options": "TRAINING_OPTIONS NamedOptions resolve resolve_training_options",
    "out_of_fold": "cross_validated",
    "recipe": "Recipe",
    "sample_weights": "Bootstrap ClassWeights Folds",
    "search": "Search",
    "search_space": "Dimension choice integer loguniform uniform",
    "task": "CLASSIFICATION Task quantiles",
    "validation": "SpecError unknown_name as_json_value check_choice check_number option_class",
}
_HOME_OF = {name: f"{__name__}.{home}" for home, names in _NAMES_OF.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    value = globals()[name] = find_attribute(__name__, _HOME_OF, name)
    return value
