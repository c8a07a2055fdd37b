"""The space of a search: its dimensions, as a dict of them or as a function that asks a trial for values."""

from __future__ import annotations

import dataclasses
import json
import math
import random
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ensemble.spec.validation import SpecError, as_json_value, as_python_scalar, check_number

#: Number of random points of a space that stand for all of them, where something is checked of each.
SAMPLE_COUNT = 8
#: And where it costs nothing, so that rare branches of a function are seen, too.
PROBES = 64

_OURS = "choice(...), uniform(low, high), loguniform(low, high), integer(low, high), or a fixed value"
_NOT_NESTED = (
    "spaces are not nested: name the dimension 'name.of.part' beside the others, or give a function space(trial) "
    "that returns nested dicts"
)
#: Keys by which dicts of Weights & Biases and Ray Tune say what is searched.
_OF_OTHERS = {"values", "grid_search", "min", "max", "distribution", "value", "mu", "sigma", "q", "probabilities"}

#: A dict of dimensions and fixed values, or a function from a trial to the hyperparameters.
Space = Mapping[str, Any] | Callable[[Any], Mapping[str, Any] | None]


@dataclass(frozen=True)
class Dimension:
    """One dimension of a search space, made by `choice`, `uniform`, `loguniform` or `integer`.

    Attributes:
        values: those to choose from; of an interval, its ends.
        step: between two values of an interval, counted from its lower end; None: any number, or any integer.
        log: whether the logarithm of the value is uniformly distributed.
    """

    kind: Literal["choice", "uniform", "loguniform", "integer"]
    values: tuple[Any, ...]
    step: float | None = None
    log: bool = False

    def __str__(self) -> str:
        options = {"step": self.step, "log": self.log and self.kind == "integer"}
        shown = [*map(repr, self.values), *(f"{name}={value!r}" for name, value in options.items() if value)]
        return f"{self.kind}({', '.join(shown)})"

    @property
    def probes(self) -> tuple[Any, ...]:
        """Values that stand for all: those of a choice, the outermost of an interval."""
        if self.kind in ("choice", "integer") or self.step is not None or self.values[0] == self.values[1]:
            return self.values
        low, high = self.values
        return math.nextafter(low, high), math.nextafter(high, low)  # an end is never drawn

    def is_compatible(self, other: Dimension) -> bool:
        """Whether Optuna takes both for one name: intervals may differ by their ends, choices by nothing."""
        if "choice" in (self.kind, other.kind):
            return self == other
        return (self.kind == "integer", self.log) == (other.kind == "integer", other.log)

    def draw(self, rng: random.Random) -> Any:
        """A random value."""
        if self.kind == "choice":
            return rng.choice(self.values)
        low, high = self.values
        if self.step is not None:
            return min(high, low + self.step * rng.randint(0, round((high - low) / self.step)))
        if self.kind == "integer" and not self.log:
            return rng.randint(low, high)
        value = math.exp(rng.uniform(math.log(low), math.log(high))) if self.log else rng.uniform(low, high)
        value = min(high, max(low, value))
        return round(value) if self.kind == "integer" else value


def choice(*values: Any) -> Dimension:
    """One of the given values.

    Args:
        values: JSON values, as all hyperparameters are, or one list or tuple of them: `choice([8, 16])` is
            `choice(8, 16)`, and `choice((8, 8), (16,))` has tuples for values. A class or a function stands for
            its name, which is what the model gets: `choice(nn.ReLU, nn.GELU)` is `choice("ReLU", "GELU")`.

    Returns:
        A dimension of `Search.space`.

    Raises:
        SpecError: there is no value, or one is there twice; `Search` refuses those that are no JSON values.
    """
    if len(values) == 1 and isinstance(values[0], list | tuple):
        values = tuple(values[0])
    if not values:
        raise SpecError("choice() needs at least one value")
    named = tuple(value.__name__ if hasattr(value, "__name__") else value for value in values)
    shown = [json.dumps(value, default=repr) for value in named]
    for value, text in zip(named, shown, strict=True):
        if shown.count(text) > 1:
            raise SpecError(f"choice(): {value!r} is there twice (tuples and lists are the same in the records)")
    return Dimension("choice", named)


def _interval(
    kind: Literal["uniform", "loguniform", "integer"],
    low: float,
    high: float,
    step: float | None = None,
    log: bool = False,
) -> Dimension:
    low, high, step = as_python_scalar(low), as_python_scalar(high), as_python_scalar(step)
    shown = f"{kind}({low!r}, {high!r})"
    for value in (low, high):
        check_number(f"{kind}()", value, low=-math.inf, integer=kind == "integer")
    if log and low <= 0:
        raise SpecError(f"{shown}: both ends must be above 0")
    if low > high:
        raise SpecError(f"{shown}: the first end must be at most the second")
    if step is not None:
        check_number(f"{kind}(step=)", step, low=0, above=True, integer=kind == "integer")
        if log:
            raise SpecError(f"{shown}: a logarithmic interval has no step")
        steps = (high - low) / step
        if not math.isclose(steps, round(steps), abs_tol=1e-9):
            last = low + step * math.floor(steps)
            raise SpecError(f"{kind}({low!r}, {high!r}, step={step!r}) ends at {last:g}: give that as its end")
    return Dimension(kind, (low, high), step, log)


def uniform(low: float, high: float, step: float | None = None) -> Dimension:
    """A number, uniformly distributed.

    Args:
        low: the smallest value.
        high: the largest value.
        step: between two values, from `low` on; None: any number.

    Returns:
        A dimension of `Search.space`.

    Raises:
        SpecError: an end is no finite number, `low` is above `high`, or no number of steps leads to it.
    """
    return _interval("uniform", low, high, step)


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
    return _interval("loguniform", low, high, log=True)


def integer(low: int, high: int, step: int | None = None, log: bool = False) -> Dimension:
    """An integer of a range, both ends included.

    Args:
        low: the smallest value.
        high: the largest value, included.
        step: between two values, from `low` on; None: 1.
        log: whether the logarithm is uniformly distributed, as for widths of layers.

    Returns:
        A dimension of `Search.space`.

    Raises:
        SpecError: an end is no integer, `low` is above `high`, no number of steps leads to it, or `low` is no
            number above 0 with `log`.
    """
    return _interval("integer", low, high, None if step == 1 else step, log)


def as_space(space: object) -> Space:
    """A space as declared: a function, or a dict with dimensions and fixed values.

    Raises:
        SpecError: it is neither, or an entry is unclear.
    """
    if callable(space):
        return space
    if not isinstance(space, Mapping) or not space:
        raise SpecError(
            f"Search.space must be a dict of hyperparameters, or a function space(trial), got {space!r:.60}"
        )
    return {key: _as_dimension(key, value) for key, value in space.items()}


def _as_dimension(key: object, declared: Any) -> Any:
    """One entry of a search space, its values as JSON values; of a distribution of Optuna, the same dimension."""
    if type(key) is not str:
        raise SpecError(f"Search.space must have str for keys, got {key!r}")
    where = f"Search.space[{key!r}]"
    kind = type(declared)
    if kind.__module__ == "optuna.distributions":
        declared = _from_optuna(declared)
    if isinstance(declared, Dimension):
        inner = [part for one in declared.values if isinstance(one, Mapping) for part in one.values()]
        if any(isinstance(part, Dimension) for part in inner):
            raise SpecError(f"{where}: {_NOT_NESTED}")
        values = tuple(as_json_value(where, value, tuples=True) for value in declared.values)
        return dataclasses.replace(declared, values=values)
    is_several = isinstance(declared, list | tuple | set | range) or getattr(declared, "ndim", False)
    is_foreign = isinstance(declared, Mapping) and bool(declared) and declared.keys() <= _OF_OTHERS
    is_nested = isinstance(declared, Mapping) and any(isinstance(one, Dimension) for one in declared.values())
    if is_several or is_foreign or is_nested or kind.__module__ not in ("builtins", "numpy"):
        meant = _NOT_NESTED if is_nested else f"give {_OURS}"
        if is_several:
            shown = ", ".join(map(repr, declared.tolist() if hasattr(declared, "tolist") else declared)) or "..."
            meant = f"choice({shown:.60}) tries each of them, choice([{declared!r:.60}]) is this one fixed value"
        raise SpecError(f"{where} is {' '.join(repr(declared).split()):.80}, which is ambiguous: {meant}")
    return as_json_value(where, declared, tuples=True)


def _from_optuna(distribution: Any) -> Dimension:
    if hasattr(distribution, "choices"):
        return choice(list(distribution.choices))
    low, high, step, log = (getattr(distribution, name) for name in ("low", "high", "step", "log"))
    if type(distribution).__name__ == "IntDistribution":
        return integer(low, high, step, log)
    return loguniform(low, high) if log else uniform(low, high, step)


def list_values(declared: Any) -> tuple[Any, ...]:
    """The values of an entry of a space: those of a choice, the ends of an interval, or the fixed one."""
    return declared.values if isinstance(declared, Dimension) else (declared,)


class DrawnTrial:
    """A trial with random values, for a function `space(trial)` that is to be tried before any training.

    It has the part of Optuna's trial that such a function uses.

    Attributes:
        params: what was drawn.

    Args:
        requests: what earlier trials have asked for, by name; it grows.
    """

    number = 0

    def __init__(self, rng: random.Random, requests: dict[str, Dimension]) -> None:
        self._rng, self._requests = rng, requests
        self.params: dict[str, Any] = {}

    def suggest_float(
        self, name: str, low: float, high: float, *, step: float | None = None, log: bool = False
    ) -> float:
        """A number of an interval."""
        return float(self._draw(name, loguniform(low, high) if log else uniform(low, high, step)))

    def suggest_int(self, name: str, low: int, high: int, *, step: int = 1, log: bool = False) -> int:
        """An integer of an interval."""
        return int(self._draw(name, integer(low, high, step, log)))

    def suggest_categorical(self, name: str, choices: Sequence[Any]) -> Any:
        """One of the choices."""
        return self._draw(name, Dimension("choice", tuple(choices)))

    def set_user_attr(self, key: str, value: Any) -> None:
        """Nothing: nobody reads it."""

    def _draw(self, name: str, dimension: Dimension) -> Any:
        before = self._requests.setdefault(name, dimension)
        if not before.is_compatible(dimension):
            raise SpecError(
                f"{name!r} is suggested as {before} and as {dimension}, which no sampler can compare: give the "
                f"two different names, such as {name + '_a'!r} and {name + '_b'!r}, and return one as {name!r}"
            )
        return self.params.setdefault(name, dimension.draw(self._rng))


def read_params(
    space: Callable[[Any], Mapping[str, Any] | None], trial: Any, *, tuples: bool = False
) -> dict[str, Any]:
    """The hyperparameters that a function makes of a trial; where it returns None, what it asked for.

    Args:
        tuples: whether tuples stay tuples.

    Raises:
        SpecError: the function fails, or returns something else.
    """
    try:
        made = space(trial)
    except SpecError as error:
        raise SpecError(f"Search.space(trial): {error}") from None
    except Exception as error:
        raise SpecError(f"Search.space(trial) raised {type(error).__name__}: {error}") from error
    if made is None:
        made = dict(trial.params)
    if not isinstance(made, Mapping) or not made:
        raise SpecError(f"Search.space(trial) must return a dict of hyperparameters, got {made!r:.60}")
    params: dict[str, Any] = as_json_value("Search.space(trial)", made, tuples=tuples)
    return params


def sample_space(space: Space, seed: int, count: int = SAMPLE_COUNT) -> Iterator[dict[str, Any]]:
    """So many random points of a space.

    Raises:
        SpecError: a function fails, or asks for one name in ways that Optuna cannot combine.
    """
    rng, requests = random.Random(seed), dict[str, Dimension]()
    for _ in range(count):
        if callable(space):
            yield read_params(space, DrawnTrial(rng, requests), tuples=True)
        else:
            yield {
                name: value.draw(rng) if isinstance(value, Dimension) else value for name, value in space.items()
            }


def list_probes(space: Space) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """What stands for all points of a space: parts of points, with each value or end of an interval by itself, and
    whole points.

    Raises:
        SpecError: a function fails, or asks for one name in ways that Optuna cannot combine.
    """
    if callable(space):
        return [], list(sample_space(space, 0, PROBES))
    values = {name: own.probes if isinstance(own, Dimension) else (own,) for name, own in space.items()}
    parts = [{name: value} for name, candidates in values.items() for value in candidates]
    return parts, [{name: candidates[0] for name, candidates in values.items()}]


def warn_of_constants(space: Space, points: Sequence[Mapping[str, Any]]) -> None:
    """Warn of a space that draws nothing: a function, at all `points`."""
    if callable(space):
        is_constant = all(point == points[0] for point in points)
    else:
        is_constant = all(
            len(set(map(repr, one.values))) == 1 for one in space.values() if isinstance(one, Dimension)
        )
    if is_constant:
        warnings.warn(
            "Search.space draws nothing, so that all trials differ by their seeds only: give choice(...), "
            "uniform(low, high), loguniform(low, high) or integer(low, high), or members=seeds(n, {...})",
            stacklevel=5,
        )
