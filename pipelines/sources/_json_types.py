"""Types of JSON values: what all values of a field are as an Arrow type, and whether a value is of it.

Arrow's own inference takes `true` for 1.0 among numbers and texts for dates; here a value's *shape* decides: for a
scalar its Python type, for a list the set of its elements' shapes, for a dict each name with its value's shape.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np

from pipelines.errors import PipelineError
from pipelines.sources._columns import is_list, resolve_type

Shape = Any  # a type, a frozenset of shapes, or a tuple of (name, shape)
Shapes = Mapping[Shape, int]  # how many values have a shape

_NULL = type(None)
_NAMES = {_NULL: "null", bool: "bool", int: "int64", float: "float64", str: "text"}
_FITTING = {bool: "b", int: "iuf", float: "f"}  # kinds of dtypes that hold them


class Mismatch(Exception):
    """Values have no type in common, or one is not of its field's type; the message says how."""


def find_shape(value: Any) -> Shape:
    """The shape of a value of `json.loads`."""
    kind = type(value)
    if kind is list:
        kinds = frozenset(map(type, value))
        return kinds if not kinds & {list, dict} else frozenset(map(find_shape, value))
    if kind is dict:
        return tuple((name, find_shape(part)) for name, part in value.items())
    return kind


def merge(shapes: Shapes, path: str, dropped: list[str]) -> Any:
    """The Arrow type of values of these shapes.

    Args:
        shapes: of the values.
        path: of the field, for messages.
        dropped: receives what few dicts have, at any depth, and the type leaves out: all others would lack it.

    Raises:
        Mismatch: there is none.
    """
    import pyarrow

    lists = {shape: count for shape, count in shapes.items() if isinstance(shape, frozenset)}
    dicts = {shape: count for shape, count in shapes.items() if isinstance(shape, tuple)}
    scalars = {shape for shape in shapes if _is_type(shape)} - {_NULL}
    kinds = [*sorted(_NAMES[kind] for kind in scalars), *["a list"] * bool(lists), *["a dict"] * bool(dicts)]
    if len(kinds) > 1 and scalars != {int, float}:
        raise Mismatch(f"{path!r} is {kinds[0]} in some lines and {kinds[1]} in others")
    if lists:
        elements: Counter[Shape] = Counter()
        for shape, count in lists.items():
            elements.update(dict.fromkeys(shape, count))
        inner = merge(elements, f"{path}[]", dropped)
        return pyarrow.list_(pyarrow.float64() if pyarrow.types.is_null(inner) else inner)
    if dicts:
        parts: dict[str, Counter[Shape]] = {}
        for named, count in dicts.items():
            for name, shape in named:
                parts.setdefault(name, Counter())[shape] += count
        total = sum(dicts.values())
        for name in find_rare({name: sum(part.values()) for name, part in parts.items()}, total):
            dropped.append(f"{path}.{name} (in {sum(parts.pop(name).values())} of {total})")
        return pyarrow.struct([(name, merge(part, f"{path}.{name}", dropped)) for name, part in parts.items()])
    scalar = float if scalars == {int, float} else next(iter(scalars), _NULL)
    arrow_types = {bool: pyarrow.bool_(), int: pyarrow.int64(), float: pyarrow.float64(), str: pyarrow.string()}
    return arrow_types.get(scalar, pyarrow.null())


def find_rare(counts: Mapping[str, int], total: int) -> list[str]:
    """The names that less than half of all values have, where others have more: of misspelt keys, for instance."""
    rare = [name for name, count in counts.items() if 2 * count < total]
    return rare if len(rare) < len(counts) else []


def check_shape(shape: Shape, kind: Any) -> str:
    """Says why values of a shape are not of an Arrow type: "" if they are."""
    from pyarrow import types

    if shape is _NULL:
        return "is null"
    if types.is_string(kind):
        return "" if shape is str else f"is {_describe(shape)}, not a text"
    if types.is_struct(kind) and isinstance(shape, tuple):
        parts = dict(shape)
        for field in kind:
            if field.name not in parts:
                return f"has no {field.name!r}"
            if problem := check_shape(parts[field.name], field.type):
                return f"has {field.name!r}, which {problem}"
        return ""
    if is_list(kind) and isinstance(shape, frozenset):
        problems = (check_shape(element, kind.value_type) for element in shape)
        return next((f"has an element that {problem}" for problem in problems if problem), "")
    if types.is_struct(kind) or is_list(kind) or not _is_type(shape) or shape not in _FITTING:
        return f"is {_describe(shape)}, not {describe(kind)}"
    fits = np.dtype(kind.to_pandas_dtype()).kind in _FITTING[shape]
    return "" if fits else f"is {_describe(shape)}, not {describe(kind)}"


def declare(name: str, kind: Any) -> str:
    """The type that a user declares: "any", "str", or the name of a dtype of numbers.

    Raises:
        PipelineError: there is no such type.
    """
    resolved = "any" if kind == "any" else resolve_type(kind)
    if resolved is None:
        raise PipelineError(
            f"jsonl(): the type of field {name!r} must be 'str', 'bool', 'any' or the name of a dtype of "
            f"numbers ('int64', 'float32' ...), got {kind!r}"
        )
    return resolved


def declare_numbers(shapes: Shapes, dtype: str) -> Any:
    """The Arrow type of numbers of a dtype, in lists as deep as those of most values."""
    import pyarrow

    depths = Counter[int]()
    for shape, count in shapes.items():
        depth = 0
        while isinstance(shape, frozenset):
            shape, depth = next(iter(shape), None), depth + 1
        if shape in _FITTING:
            depths[depth] += count
    kind = pyarrow.from_numpy_dtype(np.dtype(dtype))
    for _ in range(max(depths, key=lambda depth: (depths[depth], -depth), default=0)):
        kind = pyarrow.list_(kind)
    return kind


def describe(kind: Any) -> str:
    """An Arrow type in the words of messages and identities."""
    from pyarrow import types

    if types.is_struct(kind):
        return "{" + ", ".join(f"{field.name}: {describe(field.type)}" for field in kind) + "}"
    if types.is_null(kind):
        return "none"
    if types.is_string(kind):
        return "text"
    if not is_list(kind):
        return str(np.dtype(kind.to_pandas_dtype()))
    inner, depth = find_leaf(kind), str(kind).count("list<")
    is_array = not (types.is_struct(inner) or types.is_string(inner) or types.is_null(inner))
    return f"{describe(inner)}[{', '.join('?' * depth)}]" if is_array else f"list of {describe(kind.value_type)}"


def find_leaf(kind: Any) -> Any:
    """The type of what is in lists of any depth."""
    while is_list(kind):
        kind = kind.value_type
    return kind


def read_schema(serialized: str) -> dict[str, Any]:
    """Field -> Arrow type, of a schema in hexadecimal digits."""
    import pyarrow

    schema = pyarrow.ipc.read_schema(pyarrow.py_buffer(bytes.fromhex(serialized)))
    return {field.name: field.type for field in schema}


def _describe(shape: Shape) -> str:
    if _is_type(shape):
        return str(_NAMES.get(shape, shape.__name__))
    return "a list" if isinstance(shape, frozenset) else "a dict"


def _is_type(shape: Shape) -> bool:
    return isinstance(shape, type)
