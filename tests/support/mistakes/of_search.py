"""Mistakes in searches: spaces, samplers, pruners, objectives, populations, budgets."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import optuna
from kit.mistakes import Mistake

from ensemble.spec import Search, SpecError, choice, integer, loguniform, uniform
from ensemble.spec.search_space import sample_space

ROWS: list[Mistake] = []
PLAIN = (str, int, bool, list, dict)
SPACE = {"lr": loguniform(1e-3, 1.0), "width": choice(4, 8, 16)}


def wrong(what: str, do: Callable[[], Any], *words: str) -> Mistake:
    return Mistake(what, do, SpecError, words)


def add(name: str, defaults: dict[str, Any], cases: tuple[tuple[Any, ...], ...]) -> None:
    for options, *words in cases:
        declared = {"space": SPACE, **defaults, **options}
        do = functools.partial(Search, **declared)
        values = {key: value if type(value) in PLAIN else type(value).__name__ for key, value in options.items()}
        ROWS.append(wrong(f"{name}: {values}", do, *words))


def conditional(trial: Any) -> dict[str, Any]:
    return {"lr": trial.suggest_float("lr", 1e-3, 1.0)}


def misspelt(trial: Any) -> dict[str, Any]:
    return {"lr": trial.sugest_float("lr", 0, 1)}


def accuracy() -> None: ...


add(
    "search",
    {},
    (
        ({"sampler": 3}, "a sampler of Optuna, got 3"),
        ({"sampler": "grid", "space": conditional}, "a space that is a dict"),
        ({"sampler": "cmaes", "space": conditional}, "a space that is a dict"),
        ({"sampler": optuna.samplers.RandomSampler(), "objective": "gain"}, "by name: tpe or gp"),
        ({"sampler": "nsga2", "pruner": "median"}, "'nsga2' needs finished trials: leave out pruner="),
        ({"space": 3}, "or a function"),
        ({"enqueue": [3]}, "a list of dicts"),
        ({"enqueue": [{}, {}], "trials": 1}, "more than trials=1"),
        ({"constraints": dict, "sampler": "random"}, "supports them"),
        ({"terminator": True}, "must have should_terminate"),
        ({"objective": "gains"}, "Search.objective cannot be 'gains' (valid: metric, gain)"),
        ({"objective": {"name": "gain", "metric": "f1"}}, "Search.objective['metric'] cannot be 'f1'"),
        ({"objective": "gain", "sampler": "cmaes"}, "needs a sampler that accepts"),
        ({"objective": "gain", "sampler": "grid"}, "not 'grid'"),
        ({"budget": {}}, "one or more of trials, hours"),
        ({"budget": {"minutes": 3}}, "cannot be 'minutes'"),
        ({"budget": {"hours": 0}}, "must be above 0"),
        ({"budget": {"trials": 1.5}}, "must be an integer"),
        ({"further_objectives": ["cpu_s"], "pruner": optuna.pruners.MedianPruner()}, "one objective only"),
    ),
)
add(
    "several objectives",
    {"further_objectives": ["energy_j"]},
    (
        ({"further_objectives": ["joules"]}, "say whether 'joules' is maximized or minimized: ", "min"),
        ({"further_objectives": ["cpu_s", "nll", "ece"]}, "must be a list of at most 2"),
        ({"further_objectives": "cpu_s"}, "must be a list"),
        ({"further_objectives": ["cpu_s", "cpu_s"]}, "different names"),
        ({"further_objectives": [{"metric": "nll", "mode": "max"}]}, "ranks the worst member first"),
        ({"further_objectives": [{"metric": "price", "mode": "low"}]}, "the mode of 'price'"),
        ({"further_objectives": [{"name": "price"}]}, 'or dicts {"metric": name, "mode": "max"'),
        ({"sampler": "cmaes"}, "needs a sampler of several objectives (valid: tpe, ", ", nsga3), not 'cmaes'"),
        ({"sampler": "nsga2", "trials": 12}, "draws its first 12 trials at random ", " 12 trials are too few"),
        ({"pruner": "hyperband"}, "needs pruner='none' or no pruner: Optuna prunes by one objective only"),
        ({"pruner": {"name": "patience"}}, "needs pruner='none' or no pruner"),
        ({"objective": "gain"}, "needs objective='metric'"),
    ),
)
add(
    "population",
    {"space": {"lr": uniform(0, 1)}, "sampler": "pbt"},
    (
        ({"trials": 7}, "has 8 x 4 trials: leave out trials="),
        ({"budget": {"trials": 3}}, "leave out trials="),
        ({"pruner": "median"}, "leave out pruner= and stop="),
        ({"stop": bool}, "leave out pruner= and stop="),
        ({"objective": "gain"}, "needs objective='metric'"),
        ({"sampler": {"name": "pbt", "population": 0}}, "must be at least 1, got 0"),
        ({"sampler": {"name": "pbt", "generations": 1}}, "must be at least 2, got 1"),
        ({"sampler": {"name": "pbt", "quantile": 0.5}}, "must be below 0.5"),
        ({"sampler": {"name": "pbt", "keep": ["width"]}}, "no option"),
        ({"sampler": {"name": "pbt", "inherit": "width"}}, "must be a list of names"),
        ({"constraints": dict}, "leave out constraints="),
        ({"enqueue": [{"lr": 0.1}] * 9}, "more than the first generation: 8"),
        ({"sampler": {"name": "pbt", "inherit": ["rl"]}}, "the space has no 'rl'"),
    ),
)
add(
    "pruner",
    {},
    (
        ({"pruner": "patient"}, "Search.pruner cannot be 'patient'; did you mean 'patience'?"),
        ({"pruner": {"epochs": 3}}, "Search.pruner needs a 'name'"),
        ({"pruner": {"name": "median", "min_resource": 1}}, "'median' has no option 'min_resource'"),
        ({"pruner": {"name": "none", "epochs": 1}}, "'none' has no options, got 'epochs'"),
        ({"pruner": {"name": "patience", "epochs": 0}}, "Search.pruner['epochs'] must be at least 1"),
        ({"pruner": {"name": "patience", "min_delta": -1}}, "Search.pruner['min_delta'] must be at least 0"),
        ({"pruner": {"name": "patience", "around": "patience"}}, "Search.pruner['around'] cannot be 'patience'"),
        ({"pruner": {"name": "hyperband", "reduction_factor": 1}}, "must be at least 2"),
        ({"pruner": 3}, "Search.pruner must be a name"),
    ),
)
ROWS += [
    wrong("a step past the end", lambda: uniform(0.0, 1.0, step=0.3), "ends at 0.9: give that"),
    wrong("a step of logarithms", lambda: integer(1, 9, step=2, log=True), "no step"),
    wrong("a choice twice", lambda: choice(accuracy, "accuracy"), "'accuracy' is there twice"),
    wrong(
        "a space that is misspelt",
        lambda: list(sample_space(Search(misspelt).space, 0)),
        "Search.space(trial) raised AttributeError",
    ),
    wrong(
        "a space that returns a number",
        lambda: list(sample_space(lambda trial: trial.suggest_float("lr", 0, 1), 0)),
        "must return a dict",
    ),
]
