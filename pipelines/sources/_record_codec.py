"""Encodes records as bytes and decodes them exactly; nothing is pickled.

A record is nested of dicts with texts as keys, lists and tuples; its values are arrays, numbers, texts, bytes and
None. It is stored as the length of its description, the description (JSON), and the bytes of arrays and bytes.
"""

from __future__ import annotations

import json
import struct
from typing import Any

import numpy as np

_LENGTH = struct.Struct("<I")


class NotStorable(Exception):
    """A value can be no part of a stored record; the message says which."""


def encode(record: dict[str, Any]) -> bytes:
    """Returns the bytes of a record.

    Raises:
        NotStorable: a value is of another type than the module's docstring lists.
    """
    parts: list[bytes] = []
    description = json.dumps(_describe(record, parts, "the record")).encode()
    return b"".join((_LENGTH.pack(len(description)), description, *parts))


def _describe(value: Any, parts: list[bytes], name: str) -> Any:
    """A JSON value: itself if it is a number, text or None, else a list that begins with its kind."""
    kind = type(value)
    if value is None or kind in (bool, int, float, str):
        return value
    if kind is bytes:
        parts.append(value)
        return ["b", len(value)]
    if kind is np.ndarray or isinstance(value, np.generic):
        if value.dtype.hasobject or value.dtype.names is not None:
            raise NotStorable(f"{name} is an array of {value.dtype}")
        parts.append(value.tobytes())
        return ["a" if kind is np.ndarray else "s", value.dtype.str, list(value.shape)]
    if kind in (list, tuple):
        return ["l" if kind is list else "t", *(_describe(v, parts, f"{name}[{i}]") for i, v in enumerate(value))]
    if kind is dict:
        for key in value:
            if type(key) is not str:
                raise NotStorable(f"{name} has the key {key!r:.60}, which is not a str")
        return ["d", list(value), [_describe(part, parts, f"{key!r} of {name}") for key, part in value.items()]]
    raise NotStorable(f"{name} is {kind.__module__}.{kind.__qualname__}")


def decode(data: bytes) -> dict[str, Any]:
    """Returns the record of some bytes, in newly allocated memory."""
    (length,) = _LENGTH.unpack_from(data)
    end = _LENGTH.size + length
    reader = _Reader(data, end)
    record: dict[str, Any] = reader.build(json.loads(data[_LENGTH.size : end]))
    return record


class _Reader:
    def __init__(self, data: bytes, offset: int) -> None:
        self._data, self._offset = data, offset

    def build(self, description: Any) -> Any:
        if not isinstance(description, list):
            return description
        kind, *parts = description
        if kind == "b":
            return self._advance(parts[0])
        if kind in ("a", "s"):
            dtype, shape = np.dtype(parts[0]), tuple(parts[1])
            flat = np.frombuffer(self._advance(dtype.itemsize * int(np.prod(shape, dtype=np.int64))), dtype)
            return flat.reshape(shape).copy() if kind == "a" else flat[0]
        if kind == "d":
            return dict(zip(parts[0], map(self.build, parts[1]), strict=True))
        values = map(self.build, parts)
        return list(values) if kind == "l" else tuple(values)

    def _advance(self, size: int) -> bytes:
        self._offset += size
        return self._data[self._offset - size : self._offset]
