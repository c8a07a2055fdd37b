"""What a search is made of, by name: samplers, pruners, objectives and their options."""

from __future__ import annotations

from ensemble.spec.options import OptionTable, count, names, number, one_of
from pipelines.providers import Providers

#: What makes Optuna's object of a name. One of another distribution is called with the options that the user gave.
SAMPLER_TYPES = Providers(
    "samplers",
    {
        "tpe": "optuna.samplers:TPESampler",
        "random": "optuna.samplers:RandomSampler",
        "gp": "optuna.samplers:GPSampler",
        "cmaes": "optuna.samplers:CmaEsSampler",
        "nsga2": "optuna.samplers:NSGAIISampler",
        "nsga3": "optuna.samplers:NSGAIIISampler",
        "grid": "optuna.samplers:RandomSampler",
        "pbt": "optuna.samplers:RandomSampler",
    },
)
PRUNER_TYPES = Providers(
    "pruners",
    {
        "hyperband": "optuna.pruners:HyperbandPruner",
        "asha": "optuna.pruners:SuccessiveHalvingPruner",
        "median": "optuna.pruners:MedianPruner",
        "patience": "optuna.pruners:PatientPruner",
        "none": "optuna.pruners:NopPruner",
    },
)
_HALVING = {"min_resource": count(1)}

_GENETIC = {"population_size": count(12, 2)}

#: Options of a search's sampler.
SAMPLERS: OptionTable = {
    "tpe": {},
    "random": {},
    "grid": {},
    "gp": {},
    "cmaes": {},
    "nsga2": _GENETIC,
    "nsga3": _GENETIC,
    "pbt": {
        "population": count(8),
        "generations": count(4, 2),
        "quantile": number(0.25, below=0.5),
        "resample": number(0.25, below=1),
        "factor": number(1.2, 1.0, above=True),
        "inherit": names(),
    },
}
#: Options of a search's pruner; a resource is an epoch.
PRUNERS: OptionTable = {
    "hyperband": {**_HALVING, "reduction_factor": count(3, 2)},
    "asha": {**_HALVING, "reduction_factor": count(4, 2)},
    "median": {"startup_trials": count(5, 0), "warmup_epochs": count(0, 0), "interval_epochs": count(1)},
    "patience": {
        "epochs": count(3),
        "min_delta": number(0.0),
        "around": one_of("none", "hyperband", "asha", "median"),
    },
    "none": {},
}

#: Options of a search's objective.
OBJECTIVES: OptionTable = {"metric": {}, "gain": {"metric": one_of("nll", "accuracy", "brier")}}

#: Those that take several objectives; the others cannot, or learn from one only.
SAMPLERS_OF_SEVERAL = ("tpe", "random", "grid", "gp", "nsga2", "nsga3")
#: Those that prefer trials whose constraints hold.
SAMPLERS_WITH_CONSTRAINTS = ("tpe", "gp", "nsga2", "nsga3")
