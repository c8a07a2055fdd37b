"""Makes the Optuna objects of a search: samplers, pruners, the points of a grid."""

from __future__ import annotations

import contextlib
import copy
import itertools
import warnings
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from ensemble.search._compat import draw_number, find_generators, hyperband, seed_generator
from ensemble.spec import Dimension, Search, SpecError
from ensemble.spec.options import PRUNERS, resolve

if TYPE_CHECKING:
    from optuna.pruners import BasePruner
    from optuna.samplers import BaseSampler

GP_TRIALS = 300
"""Trials that the sampler gp proposes; the controller waits for each: 0.7 s after 300, 20 s after 2,000."""


def make_grid(search: Search) -> list[dict[str, Any]]:
    """All points of a space, in an order shuffled by the seed.

    Raises:
        SpecError: a dimension is continuous.
    """
    assert isinstance(search.space, Mapping)
    axes: dict[str, list[Any]] = {}
    for name, given in search.space.items():
        if isinstance(given, Dimension):
            if given.kind != "choice" and (given.step is None and given.kind != "integer"):
                raise SpecError(
                    f"Search.sampler='grid' needs choice(...), integer(...) or a step, {name!r} is {given}"
                )
            axes[name] = list(given.values) if given.kind == "choice" else _list_steps(given)
    points = [dict(zip(axes, point, strict=True)) for point in itertools.product(*axes.values())]
    return [points[i] for i in np.random.default_rng(search.seed).permutation(len(points))]


def _list_steps(given: Dimension) -> list[Any]:
    """The values of an interval of steps."""
    (low, high), step = given.values, given.step or 1
    return [low + step * number for number in range(round((high - low) / step) + 1)]


@contextlib.contextmanager
def _allow_experimental() -> Iterator[None]:
    """Suppress Optuna's warnings about experimental classes."""
    from optuna.exceptions import ExperimentalWarning

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ExperimentalWarning)
        yield


def is_beyond_gp(search: Search, number: int) -> bool:
    """Whether a trial comes after those that the sampler gp proposes: by its number, as a resume knows it."""
    return search.sampler_name == "gp" and number >= GP_TRIALS


@_allow_experimental()
def make_sampler(search: Search, number: int) -> BaseSampler:
    """The sampler for one trial, seeded by the search's seed and the trial's number.

    From trial `GP_TRIALS` on it is tpe in place of gp, whose proposals take the longer the more trials there are.
    """
    from optuna import samplers

    seed = int(np.random.SeedSequence([search.seed, number]).generate_state(1)[0])
    if search.sampler_name == "tpe" or is_beyond_gp(search, number):
        return samplers.TPESampler(seed=seed)
    if search.sampler_name == "gp":
        return samplers.GPSampler(seed=seed, deterministic_objective=False)
    if search.sampler_name == "cmaes":
        return samplers.CmaEsSampler(seed=seed, warn_independent_sampling=False)
    if (size := search.sampler_options.get("population_size")) is not None:
        genetic = samplers.NSGAIISampler if search.sampler_name == "nsga2" else samplers.NSGAIIISampler
        return genetic(population_size=size, seed=seed)
    return samplers.RandomSampler(seed=seed)


class OwnSampler:
    """A sampler of the user's, seeded for each trial by the search's seed, the trial's number and its own seed.

    Of one of Optuna's each trial gets a copy, as if another process had asked: what it learns is in the study. One
    of another class is asked itself, because it may keep what it learns.
    """

    def __init__(self, search: Search) -> None:
        self._seed = search.seed
        self._sampler: Any = copy.deepcopy(search.sampler)
        declared: Any = copy.deepcopy(search.sampler)
        generators, self.is_of_optuna = find_generators(declared)
        self._drawn = [draw_number(generator) for generator in generators]

    def get(self, number: int) -> BaseSampler:
        """The sampler for one trial."""
        sampler: BaseSampler = copy.deepcopy(self._sampler) if self.is_of_optuna else self._sampler
        for at, (generator, drawn) in enumerate(zip(find_generators(sampler)[0], self._drawn, strict=False)):
            seed = np.random.SeedSequence([self._seed, number, drawn, at]).generate_state(1)[0]
            seed_generator(generator, int(seed))
        return sampler


def make_pruner(search: Search, epochs: int) -> BasePruner:
    """The pruner of trials with so many epochs; a trial's step is its number of finished epochs."""
    own: Any = copy.deepcopy(search.pruner)  # it keeps what it has seen
    return own if hasattr(own, "prune") else _make_named_pruner(search.pruner_options, epochs)


@_allow_experimental()
def _make_named_pruner(chosen: Mapping[str, Any], epochs: int) -> BasePruner:
    """The pruner of this name with these options, as `Search.pruner_options` has them."""
    from optuna import pruners

    from ensemble.search.pruners import TrendPruner

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
        inner = None if around["name"] == "none" else _make_named_pruner(around, epochs)
        # Optuna compares the best of the last patience + 1 values with the best of those before.
        return pruners.PatientPruner(inner, chosen["epochs"] - 1, chosen["min_delta"])
    if name == "trend":
        return TrendPruner(epochs, chosen["min_epochs"], chosen["startup_trials"], chosen["sigmas"])
    return pruners.NopPruner()
