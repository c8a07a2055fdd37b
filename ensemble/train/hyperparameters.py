"""A member's hyperparameters, which record the keys that are read: an unused one is probably a mistake.

So is a key that is read and was not declared.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ensemble.spec import unknown_name
from ensemble.spec.functions import find_meant
from ensemble.train.job import TrainingError


class UndeclaredHyperparameterError(KeyError, TrainingError):
    """A hyperparameter is read that the member does not have."""

    def __str__(self) -> str:
        return str(self.args[0])


class Hyperparameters(dict[str, Any]):
    """A dict that records which of its keys were read; iterating reads all of them."""

    def __init__(self, values: dict[str, Any], used: Iterable[str] = ()) -> None:
        super().__init__(values)
        self._given = list(values)
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

    def copy(self) -> dict[str, Any]:
        """A plain dict."""
        return dict(self.items())

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (self.copy(),)


def _recording(name: str) -> Any:
    """A method of `dict` that also records its first argument as read, or all keys where it takes none."""
    method = getattr(dict, name)

    def call(self: Hyperparameters, *args: Any) -> Any:
        self._read.update(args[:1] or dict.keys(self))
        return method(self, *args)

    return call


for _name in ("__getitem__", "__contains__", "get", "pop", "setdefault", "__iter__", "keys", "values", "items"):
    setattr(Hyperparameters, _name, _recording(_name))
