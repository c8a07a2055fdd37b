"""What is ours goes into fingerprints by public name, version and bound values, never by its code.

So its code may be reworded and moved, and **whoever changes what a stage or source computes raises its version**,
in the decorator `known_as` at its class. A value that is its field's default is left out: a field that comes later
gets the default that says what was before.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable
from typing import Any, TypeVar

#: The packages whose classes and functions go by name and version.
OURS = frozenset(("ensemble", "pipelines"))
NAME_ATTRIBUTE = "__fingerprint_name__"
# What users import from besides the two packages themselves, whatever the modules behind are called.
_PUBLIC_MODULES = ("pipelines.sources", "pipelines.stages", "pipelines.weights", "ensemble.combine")
_versions: dict[str, int] = {}  # public name -> version, of what has been given one
_Known = TypeVar("_Known", bound=Callable[..., Any])


def known_as(name: str, version: int = 1) -> Callable[[_Known], _Known]:
    """Decorate a class or function of ours: what it is called in descriptions, whatever becomes of its code.

    Args:
        name: by which users import it, such as `"pipelines.stages.resize"`; a class that only such a function
            makes has its name. It stays for good.
        version: raise it when what is computed changes: data prepared before are then other data.

    Raises:
        ValueError: the name has another version already.
    """

    def mark(known: _Known) -> _Known:
        if _versions.setdefault(name, version) != version:
            raise ValueError(f"{name} is of version {_versions[name]}, and of {version} in {known.__module__}")
        setattr(known, NAME_ATTRIBUTE, name)
        return known

    return mark


def is_ours(named: Any) -> bool:
    """Whether a class, function or module was written in one of our packages, and not by a user."""
    if isinstance(named, types.ModuleType):
        module: Any = named.__name__
    elif isinstance(named, types.FunctionType):  # `functools.wraps` gives ours the user's `__module__`
        module = named.__globals__.get("__name__")
    else:
        module = getattr(named, "__module__", None)
    return str(module).partition(".")[0] in OURS


def describe_ours(ours: Any) -> list[Any]:
    """A class or function of ours, by public name and version.

    One without a name of its own (`known_as`) has that under which the part of its package that users import from
    would export it. A function that another one makes goes by its maker.
    """
    name = vars(ours).get(NAME_ATTRIBUTE)
    if name is None:
        code = getattr(ours, "__code__", None)
        module = ours.__module__ if code is None else ours.__globals__["__name__"]
        qualname = ours.__qualname__ if code is None else code.co_qualname
        faces = (face for face in _PUBLIC_MODULES if f"{module}.".startswith(f"{face}."))
        name = f"{next(faces, module.partition('.')[0])}.{qualname.partition('.<locals>')[0]}"
    return ["ours", name, _versions.get(name, 1)]


def collect_bound_values(value: Any) -> dict[str, Any]:
    """The fields of a dataclass's instance, without those of a class of ours that have their default."""
    inherited = {field.name: field.default for field in collect_inherited_fields(type(value))}
    bound = {field.name: getattr(value, field.name, None) for field in dataclasses.fields(value)}
    return {
        name: held
        for name, held in bound.items()
        if name not in inherited or type(held) is not type(inherited[name]) or bool(held != inherited[name])
    }


def collect_inherited_fields(cls: type) -> list[dataclasses.Field[Any]]:
    """Fields of a dataclass that are as a class of ours defines them."""
    ours = next((base for base in cls.__mro__ if is_ours(base) and dataclasses.is_dataclass(base)), None)
    formats = {} if ours is None else {field.name: _format_field(field) for field in dataclasses.fields(ours)}
    return [field for field in dataclasses.fields(cls) if formats.get(field.name) == _format_field(field)]


def _format_field(field: dataclasses.Field[Any]) -> list[Any]:
    # Unpickled with a user's class they are other objects.
    return [field.init, "none" if is_missing(field.default) else f"default {field.default!r}"]


def is_missing(default: Any) -> bool:
    """Whether a dataclass's field has no default; unpickled, the mark for that is another object."""
    return isinstance(default, dataclasses._MISSING_TYPE)
