"""Makes the Optuna objects of a search: samplers, pruners, the points of a grid."""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import itertools
import warnings
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from ensemble.search._compat import draw_number, find_generators, seed_generator
from ensemble.spec import Dimension, Search, SpecError
from ensemble.spec.options import resolve
from ensemble.spec.samplers import PRUNER_TYPES, PRUNERS, SAMPLER_TYPES

if TYPE_CHECKING:
    from optuna.pruners import BasePruner
    from optuna.samplers import BaseSampler

#: Packages that a sampler needs beyond Optuna; each has a module of the same name.
_NEEDS = {"cmaes": ("cmaes",), "gp": ("scipy", "torch")}


def check_installed(sampler: str) -> None:
    """Raise SpecError for a sampler that needs a package that is not installed."""
    missing = [package for package in _NEEDS.get(sampler, ()) if importlib.util.find_spec(package) is None]
    if missing:
        raise SpecError(
            f"Search.sampler={sampler!r} needs {' and '.join(missing)}: "
            f"`pip install {' '.join(missing)}`, or choose tpe"
        )


def make_grid(search: Search) -> list[dict[str, Any]]:
    """All points of a space, in an order shuffled by the seed.

    Raises:
        SpecError: a dimension is continuous.
    """
    assert isinstance(search.space, Mapping)
    axes: dict[str, list[Any]] = {}
    for name, dimension in search.space.items():
        if isinstance(dimension, Dimension):
            if dimension.kind != "choice" and (dimension.step is None and dimension.kind != "integer"):
                raise SpecError(
                    f"Search.sampler='grid' needs choice(...), integer(...) or a step, {name!r} is {dimension}"
                )
            axes[name] = list(dimension.values) if dimension.kind == "choice" else _list_steps(dimension)
    points = [dict(zip(axes, point, strict=True)) for point in itertools.product(*axes.values())]
    return [points[i] for i in np.random.default_rng(search.seed).permutation(len(points))]


def _list_steps(dimension: Dimension) -> list[Any]:
    """The values of an interval of steps."""
    (low, high), step = dimension.values, dimension.step or 1
    return [low + step * number for number in range(round((high - low) / step) + 1)]


@contextlib.contextmanager
def _allow_experimental() -> Iterator[None]:
    """Suppress Optuna's warnings about experimental classes."""
    from optuna.exceptions import ExperimentalWarning

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ExperimentalWarning)
        yield


@_allow_experimental()
def make_sampler(search: Search, number: int) -> BaseSampler:
    """The sampler for one trial, seeded by the search's seed and the trial's number."""
    options: dict[str, Any] = {"seed": int(np.random.SeedSequence([search.seed, number]).generate_state(1)[0])}
    name = search.sampler_name
    if name == "gp":
        options["deterministic_objective"] = False
    elif name == "cmaes":
        options["warn_independent_sampling"] = False
    elif (size := search.sampler_options.get("population_size")) is not None:
        options["population_size"] = size
    sampler: BaseSampler = SAMPLER_TYPES.load(name)(**options)
    return sampler


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
    arguments: tuple[Any, ...] = ()
    match chosen:
        case {"name": "hyperband"}:
            arguments = (chosen["min_resource"], epochs, chosen["reduction_factor"])
        case {"name": "asha"}:
            arguments = (chosen["min_resource"], chosen["reduction_factor"])
        case {"name": "median"}:
            arguments = (chosen["startup_trials"], chosen["warmup_epochs"] + 1, chosen["interval_epochs"])
        case {"name": "patience"}:
            around = resolve("Search.pruner['around']", chosen["around"], PRUNERS)
            inner = None if around["name"] == "none" else _make_named_pruner(around, epochs)
            # Optuna compares the best of the last patience + 1 values with the best of those before.
            arguments = (inner, chosen["epochs"] - 1, chosen["min_delta"])
    pruner: BasePruner = PRUNER_TYPES.load(chosen["name"])(*arguments)
    return pruner
