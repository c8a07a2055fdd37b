"""What a search is asked to try: the space of hyperparameters, the sampler, the pruner."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ensemble.spec.options import OBJECTIVES, PRUNERS, Word, resolve
from ensemble.spec.validation import SpecError, check_choice, check_number, json_value, python_scalar, strict

SAMPLERS = ("tpe", "random", "grid", "gp", "cmaes")


@dataclass(frozen=True)
class Dimension:
    """One axis of a search space, made by `choice`, `uniform`, `loguniform` or `integer`."""

    kind: Literal["choice", "uniform", "loguniform", "integer"]
    values: tuple[Any, ...]


def choice(*values: Any) -> Dimension:
    """One of the given values; they are JSON values, as all hyperparameters are."""
    if not values:
        raise SpecError("choice() needs at least one value")
    return Dimension("choice", values)


def _interval(kind: Literal["uniform", "loguniform", "integer"], low: float, high: float) -> Dimension:
    low, high = python_scalar(low), python_scalar(high)
    for value in (low, high):
        check_number(f"{kind}()", value, low=-math.inf, integer=kind == "integer")
    if low > high or (kind == "loguniform" and low <= 0):
        raise SpecError(f"{kind}({low!r}, {high!r}) is empty or not positive where it must be")
    return Dimension(kind, (low, high))


def uniform(low: float, high: float) -> Dimension:
    """A number between `low` and `high`, all alike."""
    return _interval("uniform", low, high)


def loguniform(low: float, high: float) -> Dimension:
    """A number between `low` and `high`, its logarithm uniform; both must be positive."""
    return _interval("loguniform", low, high)


def integer(low: int, high: int) -> Dimension:
    """An integer between `low` and `high`, both included."""
    return _interval("integer", low, high)


@strict
@dataclass(frozen=True)
class Search:
    """A hyperparameter search: each trial is a member.

    Attributes:
        space: hyperparameter -> `choice(...)`, `uniform`, `loguniform`, `integer`, or a fixed value.
        trials: how many members are trained in all.
        sampler: what proposes (Optuna): tpe, random, grid, gp, cmaes.
        pruner: what stops the hopeless early (Optuna): hyperband, asha, median, patience, none; or a dict of the
            name and options: `{"name": "hyperband", "reduction_factor": 3, "min_resource": 1}` (the same for asha;
            resources are epochs), `{"name": "median", "startup_trials": 5, "warmup_epochs": 0, "interval_epochs":
            1}`. `{"name": "patience", "epochs": 3, "min_delta": 0.0, "around": "none"}` stops a trial none of
            whose last `epochs` epochs comes within `min_delta` of its best before, whatever the others do; or,
            around another pruner, lets that one stop no trial before.
        objective: what the sampler is to make best: "metric", `Ensemble.objective` of each member by itself, or
            "gain", what a member adds to the ensemble of those that have finished
            (`ensemble.search.marginal_gain`), in NLL or as
            `{"name": "gain", "metric": "accuracy"}` (nll, accuracy, brier). The pruner goes by the metric: what a
            member will add cannot be seen before it has learnt. For samplers that learn: tpe and gp.
        seed: of the sampler.
        storage: an Optuna storage URL; None keeps a journal file in the run directory.
    """

    space: Mapping[str, Any]
    trials: int = 20
    sampler: str = "tpe"
    pruner: Word = "hyperband"
    seed: int = 0
    storage: str | None = field(default=None, repr=False)  # it may hold a password
    objective: Word = "metric"

    def __post_init__(self) -> None:
        if not isinstance(self.space, Mapping) or not self.space:
            raise SpecError("Search.space must be a dict of hyperparameters, got " + repr(self.space))
        object.__setattr__(self, "space", {key: _axis(key, value) for key, value in self.space.items()})
        check_number("Search.trials", self.trials, low=1, integer=True)
        check_number("Search.seed", self.seed, low=0, integer=True)
        check_choice("Search.sampler", self.sampler, SAMPLERS)
        resolve("Search.pruner", self.pruner, PRUNERS)
        if self.gain is not None and self.sampler not in ("tpe", "gp"):
            raise SpecError(
                "Search.objective='gain' needs a sampler that learns from values that change (valid: tpe, gp), "
                f"not {self.sampler!r}"
            )

    @property
    def gain(self) -> Literal["nll", "brier", "accuracy"] | None:
        """The metric of which the gain is the objective; None where the objective is the metric itself."""
        chosen = resolve("Search.objective", self.objective, OBJECTIVES)
        metric: Literal["nll", "brier", "accuracy"] | None = chosen.get("metric")
        return metric

    @property
    def chosen_pruner(self) -> dict[str, Any]:
        """The pruner's name and all of its options."""
        return resolve("Search.pruner", self.pruner, PRUNERS)

    def check_epochs(self, epochs: int) -> None:
        """Refuse a pruner that trials of so many epochs give nothing to decide."""
        least = self.chosen_pruner.get("min_resource", 1)
        if least > epochs:
            raise SpecError(f"Search.pruner['min_resource'] is {least} epochs, but a trial has {epochs}")


def _axis(key: object, given: object) -> Any:
    """One entry of a search space, its values as a member's hyperparameters are."""
    if type(key) is not str:
        raise SpecError(f"Search.space must have str for keys, got {key!r}")
    where = f"Search.space[{key!r}]"
    if not isinstance(given, Dimension):
        return json_value(where, given)
    return Dimension(given.kind, tuple(json_value(where, value) for value in given.values))
