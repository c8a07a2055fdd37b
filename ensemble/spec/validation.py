"""How declarations are checked: a mistake is a `SpecError` of one line that says what, where and what is valid."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar


class SpecError(ValueError):
    """A declaration that cannot be run; the message is one line made for the user."""


T = TypeVar("T", bound=type)


def strict(cls: T) -> T:
    """Make a dataclass answer an unknown option with the valid names; numpy's scalars become Python's."""
    plain = cls.__init__  # type: ignore[misc]
    names = [f.name for f in dataclasses.fields(cls) if f.init]

    @functools.wraps(plain)
    def init(self: Any, *args: Any, **options: Any) -> None:
        for name in options:
            if name not in names:
                raise SpecError(unknown_name(f"{cls.__name__} has no option", name, names))
        given = {name: python_scalar(value) for name, value in options.items()}
        try:
            plain(self, *map(python_scalar, args), **given)
        except TypeError as error:
            if "__init__" not in str(error):
                raise
            raise SpecError(f"{cls.__name__}: {str(error).split('__init__() ')[-1]}") from None

    cls.__init__ = init  # type: ignore[misc]
    return cls


def unknown_name(what: str, name: str, valid: Sequence[str]) -> str:
    """One line for a mistyped name: what it was, the closest valid one, all valid ones."""
    of_lower = {word.lower(): word for word in valid}
    close = difflib.get_close_matches(name.lower(), of_lower, n=1)
    hint = f"; did you mean {of_lower[close[0]]!r}?" if close else ""
    return f"{what} {name!r}{hint} (valid: {', '.join(valid)})"


def check_choice(where: str, value: object, valid: Sequence[str]) -> None:
    """Refuse what is not one of the valid words."""
    if value not in valid:
        raise SpecError(unknown_name(f"{where} cannot be", str(value), valid))


def check_number(where: str, value: object, *, low: float, integer: bool = False, above: bool = False) -> None:
    """Refuse what is no finite number of at least (or above) `low`."""
    value = python_scalar(value)
    kind = int if integer else (int, float)
    if isinstance(value, bool) or not isinstance(value, kind) or not math.isfinite(value):
        raise SpecError(f"{where} must be {'an integer' if integer else 'a number'}, got {value!r}")
    if value < low or (above and value == low):
        raise SpecError(f"{where} must be {'above' if above else 'at least'} {low:g}, got {value!r}")


def check_loss_scale(where: str, value: object) -> None:
    """Refuse what is neither "dynamic" nor a number above 0."""
    if value != "dynamic":
        if isinstance(value, str):
            raise SpecError(f"{where} must be 'dynamic' or a number above 0, got {value!r}")
        check_number(where, value, low=0, above=True)


def json_value(where: str, value: object) -> Any:
    """A hyperparameter as the log, the checkpoint and every process will have it: exactly a JSON value.

    numpy's scalars become Python's, tuples lists; what would come back as another value is refused.

    Raises:
        SpecError: names the key in `where`.
    """
    value = python_scalar(value)
    if isinstance(value, Mapping):
        odd = next((key for key in value if type(key) is not str), None)
        if odd is not None:
            raise SpecError(f"{where} must have str for keys, got {odd!r}")
        return {key: json_value(f"{where}[{key!r}]", item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [json_value(f"{where}[{i}]", item) for i, item in enumerate(value)]
    if value is None or type(value) in (bool, int, str) or (type(value) is float and math.isfinite(value)):
        return value
    given = " ".join(repr(value).split())
    raise SpecError(
        f"{where} must be a finite number, a str, a bool, None, or a list or dict of these, got "
        f"{given if len(given) <= 80 else given[:77] + '...'} ({type(value).__name__})"
    )


def python_scalar(value: Any) -> Any:
    """numpy's scalars as Python's, all else as it is (numpy is not imported for this)."""
    return value.item() if type(value).__module__ == "numpy" and getattr(value, "ndim", None) == 0 else value
