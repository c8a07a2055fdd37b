"""The value of an option of `spec(...)` that is given as text, by the option's annotation or its default."""

from __future__ import annotations

import enum
import types
import typing
from collections import abc
from pathlib import PurePath
from typing import Any

_FLAGS = {**dict.fromkeys(("true", "1", "yes", "on"), True), **dict.fromkeys(("false", "0", "no", "off"), False)}
#: Types and their names in error messages; those of a union are tried in this order, after all others.
_NAMES = {bool: "true or false", int: "an integer", float: "a number", str: "text"}
_SEQUENCES = (list, tuple, set, frozenset)


def read_option(text: str, hint: Any, default: Any) -> Any:
    """The value of a text.

    Args:
        text: as it was given.
        hint: the option's annotation; None: it has none, and its default has its type.
        default: its default; None has no type. A text is then a value where Python writes that value just so
            (`5`, `0.1`, `True`, `None`); anything else stays text.

    Raises:
        ValueError: it is no value of the type; the message says what is.
        TypeError: texts are not converted to that type.
    """
    if hint in (None, Any):
        if default is None:
            return None if text.lower() == "none" else _read_plain(text)
        if isinstance(default, list | tuple):
            return type(default)(read_option(part, None, next(iter(default), None)) for part in _split(text))
        hint = type(default)
    kinds = _list_kinds(hint)
    for kind in kinds:
        try:
            return _read(text, kind)
        except ValueError:
            continue
    raise ValueError(" or ".join(dict.fromkeys(map(_describe, kinds))))


def _split(text: str) -> list[str]:
    return [part.strip() for part in text.split(",")] if text else []


def _read_plain(text: str) -> Any:
    if text.lower() in ("true", "false"):
        return _FLAGS[text.lower()]
    for kind in (int, float):
        try:
            if str(kind(text)) == text:
                return kind(text)
        except ValueError:
            continue
    return text


def _list_kinds(hint: Any) -> list[Any]:
    """The types that an annotation allows, text last."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        return _list_kinds(arguments[0])
    if origin not in (typing.Union, types.UnionType):
        return [hint]
    kinds, order = [kind for part in arguments for kind in _list_kinds(part)], list(_NAMES)
    return sorted(kinds, key=lambda kind: order.index(kind) if kind in order else -1)


def _read(text: str, kind: Any) -> Any:
    """The value of a text as one type has it; raises ValueError where that has none."""
    origin, arguments = typing.get_origin(kind) or kind, typing.get_args(kind)
    origin = list if origin in (abc.Sequence, abc.Iterable, abc.Collection) else origin
    valued = _list_values(kind)
    if kind is bool:
        text = text.lower()
    if valued is not None:
        if text.lower() == "none" and None in valued.values():
            return None
        if text not in valued:
            raise ValueError(text)
        return valued[text]
    if origin in _SEQUENCES:
        parts = _split(text)
        if origin is tuple and arguments and arguments[-1] is not Ellipsis:
            if len(parts) != len(arguments):
                raise ValueError(text)
            return tuple(read_option(part, one, None) for part, one in zip(parts, arguments, strict=True))
        return origin(read_option(part, arguments[0] if arguments else None, None) for part in parts)
    if kind in _NAMES or (isinstance(kind, type) and issubclass(kind, PurePath)):
        return kind(text)
    raise TypeError(f"a text cannot become a {_describe(kind)}: declare text, and convert it in spec()")


def _list_values(kind: Any) -> dict[str, Any] | None:
    """The values of a type that has few, by their texts; None: it has many."""
    if kind is bool:
        return _FLAGS
    if kind in (None, type(None)):
        return {"None": None}
    if typing.get_origin(kind) is typing.Literal:
        return {str(value): value for value in typing.get_args(kind)}
    if isinstance(kind, enum.EnumMeta):
        members: dict[str, Any] = dict(kind.__members__)
        return {str(one.value): one for one in members.values()} | members
    return None


def _describe(kind: Any) -> str:
    if kind in _NAMES or kind is bool:
        return _NAMES[kind]
    if (valued := _list_values(kind)) is not None:
        return " or ".join(valued)
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is not None and arguments:
        inner = " or ".join(dict.fromkeys(_describe(part) for part in arguments if part is not Ellipsis))
        count = f"{len(arguments)} " if origin is tuple and arguments[-1] is not Ellipsis else ""
        return f"{count}values separated by commas, each {inner}"
    return str(getattr(kind, "__name__", kind))
