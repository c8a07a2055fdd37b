"""Checks of declarations: a mistake is a `SpecError` of one line that says what, where, and what is valid."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import importlib
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from pipelines.errors import SYNONYMS
from pipelines.errors import unknown_name as unknown_name


class SpecError(ValueError):
    """A declaration that cannot be run; the message is one line for the user."""


#: Arguments of `ensemble.submit`.
OF_A_START = (
    "accept_code", "accept_data", "executor", "fresh", "limits", "mirror", "notify", "on_event", "run_dir",
    "spec_file",
)  # fmt: skip

T = TypeVar("T", bound=type)

#: The classes of options, by name: one that is given to the wrong class is found in the right one.
_OPTION_CLASSES: dict[str, type] = {}


def option_class(cls: T) -> T:
    """Class decorator: a dataclass whose unknown options raise SpecError with the valid names, or the right class.

    numpy scalars among its arguments become Python scalars.
    """
    init = cls.__init__  # type: ignore[misc]
    names = list_options(cls)
    _OPTION_CLASSES[cls.__name__] = cls

    @functools.wraps(init)
    def checked_init(self: Any, *args: Any, **options: Any) -> None:
        for name in options:
            if name not in names:
                raise SpecError(_describe_unknown_option(cls, name, names))
        converted = {name: as_python_scalar(value) for name, value in options.items()}
        try:
            init(self, *map(as_python_scalar, args), **converted)
        except TypeError as error:
            if "__init__" not in str(error):
                raise
            raise SpecError(f"{cls.__name__}: {str(error).split('__init__() ')[-1]}") from None

    cls.__init__ = checked_init  # type: ignore[misc]
    return cls


def list_options(cls: type) -> list[str]:
    """The names of the options that an option class takes."""
    return [f.name for f in dataclasses.fields(cls) if f.init]


def _describe_unknown_option(cls: type, name: str, valid: Sequence[str]) -> str:
    """One line about an option that a class does not have: the classes that have it, else as `unknown_name`."""
    what = f"{cls.__name__} has no option"
    if (cls.__name__, name) == ("Member", "name"):
        return f"{what} 'name': members have numbers; a hyperparameter tells them apart: {{'name': 'wide'}}"
    if (place := _find_other_place(cls, SYNONYMS.get(name, name), valid)) is not None:
        return f"{what} {name!r}; {place}"
    importlib.import_module("ensemble.spec.search")  # which is imported where it is declared
    owners = [owner for owner, kind in _OPTION_CLASSES.items() if name in list_options(kind)]
    holders = {  # how an option of this class holds an object of another one
        owner: "{} in " + f"{field.name}=" if str(field.type).startswith("Sequence") else f"{field.name}=" + "{}"
        for owner in owners
        for field in dataclasses.fields(cls)
        if re.search(rf"\b{owner}\b", str(field.type))
    }
    if not owners or (not holders and difflib.get_close_matches(name, valid, n=1)):
        return unknown_name(what, name, valid, f"help(ensemble.{cls.__name__})")
    owners.sort(key=lambda owner: owner not in holders)
    shown = [holders.get(owner, "{}").format(f"{owner}({name}=...)") for owner in owners]
    return f"{what} {name!r}; give it as {' or '.join(shown)}"


def _find_other_place(cls: type, name: str, valid: Sequence[str]) -> str | None:
    """Where to give what is no option of a class but of something that it takes, or of one of its methods."""
    from ensemble.spec.options import TRAINING_OPTIONS

    ways = []
    for option, table in TRAINING_OPTIONS.items():
        owner = next((owner for owner, options in table.items() if name in options), None)
        if owner is not None and option in valid:
            ways.append(f"{option}={{'name': {owner!r}, {name!r}: ...}}")
    if "params" in valid and (ways or not difflib.get_close_matches(name, valid, n=1)):
        ways.append(f"params={{{name!r}: ...}}, which takes hyperparameters")
    elif ways and "members" in valid:
        ways.append(f"as a hyperparameter of members, {{{name!r}: ...}}")
    if cls.__name__ == "Ensemble" and name in OF_A_START:
        ways.append(f"ensemble.submit(..., {name}=...): it is of a start, not of the declaration")
    return f"give it as {' or '.join(ways)}" if ways else None


def check_choice(where: str, value: object, valid: Sequence[str]) -> None:
    """Raise SpecError for a value that is not one of the valid names."""
    if value not in valid:
        raise SpecError(unknown_name(f"{where} cannot be", str(value), valid))


def check_number(
    where: str,
    value: object,
    *,
    low: float,
    high: float = math.inf,
    below: float | None = None,
    integer: bool = False,
    above: bool = False,
    optional: bool = False,
) -> None:
    """Raise SpecError for no finite number (or integer) of `low` to `high`, or above `low` with `above`.

    With `optional`, None is valid; with `below`, only what is below that.
    """
    if optional and value is None:
        return
    value = as_python_scalar(value)
    kind = int if integer else (int, float)
    if isinstance(value, bool) or not isinstance(value, kind) or not math.isfinite(value):
        raise SpecError(f"{where} must be {'an integer' if integer else 'a number'}, got {value!r}")
    if value < low or (above and value == low):
        raise SpecError(f"{where} must be {'above' if above else 'at least'} {low:g}, got {value!r}")
    if value > high:
        raise SpecError(f"{where} must be at most {high:g}, got {value!r}")
    if below is not None and value >= below:
        raise SpecError(f"{where} must be below {below:g}, got {value!r}")


def check_loss_scale(where: str, value: object) -> None:
    """Raise SpecError for what is neither "dynamic" nor a number above 0."""
    if value != "dynamic":
        if isinstance(value, str):
            raise SpecError(f"{where} must be 'dynamic' or a number above 0, got {value!r}")
        check_number(where, value, low=0, above=True)


def as_json_value(where: str, value: object, *, tuples: bool = False) -> Any:
    """A value as JSON preserves it: numpy scalars become Python scalars, tuples lists.

    Args:
        where: the name of the value, for error messages.
        tuples: whether tuples stay tuples.

    Raises:
        SpecError: JSON would not give the same value back; the message names the key.
    """
    value = as_python_scalar(value)
    if isinstance(value, Mapping):
        odd = next((key for key in value if type(key) is not str), None)
        if odd is not None:
            raise SpecError(f"{where} must have str for keys, got {odd!r}")
        return {key: as_json_value(f"{where}[{key!r}]", item, tuples=tuples) for key, item in value.items()}
    if isinstance(value, list | tuple):
        items = [as_json_value(f"{where}[{i}]", item, tuples=tuples) for i, item in enumerate(value)]
        return tuple(items) if tuples and isinstance(value, tuple) else items
    if value is None or type(value) in (bool, int, str) or (type(value) is float and math.isfinite(value)):
        return value
    shown = " ".join(repr(value).split())
    raise SpecError(
        f"{where} must be a finite number, a str, a bool, None, or a list or dict of these, got "
        f"{shown if len(shown) <= 80 else shown[:77] + '...'} ({type(value).__name__})"
    )


def as_python_scalar(value: Any) -> Any:
    """A numpy scalar as a Python scalar, anything else unchanged. Does not import numpy."""
    return value.item() if type(value).__module__ == "numpy" and getattr(value, "ndim", None) == 0 else value
