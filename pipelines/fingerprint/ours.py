"""How what is ours goes into fingerprints: by public name and version, never by its code.

What is ours, of the packages `pipelines` and `ensemble`, is described by the name that users import it by, a
version and the values bound to it, never by its code or the module that it lies in: these may be reworded and
moved. So **whoever changes what a stage or a source computes raises its version**, in the decorator `known_as` at
its class; each class that uses a function of ours whose result changes counts. Bound values go by the names of
their fields (or of the variables that a closure is over). A field that comes later gets the default that says
what was before: a value that is its class's default is left out, so that descriptions of before stay.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable, Collection, Iterator
from typing import Any, TypeVar

#: The packages whose classes and functions go by name and version.
OURS = frozenset(("ensemble", "pipelines"))

# What users import from besides the two packages themselves, whatever the modules behind are called.
_PUBLIC_MODULES = ("pipelines.sources", "pipelines.stages", "pipelines.weights", "ensemble.combine")
NAME_ATTRIBUTE = "__fingerprint_name__"
_VERSIONS: dict[str, int] = {}  # public name -> version, of what has been given one
_Known = TypeVar("_Known", bound=Callable[..., Any])


def known_as(name: str, version: int = 1) -> Callable[[_Known], _Known]:
    """Decorates a class or function of ours: what it is called in descriptions, whatever becomes of its code.

    Args:
        name: by which users import it, such as `"pipelines.stages.resize"`; a class that only such a function
            makes has its name. It stays for good.
        version: raise it when what is computed changes: data prepared before are then other data.

    Raises:
        ValueError: the name has another version already.
    """

    def mark(known: _Known) -> _Known:
        if _VERSIONS.setdefault(name, version) != version:
            raise ValueError(f"{name} is of version {_VERSIONS[name]}, and of {version} in {known.__module__}")
        setattr(known, NAME_ATTRIBUTE, name)
        return known

    return mark


def is_ours(named: Any) -> bool:
    """Whether a class, function or module was written in one of our packages, and not by a user."""
    if isinstance(named, types.ModuleType):
        return _get_top_level(named.__name__) in OURS
    if isinstance(named, types.FunctionType):  # `functools.wraps` gives ours the user's `__module__`
        return _get_top_level(named.__globals__.get("__name__")) in OURS
    return _get_top_level(getattr(named, "__module__", None)) in OURS


def describe_ours(ours: Any) -> list[Any]:
    """A class or function of ours, by public name and version.

    One without a name of its own (`known_as`) has that under which its package, or the part of it that users
    import from, would export it: moving it within that changes nothing. A function that another one makes goes
    by its maker.
    """
    name = vars(ours).get(NAME_ATTRIBUTE)
    if name is None:
        code = getattr(ours, "__code__", None)
        module = ours.__globals__["__name__"] if code is not None else ours.__module__
        qualname = (ours.__qualname__ if code is None else code.co_qualname).partition(".<locals>")[0]
        face = next(
            (face for face in _PUBLIC_MODULES if f"{module}.".startswith(f"{face}.")), _get_top_level(module)
        )
        name = f"{face}.{qualname}"
    return ["ours", name, _VERSIONS.get(name, 1)]


def describe_module(module: types.ModuleType, names: Collection[str]) -> list[Any]:
    """A module of ours, with what of it is not of version 1: so a name that comes later changes nothing.

    Args:
        names: attributes that may be used of it, or of the modules in it.
    """
    return ["ours", module.__name__, sorted(_find_raised_versions(module, frozenset(names), set()))]


def _find_raised_versions(module: types.ModuleType, names: frozenset[str], seen: set[str]) -> Iterator[list[Any]]:
    seen.add(module.__name__)
    for name in names & {*vars(module), *getattr(module, "__all__", ())}:
        bound = getattr(module, name)
        if isinstance(bound, types.ModuleType):
            if is_ours(bound) and bound.__name__ not in seen:
                yield from _find_raised_versions(bound, names, seen)
        elif isinstance(bound, types.FunctionType | type) and is_ours(bound):
            _, *known = describe_ours(bound)
            if known[1] != 1:
                yield known


def collect_bound_values(value: Any) -> dict[str, Any]:
    """The fields of a dataclass's instance, without those of a class of ours that have their default."""
    inherited = {field.name: field for field in collect_inherited_fields(type(value))}
    values = {field.name: getattr(value, field.name, None) for field in dataclasses.fields(value)}
    return {
        name: bound
        for name, bound in values.items()
        if name not in inherited or _is_changed(bound, inherited[name])
    }


def collect_inherited_fields(cls: type) -> list[dataclasses.Field[Any]]:
    """Fields of a dataclass that are as a class of ours defines them."""
    ours = next((base for base in cls.__mro__ if is_ours(base) and dataclasses.is_dataclass(base)), None)
    known = {} if ours is None else {field.name: field for field in dataclasses.fields(ours)}
    return [field for field in dataclasses.fields(cls) if _is_same_field(field, known.get(field.name))]


def _is_same_field(field: dataclasses.Field[Any], other: dataclasses.Field[Any] | None) -> bool:
    # Unpickled with a user's class they are other objects.
    return other is not None and field.init == other.init and _format_default(field) == _format_default(other)


def _format_default(field: dataclasses.Field[Any]) -> str:
    return "none" if is_missing(field.default) else f"default {field.default!r}"


def _is_changed(bound: Any, field: dataclasses.Field[Any]) -> bool:
    default = field.default
    return type(bound) is not type(default) or bool(bound != default)


def _get_top_level(module: str | None) -> str:
    return str(module or "").partition(".")[0]


def is_missing(default: Any) -> bool:
    """Whether a dataclass's field has no default; unpickled, the mark for that is another object."""
    return isinstance(default, dataclasses._MISSING_TYPE)
