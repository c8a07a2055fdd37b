"""The space of a search as Optuna sees it: a dict of distributions, or a function that asks a trial for values.

Of a trial there are two forms: what was *suggested*, Optuna's values by name, and the hyperparameters that a
member gets. Of a dict the second form has the fixed values, too; of a function it is whatever that returns.
"""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from ensemble.search._compat import silence_optuna
from ensemble.spec import Dimension, SpecError
from ensemble.spec.search_space import SAMPLE_COUNT, Space, read_params

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution
    from optuna.trial import BaseTrial, FrozenTrial, Trial

    from ensemble.store.member import MemberState


def make_space(space: Space) -> DictSpace | FunctionSpace:
    """The space as it was declared."""
    return FunctionSpace(space) if callable(space) else DictSpace(space)


class DictSpace:
    """A dict of dimensions and fixed values."""

    def __init__(self, space: Mapping[str, Any]) -> None:
        self._space = space
        self._free = {name: entry for name, entry in space.items() if isinstance(entry, Dimension)}
        #: Of what is suggested to each trial before it is read.
        self.distributions = {name: make_distribution(entry) for name, entry in self._free.items()}

    def read(self, trial: BaseTrial) -> dict[str, Any]:
        """The hyperparameters of a trial."""
        own: dict[str, Any] = {}
        for name, entry in self._space.items():
            if not isinstance(entry, Dimension):
                own[name] = entry
            elif entry.kind == "choice":
                own[name] = next(v for v in entry.values if is_equal(encode_choice(v), trial.params[name]))
            else:
                own[name] = trial.params[name]
        return own

    def encode(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """What to suggest so that the next trial has these hyperparameters, some of which may be missing."""
        return {name: encode_choice(params[name]) for name in self._free if name in params}

    def describe(self, suggested: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, BaseDistribution]]:
        """The values and distributions of a trial to which this was suggested; SpecError if it lies outside."""
        return dict(suggested), {name: self.distributions[name] for name in suggested}

    def explain_outside(self, params: Mapping[str, Any]) -> str | None:
        """Why no trial could have these hyperparameters, some of which may be missing; None: one could."""
        for name, value in params.items():
            if name not in self._space:
                return f"the space has no {name!r}"
            why = describe_mismatch(self._space[name], value)
            if why is not None:
                return f"{name}={value!r} is {why}"
        return None


class FunctionSpace:
    """A function that asks a trial for values, and returns the hyperparameters."""

    distributions = None  # the trial decides

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

    def _draw(self, suggested: Mapping[str, Any], seed: int) -> Trial:
        """A trial to which this is suggested, and at random what is not given."""
        import optuna

        with silence_optuna():
            study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=seed))
        study.enqueue_trial(dict(suggested))
        return study.ask()

    def explain_outside(self, params: Mapping[str, Any]) -> str | None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # of what is outside
            reasons = [self._explain(params, seed) for seed in range(SAMPLE_COUNT)]  # it may have branches
        return None if None in reasons else reasons[0]

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
                return f"the space does not suggest {name!r}"
            try:
                create_trial(value=0.0, params={name: value}, distributions={name: trial.distributions[name]})
            except ValueError:
                return f"{name}={value!r} is outside {trial.distributions[name]}"
            if name in made and not is_equal(made[name], value):
                return f"the space turns {name}={value!r} into {name}={made[name]!r}"
        return None


def fit_trial(
    space: DictSpace | FunctionSpace, trial: FrozenTrial, member: MemberState | None, number: int
) -> tuple[dict[str, Any], dict[str, BaseDistribution]]:
    """The values of a trial and their distributions in the declared space, which may be wider than before."""
    from optuna.trial import TrialState, create_trial

    try:
        params, distributions = space.describe(trial.params)
        create_trial(state=TrialState.RUNNING, params=params, distributions=distributions)
    except (KeyError, SpecError, ValueError) as error:
        if trial.state == TrialState.FAIL and (member is None or member.reason == "impossible"):
            return trial.params, trial.distributions
        raise SpecError(
            f"Search.space does not hold the hyperparameters of member-{number} ({error}); resume with "
            "the space that the run began with, or choose another run directory"
        ) from None
    return params, distributions


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


def describe_mismatch(entry: Any, value: Any) -> str | None:
    """Why a hyperparameter's value is outside of an entry of the space; None where it is inside."""
    if not isinstance(entry, Dimension):
        return None if is_equal(encode_choice(entry), encode_choice(value)) else f"not the {entry!r} of the space"
    if entry.kind == "choice":
        is_choice = any(is_equal(encode_choice(one), encode_choice(value)) for one in entry.values)
        return None if is_choice else f"none of {', '.join(map(repr, entry.values))}"
    low, high = entry.values
    number = type(value) is int or (type(value) is float and entry.kind != "integer")
    inside = number and low <= value <= high
    if inside and entry.step is not None:
        steps = (value - low) / entry.step
        inside = math.isclose(steps, round(steps), abs_tol=1e-9)
    return None if inside else f"outside {entry}"


def check_kind(name: str, entry: Any, value: Any) -> None:
    """Check that a hyperparameter's value is a number where the entry of the space has numbers only."""
    if not isinstance(entry, Dimension) or is_number(value) or not all(map(is_number, entry.values)):
        return
    raise SpecError(f"hyperparameter {name!r} must be a number, as in the search's {entry}, got {value!r}")


def is_number(value: Any) -> bool:
    """Whether a hyperparameter's value is a number; True and False are not."""
    return type(value) in (int, float)
