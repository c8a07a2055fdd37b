"""Items of other libraries' datasets as records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pipelines.errors import PipelineError
from pipelines.sources._values import copy_value, get_field_names

#: What the two values of an item are called that has no names.
NAMES = ("image", "label")


class UnnamedValues(PipelineError):
    """An item has values without names, and `names=` has another number."""


def check_names(kind: str, names: Sequence[str] | None) -> tuple[str, ...] | None:
    """The names as a tuple.

    Raises:
        PipelineError: they are not distinct texts.
    """
    if names is None:
        return None
    listed = (names,) if isinstance(names, str) else tuple(names)
    if not listed or len(set(listed)) < len(listed) or not all(isinstance(name, str) for name in listed):
        raise PipelineError(f"{kind}(): names= must name each value of an item once, got {names!r}")
    return listed


def make_record(item: Any, names: tuple[str, ...] | None) -> dict[str, Any]:
    """Returns an item as a record.

    Args:
        item: a mapping, an object of a dataclass or a named tuple, which have names; a tuple or list of values, or
            one value.
        names: of the values. None: the item's own, or `NAMES` for two values.

    Raises:
        UnnamedValues: the item has another number of values; says what to give.
    """
    if isinstance(item, Mapping):
        return {name: copy_value(value) for name, value in item.items()}
    own = get_field_names(item)
    if own is not None:
        values: Sequence[Any] = [getattr(item, name) for name in own]
        called = own if names is None else names
    else:
        values = item if isinstance(item, tuple | list) else (item,)
        called = NAMES if names is None else names
    if len(values) == len(called):
        return {name: copy_value(value) for name, value in zip(called, values, strict=True)}
    example = ", ".join(f"'field{i}'" for i in range(1, len(values) + 1))
    has = ", ".join(called) + (" (the default)" if names is None else "")
    count = f"{len(values)} values" if len(values) != 1 else f"1 value ({type(values[0]).__name__})"
    raise UnnamedValues(
        f"an item of {count}, but names= has {len(called)}: {has}; say what they are called, as in "
        f"names=({example}{',' if len(values) == 1 else ''})"
    )
