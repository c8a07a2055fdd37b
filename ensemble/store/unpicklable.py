"""Finds what in a declaration cannot be pickled: which variable of which function, or which attribute."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

_DEEPEST = 30  # objects inside each other
_CONTAINERS = (Mapping, list, tuple, set, frozenset, functools.partial, types.MethodType)


def describe_unpicklable(declaration: Any, dump: Callable[[Any], object]) -> str | None:
    """Where the object is that cannot be pickled, such as `f (spec.py, line 6), in train=, holds lock, a lock`.

    Args:
        declaration: whose pickling failed.
        dump: raises for what cannot be pickled.

    Returns:
        None where it is not in a function, and not in an attribute.
    """

    def fails(value: Any) -> bool:
        try:
            dump(value)
        except Exception:  # objects raise whatever they like from __reduce__
            return True
        return False

    option, holder, name, culprit = "", "", "", declaration
    seen: set[int] = set()
    for _ in range(_DEEPEST):
        seen.add(id(culprit))
        parts = _list_parts(culprit).items()
        part_name = next((n for n, part in parts if id(part) not in seen and fails(part)), None)
        if part_name is None:
            break
        if culprit is declaration:
            option = part_name
        elif isinstance(culprit, types.FunctionType):
            code = culprit.__code__
            holder = (
                f"the function {culprit.__qualname__} ({Path(code.co_filename).name}, line {code.co_firstlineno})"
            )
            name = part_name
        elif not isinstance(culprit, _CONTAINERS):
            holder, name = f"an object of {type(culprit).__qualname__}", part_name
        culprit = _list_parts(culprit)[part_name]
    if not name:
        return None
    kind = type(culprit).__name__
    return f"{holder}, in {option}=, holds {name!r}, a{'n' * (kind[:1].lower() in 'aeiou')} {kind}"


def _list_parts(value: Any) -> Mapping[str, Any]:
    """The objects that an object holds, by the names of variables, attributes or keys."""
    if isinstance(value, types.MethodType):
        return {"self": value.__self__, "function": value.__func__}
    if isinstance(value, types.FunctionType):
        try:
            variables = inspect.getclosurevars(value)
        except ValueError:  # one has no value yet
            return {}
        named = {f"default {number}": default for number, default in enumerate(value.__defaults__ or ())}
        return {**variables.nonlocals, **variables.globals, **named, **(value.__kwdefaults__ or {}), **vars(value)}
    if isinstance(value, functools.partial):
        return {"function": value.func, **_list_parts(list(value.args)), **value.keywords}
    if isinstance(value, Mapping):
        return {str(key): item for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return {f"element {number}": item for number, item in enumerate(value)}
    return {} if isinstance(value, type | types.ModuleType) else dict(getattr(value, "__dict__", {}))
