"""What a stage *is*, as a value that two processes can compare.

A stage is described by its qualified name, its code and what is bound to it: defaults, closure, arguments,
the globals it reads, all methods of the classes it is of or uses. Installed packages other than the stage's own
(torch, numpy, the standard library) are taken to stay the same: of them the names are enough. Two descriptions
are equal only if both stages compute the same; what cannot be described surely (a lambda, a closure over
something mutable) has none, and needs an `id=` from the user before another process may trust that it is the
same.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import hashlib
import json
import re
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np


class Unsure(Exception):
    """Raised inside this module where something cannot be described surely; says what."""


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
    if isinstance(value, np.ndarray | np.generic) and not value.dtype.hasobject:
        array = np.ascontiguousarray(value)
        return ["array", str(array.dtype), list(array.shape), hashlib.sha256(array.tobytes()).hexdigest()]
    if isinstance(value, np.dtype):
        return ["dtype", str(value)]
    if isinstance(value, functools.partial):
        return ["partial", *(_describe(v, inside, home) for v in (value.func, value.args, value.keywords))]
    if isinstance(value, functools._lru_cache_wrapper):
        return ["cached", _describe(value.__wrapped__, inside, home)]
    if isinstance(value, re.Pattern):
        return ["pattern", _describe(value.pattern, inside, home), value.flags]
    if isinstance(value, types.FunctionType):
        return _function(value, inside)
    if isinstance(value, types.BuiltinFunctionType | types.ModuleType | np.ufunc):
        return ["named", getattr(value, "__module__", None), value.__name__]
    if isinstance(value, type):
        return _class(value, inside, home or _package(value))
    if dataclasses.is_dataclass(value):
        bound = {f.name: _describe(getattr(value, f.name), inside, home) for f in dataclasses.fields(value)}
        return ["dataclass", _describe(type(value), inside, _package(type(value))), bound]
    raise Unsure(f"an object of {type(value).__module__}.{type(value).__qualname__}")


def _function(function: types.FunctionType, path: tuple[int, ...]) -> Any:
    if function.__name__ == "<lambda>":
        raise Unsure("a lambda")
    home = _package(function)
    closure = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        bound = cell.cell_contents
        if isinstance(bound, list | dict | set):
            raise Unsure(f"{function.__qualname__}, a closure over the mutable {name!r}")
        closure[name] = _describe(bound, path, home)
    used = {}
    for name in sorted(_names(function.__code__)):
        if name in function.__globals__:
            bound = function.__globals__[name]
            if isinstance(bound, list | dict | set):
                raise Unsure(f"{function.__qualname__}, which reads the mutable global {name!r}")
            used[name] = _describe(bound, path, home)
    defaults = _describe([function.__defaults__, function.__kwdefaults__], path, home)
    # A script's functions live in __main__ for itself and under the script's name for others.
    return ["function", function.__qualname__, _code(function.__code__), defaults, closure, used]


# fmt: off
#: What Python, and not its author, puts into a class.
MACHINERY = frozenset((
    "__module__", "__qualname__", "__doc__", "__dict__", "__weakref__", "__annotations__", "__annotate__",
    "__annotate_func__", "__annotations_cache__", "__repr__", "__slots__", "__slotnames__", "__match_args__",
    "__dataclass_fields__", "__dataclass_params__", "__abstractmethods__", "_abc_impl", "__classdictcell__",
    "__firstlineno__", "__static_attributes__", "__parameters__", "__orig_bases__", "__type_params__",
))
# fmt: on


def _class(cls: type, path: tuple[int, ...], home: str) -> Any:
    """A class with all that it defines, and its bases, up to those of other packages, which have their names."""
    if _foreign(cls, home):
        return ["class", cls.__module__, cls.__qualname__]
    own = _package(cls)
    defined: dict[str, Any] = {}
    for name, item in sorted(vars(cls).items()):
        parts = _parts_of(item)
        if name in MACHINERY:
            continue
        if parts is not None:
            defined[name] = [type(item).__name__, *(_method(part, path, own) for part in parts)]
        elif not issubclass(cls, enum.Enum) and not _is_slot(item):
            if isinstance(item, list | dict | set) and name != "_field_defaults":
                raise Unsure(f"the class {cls.__qualname__} with the mutable {name!r}")
            defined[name] = _describe(item, path, own)
    if issubclass(cls, enum.Enum):
        defined["members"] = [[name, _describe(one.value, path, own)] for name, one in cls.__members__.items()]
    if dataclasses.is_dataclass(cls):
        fields = [[f.name, f.init, _default(f.default, path, own)] for f in dataclasses.fields(cls)]
        factories = [_default(f.default_factory, path, own) for f in dataclasses.fields(cls)]
        defined["fields"] = [fields, factories]
    return ["class", cls.__qualname__, defined, [_describe(base, path, own) for base in cls.__bases__]]


def _parts_of(item: Any) -> list[Any] | None:
    """The functions that something in a class consists of; None for what is no method."""
    if isinstance(item, types.FunctionType):
        return [item]
    if isinstance(item, staticmethod | classmethod):
        return [item.__func__]
    if isinstance(item, property):
        return [item.fget, item.fset, item.fdel]
    return [item.func] if isinstance(item, functools.cached_property) else None


def _method(part: Any, path: tuple[int, ...], home: str) -> Any:
    if not isinstance(part, types.FunctionType):
        return _describe(part, path, home)
    if part.__code__.co_qualname.startswith("__create_fn__"):  # by `dataclass`, from the fields
        return "generated"
    if _foreign(part, home):
        return ["named", part.__module__, part.__qualname__]
    return _describe(part, path, home)


def _is_slot(item: Any) -> bool:
    made = types.MemberDescriptorType | types.GetSetDescriptorType
    return isinstance(item, made) or type(item).__module__ == "_collections"  # the last: of a named tuple


def _default(value: Any, path: tuple[int, ...], home: str) -> Any:
    missing = isinstance(value, dataclasses._MISSING_TYPE)  # unpickled, it is another one
    return "none" if missing else ["default", _describe(value, path, home)]


def _package(named: Any) -> str:
    """The top-level package of a class or function."""
    return str(named.__module__ or "").partition(".")[0]


def _foreign(named: Any, home: str) -> bool:
    """Whether a class or function is from an installed package (or Python) other than `home`."""
    package = _package(named)
    if package in (home, "__main__"):
        return False
    if package in sys.stdlib_module_names:
        return True
    file = getattr(sys.modules.get(named.__module__), "__file__", None)
    return file is not None and not {"site-packages", "dist-packages"}.isdisjoint(Path(file).parts)


def _names(code: types.CodeType) -> set[str]:
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= _names(constant)
    return names


def _code(code: types.CodeType) -> Any:
    constants = [
        _code(c) if isinstance(c, types.CodeType) else repr(sorted(c, key=repr) if isinstance(c, frozenset) else c)
        for c in code.co_consts
    ]
    return [hashlib.sha256(code.co_code).hexdigest(), constants, list(code.co_names), list(code.co_varnames)]


def takes_generator(function: Callable[..., Any]) -> bool:
    """Whether a stage is `f(sample, rng)` rather than `f(sample)`."""
    import inspect

    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return False
    positional = [
        p
        for p in parameters
        if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) and (p.default is p.empty or p.name == "rng")
    ]
    return len(positional) >= 2
