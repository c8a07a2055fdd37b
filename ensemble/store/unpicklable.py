"""Finds what in a declaration cannot be pickled: which variable of which function, or which attribute."""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

_DEEPEST = 30  # objects inside each other


def describe_unpicklable(declaration: Any, dump: Callable[[Any], object]) -> str | None:
    """Where the object is that cannot be pickled, such as `f (spec.py, line 6), in train=, holds lock, a lock`.

    Args:
        declaration: whose pickling failed.
        dump: raises for what cannot be pickled.

    Returns:
        None where it is not in a function, and not in an attribute.
    """
    option, holder, name, found = "", "", "", declaration
    seen: set[int] = set()
    for _ in range(_DEEPEST):
        seen.add(id(found))
        inner = next(
            ((n, each) for n, each in _list_parts(found) if id(each) not in seen and _fails(dump, each)), None
        )
        if inner is None:
            break
        if found is declaration:
            option = inner[0]
        elif (described := _describe(found)) is not None:
            holder, name = described, inner[0]
        found = inner[1]
    if not name:
        return None
    kind = type(found).__name__
    article = "an" if kind[:1].lower() in "aeiou" else "a"
    return f"{holder}, in {option}=, holds {name!r}, {article} {kind}"


def _fails(dump: Callable[[Any], object], value: Any) -> bool:
    try:
        dump(value)
    except Exception:  # objects raise whatever they like from __reduce__
        return True
    return False


def _list_parts(value: Any) -> Iterator[tuple[str, Any]]:
    """The objects that an object holds, with the names of variables, attributes or keys."""
    if isinstance(value, types.MethodType):
        yield from (("self", value.__self__), ("function", value.__func__))
    elif isinstance(value, types.FunctionType):
        code = value.__code__
        for name, cell in zip(code.co_freevars, value.__closure__ or (), strict=True):
            with contextlib.suppress(ValueError):  # nothing was assigned to it
                yield name, cell.cell_contents
        yield from ((name, value.__globals__[name]) for name in code.co_names if name in value.__globals__)
        yield from (("a default", each) for each in value.__defaults__ or ())
        yield from (value.__kwdefaults__ or {}).items()
        yield from vars(value).items()
    elif isinstance(value, functools.partial):
        yield from (
            ("function", value.func),
            *(("an argument", each) for each in value.args),
            *value.keywords.items(),
        )
    elif isinstance(value, Mapping):
        yield from ((str(key), each) for key, each in value.items())
    elif isinstance(value, list | tuple | set | frozenset):
        yield from (("an element", each) for each in value)
    elif not isinstance(value, type | types.ModuleType):
        yield from list(getattr(value, "__dict__", {}).items())


def _describe(value: Any) -> str | None:
    """A function with its place, or the class of an object that is not a container; None for a container."""
    if isinstance(value, types.FunctionType):
        code = value.__code__
        return f"the function {value.__qualname__} ({Path(code.co_filename).name}, line {code.co_firstlineno})"
    if isinstance(value, Mapping | list | tuple | set | frozenset | functools.partial | types.MethodType):
        return None
    return f"an object of {type(value).__qualname__}"
