"""A hyperparameter search as a user declares it: the space, the sampler, the pruner, the objective."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ensemble.spec.options import OBJECTIVES, PRUNERS, NamedOptions, check_hyperparameters, resolve
from ensemble.spec.validation import (
    SpecError,
    as_json_value,
    as_python_scalar,
    check_choice,
    check_number,
    option_class,
)

SAMPLERS = ("tpe", "random", "grid", "gp", "cmaes")
#: Those that take two objectives; the others cannot, or learn from one only.
SAMPLERS_OF_TWO = ("tpe", "random", "grid", "gp")
#: Fields of `cost` events that a search can minimize beside its metric.
SECOND_OBJECTIVES = ("energy_j", "cpu_s")


@dataclass(frozen=True)
class Dimension:
    """One dimension of a search space, made by `choice`, `uniform`, `loguniform` or `integer`."""

    kind: Literal["choice", "uniform", "loguniform", "integer"]
    values: tuple[Any, ...]


def choice(*values: Any) -> Dimension:
    """One of the given values.

    Args:
        values: JSON values, as all hyperparameters are.

    Returns:
        A dimension of `Search.space`.

    Raises:
        SpecError: there is no value; `Search` refuses those that are no JSON values.
    """
    if not values:
        raise SpecError("choice() needs at least one value")
    return Dimension("choice", values)


def _interval(kind: Literal["uniform", "loguniform", "integer"], low: float, high: float) -> Dimension:
    low, high = as_python_scalar(low), as_python_scalar(high)
    for value in (low, high):
        check_number(f"{kind}()", value, low=-math.inf, integer=kind == "integer")
    if kind == "loguniform" and low <= 0:
        raise SpecError(f"{kind}({low!r}, {high!r}): both ends must be above 0")
    if low > high:
        raise SpecError(f"{kind}({low!r}, {high!r}): the first end must be at most the second")
    return Dimension(kind, (low, high))


def uniform(low: float, high: float) -> Dimension:
    """A number, uniformly distributed.

    Args:
        low: the smallest value.
        high: the largest value.

    Returns:
        A dimension of `Search.space`.

    Raises:
        SpecError: an end is no finite number, or `low` is above `high`.
    """
    return _interval("uniform", low, high)


def loguniform(low: float, high: float) -> Dimension:
    """A number whose logarithm is uniformly distributed: the usual choice for learning rates.

    Args:
        low: the smallest value, above 0.
        high: the largest value.

    Returns:
        A dimension of `Search.space`.

    Raises:
        SpecError: an end is no number above 0, or `low` is above `high`.
    """
    return _interval("loguniform", low, high)


def integer(low: int, high: int) -> Dimension:
    """An integer, all of a range alike.

    Args:
        low: the smallest value.
        high: the largest value, included.

    Returns:
        A dimension of `Search.space`.

    Raises:
        SpecError: an end is no integer, or `low` is above `high`.
    """
    return _interval("integer", low, high)


@option_class
@dataclass(frozen=True)
class Search:
    """A hyperparameter search; each trial is a member.

    Attributes:
        space: hyperparameter -> `choice(...)`, `uniform`, `loguniform`, `integer`, or a fixed value, which is no
            list: `choice([8, 16])` is a list as the one value.
        trials: number of members that are trained in all.
        sampler: what proposes hyperparameters (Optuna): tpe, random, grid, gp, cmaes.
        pruner: what stops trials early (Optuna): hyperband, asha, median, patience, none; or a dict of the name
            and options. A resource is an epoch. None: hyperband, and none with a second objective.

            - `{"name": "hyperband", "reduction_factor": 3, "min_resource": 1}`, the same for asha;
            - `{"name": "median", "startup_trials": 5, "warmup_epochs": 0, "interval_epochs": 1}`;
            - `{"name": "patience", "epochs": 3, "min_delta": 0.0, "around": "none"}` stops a trial when none of
              its last `epochs` epochs is within `min_delta` of its best epoch before them. With `around`, another
              pruner stops trials, but none before this one would.
        objective: what the sampler optimizes: "metric", the `Ensemble.objective` of each member by itself, or
            "gain", how much a member improves the ensemble of those that have finished
            (`ensemble.search.marginal_gain`), in NLL (of points in the squared error, of quantiles in the
            pinball loss) or as `{"name": "gain", "metric": "accuracy"}` (nll, accuracy, brier). The pruner always
            uses the metric, because the gain of a member is known only when it has finished. "gain" needs the
            samplers tpe or gp.
        second_objective: what the sampler minimizes beside the metric: "energy_j", the joules that the account
            attributes to a trial, or "cpu_s", its CPU-seconds. The search then looks for the Pareto front of the
            two; it needs the samplers tpe, random, grid or gp, and no trial is pruned, because Optuna prunes by
            one objective only. A run in which joules cannot be had stops when its first trial has ended.
        seed: of the sampler.
        storage: an Optuna storage URL; None keeps a journal file in the run directory.
    """

    space: Mapping[str, Any]
    trials: int = 20
    sampler: str = "tpe"
    pruner: NamedOptions | None = None
    seed: int = 0
    storage: str | None = field(default=None, repr=False)  # it may hold a password
    objective: NamedOptions = "metric"
    second_objective: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.space, Mapping) or not self.space:
            raise SpecError("Search.space must be a dict of hyperparameters, got " + repr(self.space))
        object.__setattr__(self, "space", {key: _as_dimension(key, value) for key, value in self.space.items()})
        check_number("Search.trials", self.trials, low=1, integer=True)
        check_number("Search.seed", self.seed, low=0, integer=True)
        check_choice("Search.sampler", self.sampler, SAMPLERS)
        if self.second_objective is not None:
            self._check_second_objective()
        resolve("Search.pruner", self._named_pruner, PRUNERS)
        if self.gain is not None and self.sampler not in ("tpe", "gp"):
            raise SpecError(
                "Search.objective='gain' needs a sampler that learns from values that change (valid: tpe, gp), "
                f"not {self.sampler!r}"
            )

    def _check_second_objective(self) -> None:
        check_choice("Search.second_objective", self.second_objective, SECOND_OBJECTIVES)
        what = f"Search.second_objective={self.second_objective!r}"
        if self.sampler not in SAMPLERS_OF_TWO:
            valid = ", ".join(SAMPLERS_OF_TWO)
            raise SpecError(f"{what} needs a sampler of two objectives (valid: {valid}), not {self.sampler!r}")
        if self.pruner_options["name"] != "none":
            raise SpecError(f"{what} needs pruner='none' or no pruner: Optuna prunes by one objective only")
        if self.gain is not None:
            raise SpecError(f"{what} needs objective='metric': gains change with each member that finishes")

    @property
    def _named_pruner(self) -> NamedOptions:
        if self.pruner is not None:
            return self.pruner
        return "hyperband" if self.second_objective is None else "none"

    @property
    def gain(self) -> Literal["nll", "brier", "accuracy"] | None:
        """The metric whose gain is optimized; None where the metric itself is."""
        chosen = resolve("Search.objective", self.objective, OBJECTIVES)
        metric: Literal["nll", "brier", "accuracy"] | None = chosen.get("metric")
        return metric

    @property
    def pruner_options(self) -> dict[str, Any]:
        """The pruner's name and all its options."""
        return resolve("Search.pruner", self._named_pruner, PRUNERS)

    def check_epochs(self, epochs: int) -> None:
        """Check that trials of so many epochs are long enough for the pruner.

        Raises:
            SpecError: its smallest resource is more epochs than a trial has.
        """
        smallest = self.pruner_options.get("min_resource", 1)
        if smallest > epochs:
            raise SpecError(f"Search.pruner['min_resource'] is {smallest} epochs, but a trial has {epochs}")


def check_space(
    space: Mapping[str, Any], optimizer: Mapping[str, Any] | None, schedule: Mapping[str, Any] | None
) -> None:
    """Check that every value of a search space is valid for the option it overrides; of an interval, both ends.

    Args:
        optimizer, schedule: the trials' resolved options; None where none are declared.

    Raises:
        SpecError: a value is invalid, or the learning rate is missing.
    """
    values = {name: given.values if isinstance(given, Dimension) else (given,) for name, given in space.items()}
    try:
        for name, candidates in values.items():
            for value in candidates:
                check_hyperparameters(optimizer, schedule, {name: value}, partial=True)
        first = {name: candidates[0] for name, candidates in values.items()}
        check_hyperparameters(optimizer, schedule, first, partial=False)
    except SpecError as error:
        raise SpecError(f"Search.space: {error}") from None


def _as_dimension(key: object, given: object) -> Any:
    """One entry of a search space, its values as JSON values."""
    if type(key) is not str:
        raise SpecError(f"Search.space must have str for keys, got {key!r}")
    where = f"Search.space[{key!r}]"
    if isinstance(given, list | tuple):
        values = ", ".join(map(repr, given)) if given else "..."
        raise SpecError(
            f"{where} is {given!r:.60}, which is not clear: choice({values:.60}) tries each of them, "
            f"choice({given!r:.60}) has all of them as one value; or give uniform(low, high), loguniform(low, "
            "high) or integer(low, high)"
        )
    if not isinstance(given, Dimension):
        return as_json_value(where, given)
    return Dimension(given.kind, tuple(as_json_value(where, value) for value in given.values))
