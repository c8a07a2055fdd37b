"""Train many models at once on one shared data pipeline: an ensemble, or the trials of a search.

Everything named here is imported when it is first used, so that `import ensemble` costs nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ensemble.api import resume as resume
    from ensemble.api import submit as submit
    from ensemble.artifact import export as export
    from ensemble.artifact import predict as predict
    from ensemble.combine import load as load
    from ensemble.distillation import distill as distill
    from ensemble.inspection import Comparison as Comparison
    from ensemble.inspection import DryRun as DryRun
    from ensemble.inspection import SavedPredictions as SavedPredictions
    from ensemble.inspection import compare as compare
    from ensemble.inspection import describe_nodes as describe_nodes
    from ensemble.inspection import list_runs as list_runs
    from ensemble.inspection import load_predictions as load_predictions
    from ensemble.inspection import sum_usage as sum_usage
    from ensemble.inspection.dry_run import dry_run as dry_run
    from ensemble.refit import refit as refit
    from ensemble.result import Result as Result
    from ensemble.run import Run as Run
    from ensemble.run import attach as attach
    from ensemble.spec import EMA as EMA
    from ensemble.spec import SWA as SWA
    from ensemble.spec import Bootstrap as Bootstrap
    from ensemble.spec import ClassWeights as ClassWeights
    from ensemble.spec import EarlyStopping as EarlyStopping
    from ensemble.spec import Energy as Energy
    from ensemble.spec import Ensemble as Ensemble
    from ensemble.spec import Folds as Folds
    from ensemble.spec import GradientNorm as GradientNorm
    from ensemble.spec import Member as Member
    from ensemble.spec import MemberCallback as MemberCallback
    from ensemble.spec import MLflow as MLflow
    from ensemble.spec import Recipe as Recipe
    from ensemble.spec import Resources as Resources
    from ensemble.spec import Search as Search
    from ensemble.spec import SpecError as SpecError
    from ensemble.spec import Task as Task
    from ensemble.spec import TensorBoard as TensorBoard
    from ensemble.spec import WandB as WandB
    from ensemble.spec import choice as choice
    from ensemble.spec import cross_validated as cross_validated
    from ensemble.spec import integer as integer
    from ensemble.spec import loguniform as loguniform
    from ensemble.spec import quantiles as quantiles
    from ensemble.spec import seeds as seeds
    from ensemble.spec import uniform as uniform
    from ensemble.store.mirror_fetch import fetch as fetch

__version__ = "1.0.0"

_NAMES_OF = {
    "ensemble.spec": "Bootstrap ClassWeights EMA EarlyStopping Energy Ensemble Folds GradientNorm MLflow Member "
    "MemberCallback Recipe Resources SWA Search SpecError Task TensorBoard WandB choice cross_validated integer "
    "loguniform quantiles seeds uniform",
    "ensemble.api": "resume submit",
    "ensemble.inspection": "Comparison DryRun SavedPredictions compare describe_nodes dry_run list_runs "
    "load_predictions sum_usage",
    "ensemble.refit": "refit",
    "ensemble.result": "Result",
    "ensemble.run": "Run attach",
    "ensemble.combine": "load",
    "ensemble.artifact": "export predict",
    "ensemble.distillation": "distill",
    "ensemble.store.mirror_fetch": "fetch",
}
_HOME_OF = {name: home for home, names in _NAMES_OF.items() for name in names.split()}

__all__ = ["__version__", *sorted(_HOME_OF)]


def __getattr__(name: str) -> Any:
    from pipelines.providers import find_attribute

    value = globals()[name] = find_attribute(__name__, _HOME_OF, name)
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME_OF])
