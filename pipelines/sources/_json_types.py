"""Types of JSON values: what all values of a field are, and one value as that type."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from pipelines.errors import PipelineError
from pipelines.sources._columns import make_number, resolve_type

_NUMBERS = {bool: "bool", int: "int64", float: "float64"}
_FITTING = {"bool": "b", "int64": "iuf", "float64": "f"}  # kinds of dtypes that hold them


_EXACT = 2**53  # a float64 holds all integers up to it
_LOSSY = "integers of which a float64 loses digits, beside other numbers"


class Mismatch(Exception):
    """A value is not of its field's type; the message says how."""


@dataclass(frozen=True)
class JsonType:
    """The type of a field's values.

    Attributes:
        kind: "none" (nothing is known), "number", "text", "array" (of numbers), "list" (of other things), "dict",
            "any" (as it is), or "dtype" (declared: a number, or an array of any depth).
        dtype: of numbers and arrays, numpy's name.
        depth: of arrays, the number of axes; 0 if every list so far was empty.
        parts: of a dict, the types of its values; of a list, that of its elements under the name "".
        is_exact: whether a float64 holds all numbers.
        seen: of a dict, how many values were seen, and of them those with each name.
    """

    kind: str
    dtype: str = ""
    depth: int = 0
    parts: dict[str, JsonType] = field(default_factory=dict)
    is_exact: bool = True
    seen: tuple[int, dict[str, int]] = field(default=(0, {}), compare=False)

    @classmethod
    def declared(cls, name: str, kind: Any) -> JsonType:
        """The type that a user declares.

        Raises:
            PipelineError: there is no such type.
        """
        if kind == "any":
            return cls("any")
        dtype = resolve_type(kind)
        if dtype == "str":
            return cls("text")
        if dtype is None:
            raise PipelineError(
                f"jsonl(): the type of field {name!r} must be 'str', 'bool', 'any' or the name of a dtype of "
                f"numbers ('int64', 'float32' ...), got {kind!r}"
            )
        return cls("dtype", dtype)

    def __str__(self) -> str:
        if self.kind == "array":
            return f"{self.dtype}[{', '.join('?' * self.depth)}]"
        if self.kind == "list":
            return f"list of {self.parts['']}"
        if self.kind == "dict":
            return "{" + ", ".join(f"{name}: {part}" for name, part in self.parts.items()) + "}"
        return self.dtype or self.kind

    def is_surely(self, value: Any) -> bool:
        """Whether a single number, a text or a list of numbers is of this type, for the sake of speed."""
        if self.kind == "number":
            return _NUMBERS.get(type(value)) == self.dtype and (type(value) is not int or abs(value) <= _EXACT)
        if self.kind == "array" and self.depth == 1 and type(value) is list:
            is_flat = bool(value) and type(value[0]) is not list and _find_leaf(value) == self.dtype
            return is_flat and (self.dtype == "bool" or -_EXACT <= min(value) <= max(value) <= _EXACT)
        return self.kind == "text" and type(value) is str

    def convert(self, value: Any) -> Any:
        """Converts a value of `json.loads`.

        Raises:
            Mismatch: it is not of this type.
        """
        if self.kind == "any":
            return value
        if value is None:
            raise Mismatch("is null")
        if self.kind == "text":
            if type(value) is not str:
                raise Mismatch(f"is {_say(value)}, not a text")
            return value
        if self.kind in ("number", "array", "dtype"):
            return self._convert_numbers(value)
        if self.kind == "dict" and isinstance(value, dict):
            if missing := [name for name in self.parts if name not in value]:
                raise Mismatch(f"has no {missing[0]!r}")
            return {name: part.convert(value[name]) for name, part in self.parts.items()}
        if self.kind == "list" and isinstance(value, list):
            return [self.parts[""].convert(each) for each in value]
        raise Mismatch(f"is {_say(value)}, not {self}")

    def _convert_numbers(self, value: Any) -> Any:
        is_list = isinstance(value, list)
        leaf = _find_leaf(value)
        is_other = is_list if self.kind == "number" else self.kind == "array" and not is_list
        wanted = np.dtype(self.dtype or "float64")  # of lists that are empty in all lines
        if is_other or leaf is None or (leaf and wanted.kind not in _FITTING[leaf]):
            raise Mismatch(f"is {_say(value)}, not {self}")
        try:
            return self._make_array(value, wanted) if is_list else make_number(wanted, value)
        except OverflowError:
            raise Mismatch(f"is {_say(value)}, which is no {self.dtype}") from None
        except ValueError:
            raise Mismatch(
                "has lists of different lengths in one list: an array needs them of one length"
            ) from None

    def _make_array(self, value: list[Any], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
        with np.errstate(over="ignore"):
            array = np.array(value, dtype)
        if (
            dtype.kind == "f"
            and dtype.itemsize < 8
            and (np.isinf(array) & ~np.isinf(np.array(value, float))).any()
        ):
            raise OverflowError
        # Lists without elements do not show the axes in them.
        return array.reshape(array.shape + (0,) * (self.depth - array.ndim)) if array.ndim < self.depth else array


NONE = JsonType("none")


def describe(value: Any) -> JsonType:
    """The type of one value.

    Raises:
        Mismatch: it has an integer that an int64 does not hold, or elements that have no type in common.
    """
    if value is None:
        return NONE
    if type(value) is str:
        return JsonType("text")
    if type(value) in _NUMBERS:
        return JsonType("number", _NUMBERS[type(value)], is_exact=_is_exact(value))
    if isinstance(value, dict):
        parts = {name: describe(each) for name, each in value.items()}
        return JsonType("dict", parts=parts, seen=(1, dict.fromkeys(value, 1)))
    leaf = _find_leaf(value)
    if leaf is not None:
        is_exact = _is_exact(value)
        if not is_exact and leaf == "float64":
            raise Mismatch(f"has {_LOSSY}")
        return JsonType("array", leaf, _find_depth(value) if leaf else 0, is_exact=is_exact)
    element = NONE
    for each in value:
        element = merge(element, describe(each))
    return JsonType("list", parts={"": element})


def merge(one: JsonType, other: JsonType) -> JsonType:
    """The type that holds the values of two types.

    Raises:
        Mismatch: there is none.
    """
    if one.kind == other.kind == "dict":
        (many, counts), (more, others) = one.seen, other.seen
        names = [*one.parts, *(name for name in other.parts if name not in one.parts)]
        parts = {name: merge(one.parts.get(name, NONE), other.parts.get(name, NONE)) for name in names}
        counts = {name: counts.get(name, 0) + others.get(name, 0) for name in names}
        return JsonType("dict", parts=parts, seen=(many + more, counts))
    if one.kind == "none" or (one == other and one.kind != "list"):
        return other
    if other.kind == "none":
        return one
    if one.kind == other.kind == "list":
        return JsonType("list", parts={"": merge(one.parts[""], other.parts[""])})
    for empty, full in ((one, other), (other, one)):
        if empty.kind == "array" and not empty.dtype and full.kind in ("array", "list"):
            return full
    is_alike = one.kind == other.kind and one.kind in ("number", "array") and one.depth == other.depth
    is_exact = one.is_exact and other.is_exact
    if is_alike and one.dtype == other.dtype:
        return JsonType(one.kind, one.dtype, one.depth, is_exact=is_exact)
    if is_alike and {one.dtype, other.dtype} == {"int64", "float64"}:
        if not is_exact:
            raise Mismatch(f"has {_LOSSY}")
        return JsonType(one.kind, "float64", one.depth)
    raise Mismatch(f"is {one} in some lines and {other} in others")


def find_rare(counts: Mapping[str, int], total: int) -> list[str]:
    """The names that less than half of all values have, where others have more: of misspelt keys, for instance."""
    rare = [name for name, count in counts.items() if 2 * count < total]
    return rare if len(rare) < len(counts) else []


def drop_rare(kind: JsonType, path: str) -> tuple[JsonType, list[str]]:
    """Leave out what few values of a dict have, at any depth, since all others would lack it.

    Returns:
        The type that is left, and what was left out, with how many have it.
    """
    total, counts = kind.seen
    rare = find_rare(counts, total)
    said = [f"{path}.{name} (in {counts[name]} of {total})" for name in rare]
    parts = {}
    for name, part in kind.parts.items():
        if name not in rare:
            parts[name], more = drop_rare(part, f"{path}.{name}" if name else f"{path}[]")
            said += more
    return replace(kind, parts=parts), said


def _find_leaf(value: Any) -> str | None:
    """The dtype that holds all numbers in nested lists: "" if there are none, None if there is anything else."""
    if not isinstance(value, list):
        return _NUMBERS.get(type(value))
    kinds = set(map(type, value))
    if not kinds:
        return ""
    if kinds == {list}:
        found = {leaf for each in value if (leaf := _find_leaf(each)) != ""}
    elif kinds <= set(_NUMBERS):
        found = {_NUMBERS[kind] for kind in kinds}
    else:
        return None
    if None in found or (len(found) > 1 and "bool" in found):
        return None
    return "float64" if len(found) > 1 else next(iter(found), "")


def _find_depth(value: Any) -> int:
    return 1 + max((_find_depth(each) for each in value if isinstance(each, list)), default=0)


def _is_exact(value: Any) -> bool:
    """Whether a float64 holds a number, or all numbers in nested lists.

    Raises:
        Mismatch: one is an integer that an int64 does not hold.
    """
    if isinstance(value, list):
        if set(map(type, value)) == {int} and -_EXACT <= min(value) <= max(value) <= _EXACT:
            return True
        return all(map(_is_exact, value))
    if type(value) is not int or abs(value) <= _EXACT:
        return True
    if not -(2**63) <= value < 2**63:
        raise Mismatch(f"is {_say(value)}, an integer that an int64 does not hold")
    return int(float(value)) == value


def _say(value: Any) -> str:
    return f"{value!r:.60}"
