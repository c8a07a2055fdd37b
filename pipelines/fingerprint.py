"""What a stage *is*, as a value that two processes can compare.

A stage is described by its qualified name, its code and what is bound to it: defaults, closure, arguments,
the globals it reads. Two descriptions are equal only if both stages compute the same; what cannot be
described surely (a lambda, a closure over something mutable) has none, and needs an `id=` from the user
before another process may trust that it is the same.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import types
from collections.abc import Callable
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
    return _describe(value, ())


def _describe(value: Any, path: tuple[int, ...]) -> Any:
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
        return [type(value).__name__, *(_describe(v, inside) for v in value)]
    if isinstance(value, dict):
        items = [[_describe(k, inside), _describe(v, inside)] for k, v in value.items()]
        return ["dict", *sorted(items, key=json.dumps)]
    if isinstance(value, set | frozenset):
        return ["set", *sorted((_describe(v, inside) for v in value), key=json.dumps)]
    if isinstance(value, np.ndarray | np.generic) and not value.dtype.hasobject:
        array = np.ascontiguousarray(value)
        return ["array", str(array.dtype), list(array.shape), hashlib.sha256(array.tobytes()).hexdigest()]
    if isinstance(value, np.dtype):
        return ["dtype", str(value)]
    if isinstance(value, functools.partial):
        return ["partial", *(_describe(v, inside) for v in (value.func, value.args, value.keywords))]
    if isinstance(value, types.FunctionType):
        return _function(value, inside)
    if isinstance(value, types.BuiltinFunctionType | types.ModuleType | np.ufunc):
        return ["named", getattr(value, "__module__", None), value.__name__]
    if isinstance(value, type):
        return ["class", value.__module__, value.__qualname__]
    if dataclasses.is_dataclass(value):
        bound = {f.name: _describe(getattr(value, f.name), inside) for f in dataclasses.fields(value)}
        call = type(value).__call__
        code = _code(call.__code__) if isinstance(call, types.FunctionType) else None
        return ["dataclass", type(value).__module__, type(value).__qualname__, code, bound]
    raise Unsure(f"an object of {type(value).__module__}.{type(value).__qualname__}")


def _function(function: types.FunctionType, path: tuple[int, ...]) -> Any:
    if function.__name__ == "<lambda>":
        raise Unsure("a lambda")
    closure = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        bound = cell.cell_contents
        if isinstance(bound, list | dict | set):
            raise Unsure(f"{function.__qualname__}, a closure over the mutable {name!r}")
        closure[name] = _describe(bound, path)
    used = {}
    for name in sorted(_names(function.__code__)):
        if name in function.__globals__:
            bound = function.__globals__[name]
            if isinstance(bound, list | dict | set):
                raise Unsure(f"{function.__qualname__}, which reads the mutable global {name!r}")
            used[name] = _describe(bound, path)
    defaults = _describe([function.__defaults__, function.__kwdefaults__], path)
    # A script's functions live in __main__ for itself and under the script's name for others.
    return ["function", function.__qualname__, _code(function.__code__), defaults, closure, used]


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
