"""Makes the Optuna objects of a search: distributions, encoded values, samplers, pruners."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import warnings
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from ensemble.search._compat import hyperband
from ensemble.spec import Dimension, Search, SpecError
from ensemble.spec.options import PRUNERS, resolve

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution
    from optuna.pruners import BasePruner
    from optuna.samplers import BaseSampler

GP_TRIALS = 300
"""Trials that the sampler gp proposes; the controller waits for each: 0.7 s after 300, 20 s after 2,000."""


def encode_choice(value: Any) -> Any:
    """A choice as Optuna and JSON can store it: a list or a dict as JSON text."""
    return value if value is None or isinstance(value, str | int | float) else json.dumps(value)


def is_equal(a: Any, b: Any) -> bool:
    return type(a) is type(b) and (a == b or (isinstance(a, float) and math.isnan(a) and math.isnan(b)))


def describe_mismatch(given: Any, value: Any) -> str | None:
    """Why a hyperparameter's value is outside of an entry of the space; None where it is inside."""
    if not isinstance(given, Dimension):
        return None if is_equal(encode_choice(given), encode_choice(value)) else f"not the {given!r} of the space"
    if given.kind == "choice":
        known = any(is_equal(encode_choice(one), encode_choice(value)) for one in given.values)
        return None if known else f"none of {', '.join(map(repr, given.values))}"
    low, high = given.values
    number = type(value) is int or (type(value) is float and given.kind != "integer")
    return None if number and low <= value <= high else f"outside {given.kind}({low!r}, {high!r})"


def check_kind(name: str, given: Any, value: Any) -> None:
    """Check a hyperparameter's value against an entry of the space that has numbers only.

    Raises:
        SpecError: the value is no number.
    """
    if not isinstance(given, Dimension) or is_number(value) or not all(map(is_number, given.values)):
        return
    shown = f"{given.kind}({', '.join(map(repr, given.values))})"
    raise SpecError(f"hyperparameter {name!r} must be a number, as in the search's {shown}, got {value!r}")


def is_number(value: Any) -> bool:
    """Whether a hyperparameter's value is a number; True and False are not."""
    return type(value) in (int, float)


def make_distribution(dimension: Dimension) -> BaseDistribution:
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    if dimension.kind == "choice":
        return CategoricalDistribution([encode_choice(value) for value in dimension.values])
    low, high = dimension.values
    if dimension.kind == "integer":
        return IntDistribution(low, high)
    return FloatDistribution(low, high, log=dimension.kind == "loguniform")


def make_grid(search: Search) -> list[dict[str, Any]]:
    """All points of a space, in an order shuffled by the seed.

    Raises:
        SpecError: a dimension is continuous.
    """
    axes: dict[str, list[Any]] = {}
    for name, given in search.space.items():
        if isinstance(given, Dimension):
            if given.kind not in ("choice", "integer"):
                raise SpecError(
                    f"Search.sampler='grid' needs choice(...) or integer(...), {name!r} is {given.kind}"
                )
            low, high = given.values[0], given.values[-1]
            axes[name] = list(given.values) if given.kind == "choice" else list(range(low, high + 1))
    points = [dict(zip(axes, point, strict=True)) for point in itertools.product(*axes.values())]
    return [points[i] for i in np.random.default_rng(search.seed).permutation(len(points))]


@contextlib.contextmanager
def _allow_experimental() -> Iterator[None]:
    """Suppress Optuna's warnings about experimental classes."""
    from optuna.exceptions import ExperimentalWarning

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ExperimentalWarning)
        yield


def is_beyond_gp(search: Search, number: int) -> bool:
    """Whether a trial comes after those that the sampler gp proposes: by its number, as a resume knows it."""
    return search.sampler == "gp" and number >= GP_TRIALS


@_allow_experimental()
def make_sampler(search: Search, number: int) -> BaseSampler:
    """The sampler for one trial, seeded by the search's seed and the trial's number.

    From trial `GP_TRIALS` on it is tpe in place of gp, whose proposals take the longer the more trials there are.
    """
    from optuna import samplers

    seed = int(np.random.SeedSequence([search.seed, number]).generate_state(1)[0])
    if search.sampler == "tpe" or is_beyond_gp(search, number):
        return samplers.TPESampler(seed=seed)
    if search.sampler == "gp":
        return samplers.GPSampler(seed=seed, deterministic_objective=False)
    if search.sampler == "cmaes":
        return samplers.CmaEsSampler(seed=seed, warn_independent_sampling=False)
    return samplers.RandomSampler(seed=seed)


@_allow_experimental()
def make_pruner(chosen: Mapping[str, Any], epochs: int) -> BasePruner:
    """The pruner of trials with so many epochs; a trial's step is its number of finished epochs.

    Args:
        chosen: its name and all its options, as `Search.pruner_options` has them.
        epochs: of each trial.
    """
    from optuna import pruners

    name = chosen["name"]
    if name == "hyperband":
        return hyperband(chosen["min_resource"], epochs, chosen["reduction_factor"])
    if name == "asha":
        return pruners.SuccessiveHalvingPruner(chosen["min_resource"], chosen["reduction_factor"])
    if name == "median":
        return pruners.MedianPruner(
            chosen["startup_trials"], chosen["warmup_epochs"] + 1, chosen["interval_epochs"]
        )
    if name == "patience":
        around = resolve("Search.pruner['around']", chosen["around"], PRUNERS)
        inner = None if around["name"] == "none" else make_pruner(around, epochs)
        # Optuna compares the best of the last patience + 1 values with the best of those before.
        return pruners.PatientPruner(inner, chosen["epochs"] - 1, chosen["min_delta"])
    return pruners.NopPruner()
