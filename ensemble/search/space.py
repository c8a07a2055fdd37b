"""The space of a search as Optuna sees it: a dict of distributions, or a function that asks a trial for values.

Of a trial there are two forms: what was *suggested*, Optuna's values by name, and the hyperparameters that a
member gets. Of a dict the second form has the fixed values, too; of a function it is whatever that returns.
"""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from ensemble.search._compat import silence_optuna
from ensemble.spec import Dimension, SpecError
from ensemble.spec.search_space import SAMPLE_COUNT, Space, read_params

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution
    from optuna.trial import BaseTrial, Trial


class SearchSpace(Protocol):
    """A space.

    Attributes:
        distributions: of what is suggested to each trial before it is read; None where the trial decides.
    """

    distributions: dict[str, BaseDistribution] | None

    def read(self, trial: BaseTrial) -> dict[str, Any]:
        """The hyperparameters of a trial.

        Raises:
            SpecError: the user's function fails.
        """

    def encode(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """What has to be suggested that a trial has these hyperparameters, as far as they are given."""

    def describe(self, suggested: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, BaseDistribution]]:
        """The values and distributions of a trial to which this was suggested.

        Raises:
            SpecError: it lies outside, or the user's function fails.
        """

    def explain_outside(self, params: Mapping[str, Any]) -> str | None:
        """Why no trial could have these hyperparameters, some of which may be missing; None: one could."""


def make_space(space: Space) -> SearchSpace:
    """The space as it was declared."""
    return FunctionSpace(space) if callable(space) else DictSpace(space)


class DictSpace(SearchSpace):
    """A dict of dimensions and fixed values."""

    def __init__(self, space: Mapping[str, Any]) -> None:
        self._space = space
        self._free = {name: given for name, given in space.items() if isinstance(given, Dimension)}
        self.distributions: dict[str, BaseDistribution] = {
            name: make_distribution(given) for name, given in self._free.items()
        }

    def read(self, trial: BaseTrial) -> dict[str, Any]:
        own: dict[str, Any] = {}
        for name, given in self._space.items():
            if not isinstance(given, Dimension):
                own[name] = given
            elif given.kind == "choice":
                own[name] = next(v for v in given.values if is_equal(encode_choice(v), trial.params[name]))
            else:
                own[name] = trial.params[name]
        return own

    def encode(self, params: Mapping[str, Any]) -> dict[str, Any]:
        return {name: encode_choice(params[name]) for name in self._free if name in params}

    def describe(self, suggested: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, BaseDistribution]]:
        return dict(suggested), {name: self.distributions[name] for name in suggested}

    def explain_outside(self, params: Mapping[str, Any]) -> str | None:
        for name, value in params.items():
            if name not in self._space:
                return f"the space has no {name!r}"
            why = describe_mismatch(self._space[name], value)
            if why is not None:
                return f"{name}={value!r} is {why}"
        return None


class FunctionSpace(SearchSpace):
    """A function that asks a trial for values, and returns the hyperparameters."""

    distributions = None

    def __init__(self, function: Callable[[Any], Mapping[str, Any] | None]) -> None:
        self._function = function

    def read(self, trial: BaseTrial) -> dict[str, Any]:
        return read_params(self._function, trial)

    def encode(self, params: Mapping[str, Any]) -> dict[str, Any]:
        return dict(params)

    def describe(self, suggested: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, BaseDistribution]]:
        trial = self._draw(suggested, 0)
        self.read(trial)
        if missing := trial.params.keys() - suggested.keys():
            raise SpecError(f"it asks for {', '.join(sorted(missing))}, too")
        return trial.params, trial.distributions

    def _draw(self, given: Mapping[str, Any], seed: int) -> Trial:
        """A trial to which this is suggested, and at random what is not given."""
        import optuna

        with silence_optuna():
            study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=seed))
        study.enqueue_trial(dict(given))
        return study.ask()

    def explain_outside(self, params: Mapping[str, Any]) -> str | None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # of what is outside
            found = [self._explain(params, seed) for seed in range(SAMPLE_COUNT)]  # it may have branches
        return None if None in found else found[0]

    def _explain(self, params: Mapping[str, Any], seed: int) -> str | None:
        """Why a trial, in which what is not given is drawn, does not have these hyperparameters."""
        from optuna.trial import create_trial

        trial = self._draw(params, seed)
        try:
            made = self.read(trial)
        except (SpecError, ValueError) as error:
            return str(error)
        for name, value in params.items():
            if name not in trial.params:
                return f"the space asks for no {name!r}"
            try:
                create_trial(value=0.0, params={name: value}, distributions={name: trial.distributions[name]})
            except ValueError:
                return f"{name}={value!r} is outside {trial.distributions[name]}"
            if name in made and not is_equal(made[name], value):
                return f"the space makes {name}={made[name]!r} of {name}={value!r}"
        return None


def make_distribution(dimension: Dimension) -> BaseDistribution:
    """Optuna's distribution of a dimension."""
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    if dimension.kind == "choice":
        return CategoricalDistribution([encode_choice(value) for value in dimension.values])
    low, high = dimension.values
    if dimension.kind == "integer":
        return IntDistribution(low, high, log=dimension.log, step=int(dimension.step or 1))
    return FloatDistribution(low, high, log=dimension.log, step=dimension.step)


def encode_choice(value: Any) -> Any:
    """A choice as Optuna and JSON can store it: a list or a dict as JSON text."""
    return value if value is None or isinstance(value, str | int | float) else json.dumps(value)


def is_equal(a: Any, b: Any) -> bool:
    """Whether two values of a hyperparameter are the same."""
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
    inside = number and low <= value <= high
    if inside and given.step is not None:
        steps = (value - low) / given.step
        inside = math.isclose(steps, round(steps), abs_tol=1e-9)
    return None if inside else f"outside {given}"


def check_kind(name: str, given: Any, value: Any) -> None:
    """Check a hyperparameter's value against an entry of the space that has numbers only.

    Raises:
        SpecError: the value is no number.
    """
    if not isinstance(given, Dimension) or is_number(value) or not all(map(is_number, given.values)):
        return
    raise SpecError(f"hyperparameter {name!r} must be a number, as in the search's {given}, got {value!r}")


def is_number(value: Any) -> bool:
    """Whether a hyperparameter's value is a number; True and False are not."""
    return type(value) in (int, float)
