"""What a stage *is*, as a value that two processes, and two versions of ray-ensemble, can compare.

A user's stage is described by its qualified name, its code and what is bound to it: defaults, closure, arguments,
the globals it reads, all methods of the classes it is of or uses. Installed packages other than the stage's own
(torch, numpy, the standard library) are taken to stay the same: of them the names are enough. Two descriptions
are equal only if both stages compute the same; what cannot be described surely (a lambda, a closure over
something mutable) has none, and needs an `id=` from the user before another process may trust that it is the
same.

What is ours, of the packages `pipelines` and `ensemble`, is described by the name that users import it by, a
version and the values bound to it, never by its code or the module that it lies in: these may be reworded and
moved. So **whoever changes what a stage or a source computes raises its version**, in the decorator `known_as` at
its class; each class that uses a function of ours whose result changes counts. Bound values go by the names of
their fields (or of the variables that a closure is over). A field that comes later gets the default that says
what was before: a value that is its class's default is left out, so that descriptions of before stay.

`SCHEME` is the form of all this. Fingerprints of two schemes cannot be compared; what is stored says its scheme.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
import functools
import hashlib
import json
import os
import re
import sys
import types
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

#: The form of descriptions. 1, which nothing says, described our own code as it describes users'.
SCHEME = 2
#: The packages whose classes and functions go by name and version.
OURS = frozenset(("ensemble", "pipelines"))

# What users import from besides the two packages themselves, whatever the modules behind are called.
_PUBLIC_MODULES = ("pipelines.sources", "pipelines.stages", "pipelines.weights", "ensemble.combine")
_NAME_ATTRIBUTE = "__fingerprint_name__"
_VERSIONS: dict[str, int] = {}  # public name -> version, of what has been given one
_Known = TypeVar("_Known", bound=Callable[..., Any])


class Unsure(Exception):
    """Raised inside this module where something cannot be described surely; says what."""


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
        setattr(known, _NAME_ATTRIBUTE, name)
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
    name = vars(ours).get(_NAME_ATTRIBUTE)
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


def refers_to_ours(description: Any) -> bool:
    """Whether something of ours is in a description."""
    if isinstance(description, dict):
        return any(map(refers_to_ours, description.values()))
    return isinstance(description, list) and (description[:1] == ["ours"] or any(map(refers_to_ours, description)))


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
    return "none" if _is_missing(field.default) else f"default {field.default!r}"


def _is_changed(bound: Any, field: dataclasses.Field[Any]) -> bool:
    default = field.default
    return type(bound) is not type(default) or bool(bound != default)


def digest(description: Any) -> str:
    """A short name for a description."""
    return hashlib.sha256(json.dumps(description, sort_keys=True).encode()).hexdigest()[:32]


def describe(value: Any) -> Any:
    """A JSON value that is equal for equal things.

    Raises:
        Unsure: there is none; the message names the part that is to blame.
    """
    return _describe(value, (), "")


def _describe(value: Any, path: tuple[int, ...], home: str) -> Any:
    """As `describe`; `path`: ids of what this is a part of, `home`: the package of what refers to it."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if id(value) in path:
        return ["again", path.index(id(value))]
    inside = (*path, id(value))
    if isinstance(value, float):
        return ["float", value.hex()]
    if isinstance(value, bytes):
        return ["bytes", hashlib.sha256(value).hexdigest()]
    if isinstance(value, tuple | list):
        return [type(value).__name__, *(_describe(v, inside, home) for v in value)]
    if isinstance(value, dict):
        items = [[_describe(k, inside, home), _describe(v, inside, home)] for k, v in value.items()]
        return ["dict", *sorted(items, key=json.dumps)]
    if isinstance(value, set | frozenset):
        return ["set", *sorted((_describe(v, inside, home) for v in value), key=json.dumps)]
    if (array := describe_array(value)) is not None:
        return array
    if isinstance(value, functools.partial):
        return ["partial", *(_describe(v, inside, home) for v in (value.func, value.args, value.keywords))]
    if isinstance(value, functools._lru_cache_wrapper):
        if is_ours(value):
            return describe_ours(value)
        return ["cached", _describe(value.__wrapped__, inside, home)]
    if isinstance(value, re.Pattern):
        return ["pattern", _describe(value.pattern, inside, home), value.flags]
    if isinstance(value, types.FunctionType):
        return _describe_function(value, inside)
    if isinstance(value, types.BuiltinFunctionType | types.ModuleType | np.ufunc):
        return ["named", getattr(value, "__module__", None), value.__name__]
    if isinstance(value, type):
        return (
            describe_ours(value) if is_ours(value) else _describe_class(value, inside, home or _get_package(value))
        )
    if dataclasses.is_dataclass(value):
        bound = {name: _describe(each, inside, home) for name, each in collect_bound_values(value).items()}
        return ["dataclass", _describe(type(value), inside, _get_package(type(value))), bound]
    raise Unsure(f"an object of {type(value).__module__}.{type(value).__qualname__}")


def describe_array(value: Any) -> Any:
    """A numpy array by its content, or a dtype; None for what is neither."""
    if isinstance(value, np.dtype):
        return ["dtype", str(value)]
    if isinstance(value, np.ndarray | np.generic) and not value.dtype.hasobject:
        array = np.ascontiguousarray(value)
        return ["array", str(array.dtype), list(array.shape), hashlib.sha256(array.tobytes()).hexdigest()]
    return None


def _describe_function(function: types.FunctionType, path: tuple[int, ...]) -> Any:
    ours = is_ours(function)
    if function.__name__ == "<lambda>" and not ours:
        raise Unsure("a lambda")
    home = _get_package(function)
    closure = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        bound = cell.cell_contents
        if isinstance(bound, list | dict | set):
            raise Unsure(f"{function.__qualname__}, a closure over the mutable {name!r}")
        closure[name] = _describe(bound, path, home)
    if ours:
        return [*describe_ours(function), closure] if closure else describe_ours(function)
    used = {}
    names = _collect_names(function.__code__)
    for name in sorted(names):
        if name in function.__globals__:
            bound = function.__globals__[name]
            if isinstance(bound, types.ModuleType) and is_ours(bound):
                used[name] = describe_module(bound, names)
                continue
            if isinstance(bound, list | dict | set):
                raise Unsure(f"{function.__qualname__}, which reads the mutable global {name!r}")
            used[name] = _describe(
                _find_script_name() if name == "__name__" and bound == "__main__" else bound, path, home
            )
    defaults = _describe([function.__defaults__, function.__kwdefaults__], path, home)
    # A script's functions live in __main__ for itself and under the script's name for others.
    return ["function", function.__qualname__, _describe_code(function.__code__), defaults, closure, used]


def _find_script_name() -> str:
    """The name under which others import the script that this process runs."""
    file = getattr(sys.modules["__main__"], "__file__", None)
    return "__main__" if file is None else os.path.splitext(os.path.basename(file))[0]


# fmt: off
#: What Python, and not its author, puts into a class.
MACHINERY = frozenset((
    "__module__", "__qualname__", "__doc__", "__dict__", "__weakref__", "__annotations__", "__annotate__",
    "__annotate_func__", "__annotations_cache__", "__repr__", "__slots__", "__slotnames__", "__match_args__",
    "__dataclass_fields__", "__dataclass_params__", "__abstractmethods__", "_abc_impl", "__classdictcell__",
    "__firstlineno__", "__static_attributes__", "__parameters__", "__orig_bases__", "__type_params__",
))
# fmt: on
#: What Python puts into a class for its fields; the last is a named tuple's, whose module depends on the version.
_NAMED_FIELD = type(vars(collections.namedtuple("_", "field"))["field"])
SLOTS = (types.MemberDescriptorType, types.GetSetDescriptorType, _NAMED_FIELD)


def _describe_class(cls: type, path: tuple[int, ...], home: str) -> Any:
    """A class with all that it defines, and its bases, up to those of other packages, which have their names."""
    if _is_foreign(cls, home):
        return ["class", cls.__module__, cls.__qualname__]
    own = _get_package(cls)
    defined: dict[str, Any] = {}
    for name, item in sorted(vars(cls).items()):
        parts = _split_member(item)
        if name in MACHINERY:
            continue
        if parts is not None:
            defined[name] = [type(item).__name__, *(_describe_method(part, path, own) for part in parts)]
        elif not issubclass(cls, enum.Enum) and not isinstance(item, SLOTS):
            if isinstance(item, list | dict | set) and name != "_field_defaults":
                raise Unsure(f"the class {cls.__qualname__} with the mutable {name!r}")
            defined[name] = _describe(item, path, own)
    if issubclass(cls, enum.Enum):
        defined["members"] = [[name, _describe(one.value, path, own)] for name, one in cls.__members__.items()]
    if dataclasses.is_dataclass(cls):
        inherited = {field.name for field in collect_inherited_fields(cls)}
        known = [field for field in dataclasses.fields(cls) if field.name not in inherited]
        fields = [[f.name, f.init, _describe_default(f.default, path, own)] for f in known]
        factories = [_describe_default(f.default_factory, path, own) for f in known]
        defined["fields"] = [fields, factories]
    return ["class", cls.__qualname__, defined, [_describe(base, path, own) for base in cls.__bases__]]


def _split_member(item: Any) -> list[Any] | None:
    """The functions that something in a class consists of; None for what is no method."""
    if isinstance(item, types.FunctionType):
        return [item]
    if isinstance(item, staticmethod | classmethod):
        return [item.__func__]
    if isinstance(item, property):
        return [item.fget, item.fset, item.fdel]
    return [item.func] if isinstance(item, functools.cached_property) else None


def _describe_method(part: Any, path: tuple[int, ...], home: str) -> Any:
    if not isinstance(part, types.FunctionType):
        return _describe(part, path, home)
    if part.__code__.co_qualname.startswith("__create_fn__"):  # by `dataclass`, from the fields
        return "generated"
    if not is_ours(part) and _is_foreign(part, home):
        return ["named", part.__module__, part.__qualname__]
    return _describe(part, path, home)


def _describe_default(value: Any, path: tuple[int, ...], home: str) -> Any:
    return "none" if _is_missing(value) else ["default", _describe(value, path, home)]


def _is_missing(default: Any) -> bool:
    return isinstance(default, dataclasses._MISSING_TYPE)  # unpickled, it is another one


def _get_package(named: Any) -> str:
    """The top-level package of a class or function."""
    return _get_top_level(named.__module__)


def _get_top_level(module: str | None) -> str:
    return str(module or "").partition(".")[0]


def _is_foreign(named: Any, home: str) -> bool:
    """Whether a class or function is from an installed package (or Python) other than `home`."""
    package = _get_package(named)
    if package in (home, "__main__"):
        return False
    if package in sys.stdlib_module_names:
        return True
    file = getattr(sys.modules.get(named.__module__), "__file__", None)
    return file is not None and not {"site-packages", "dist-packages"}.isdisjoint(Path(file).parts)


def _collect_names(code: types.CodeType) -> set[str]:
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= _collect_names(constant)
    return names


def _describe_code(code: types.CodeType) -> Any:
    constants = [
        _describe_code(c)
        if isinstance(c, types.CodeType)
        else repr(sorted(c, key=repr) if isinstance(c, frozenset) else c)
        for c in code.co_consts
    ]
    return [hashlib.sha256(code.co_code).hexdigest(), constants, list(code.co_names), list(code.co_varnames)]
