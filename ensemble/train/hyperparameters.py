"""A member's hyperparameters, which record the keys that are read: an unused one is probably a mistake.

So is a key that is read and was not declared.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ensemble.spec import unknown_name
from ensemble.spec.hyperparameters import find_meant
from ensemble.train.job import TrainingError


class UndeclaredHyperparameterError(KeyError, TrainingError):
    """A hyperparameter is read that the member does not have."""

    def __str__(self) -> str:
        return str(self.args[0])


def _record_key(method: Any) -> Any:
    """A method of `dict` that also records its first argument as read."""

    def call(self: Hyperparameters, key: Any, *default: Any) -> Any:
        self._read.add(key)
        return method(self, key, *default)

    return call


def _record_all(method: Any) -> Any:
    """A method of `dict` that also records all keys as read."""

    def call(self: Hyperparameters) -> Any:
        self._read.update(dict.keys(self))
        return method(self)

    return call


class Hyperparameters(dict[str, Any]):
    """A dict that records which of its keys were read; iterating reads all of them.

    Args:
        used: keys that need not be read to have an effect.
    """

    def __init__(self, given: dict[str, Any], used: Iterable[str] = ()) -> None:
        super().__init__(given)
        self._given = list(given)
        self._read: set[str] = set(used)

    @property
    def unused(self) -> list[str]:
        """The given keys that were not read, in order."""
        return [key for key in self._given if key not in self._read]

    def suggest(self, unused: str) -> str | None:
        """The key that was asked for and resembles one that was not read, of which it may be a misspelling."""
        return find_meant(unused, map(str, self._read - set(self._given)))

    def __missing__(self, key: Any) -> Any:
        raise UndeclaredHyperparameterError(
            unknown_name("a hyperparameter is read that the member does not have,", str(key), self._given)
        )

    __getitem__ = _record_key(dict.__getitem__)
    __contains__ = _record_key(dict.__contains__)
    get = _record_key(dict.get)
    pop = _record_key(dict.pop)
    setdefault = _record_key(dict.setdefault)
    __iter__ = _record_all(dict.__iter__)
    keys = _record_all(dict.keys)
    values = _record_all(dict.values)
    items = _record_all(dict.items)

    def copy(self) -> dict[str, Any]:
        """A plain dict."""
        return dict(self.items())

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (self.copy(),)
