"""Parses the Protocol Buffers message `tf.train.Example` (tensorflow/core/example/{example,feature}.proto).

    Example { Features features = 1; }         Features { map<string, Feature> feature = 1; }
    Feature { oneof { BytesList bytes_list = 1; FloatList float_list = 2; Int64List int64_list = 3; } }
    BytesList { repeated bytes value = 1; }    FloatList { repeated float value = 1 [packed]; }
    Int64List { repeated int64 value = 1 [packed]; }

The rest follows the encoding's rules: of a field that comes twice the last one holds, parts of one message are
merged, numbers may be packed or not, and unknown fields are left out.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

import numpy as np

Values = list[bytes] | np.ndarray[Any, Any]

_VARINT, _FIXED64, _BYTES, _START, _END, _FIXED32 = 0, 1, 2, 3, 4, 5
_NAMES = {1: "bytes_list", 2: "float_list", 3: "int64_list"}
_FLOAT = struct.Struct("<f")


class Malformed(Exception):
    """The bytes are no such message; the message says why."""


def parse_example(data: bytes) -> dict[str, Values | None]:
    """Returns name -> bytes as a list, or numbers as an array, float32 or int64 [n]; None: the feature is empty.

    Raises:
        Malformed: the bytes are no Example.
    """
    view = memoryview(data)
    features: dict[str, tuple[int, list[memoryview]]] = {}
    for number, value in _iterate_fields(view):
        if number == 2 and isinstance(value, memoryview):
            raise Malformed(
                "is a SequenceExample, of which a record's features are no function; only Example is read"
            )
        if number == 1:
            for field, entry in _iterate_fields(_expect_bytes(value, "features")):
                if field == 1:
                    name, feature = _parse_entry(_expect_bytes(entry, "a feature"))
                    features[name] = feature
    return {name: _parse_values(kind, parts) for name, (kind, parts) in features.items()}


def _parse_entry(entry: memoryview) -> tuple[str, tuple[int, list[memoryview]]]:
    name = ""
    kind, parts = 0, list[memoryview]()
    for field, value in _iterate_fields(entry):
        if field == 1:
            try:
                name = bytes(_expect_bytes(value, "a feature's name")).decode()
            except UnicodeDecodeError:
                raise Malformed("has a feature whose name is not UTF-8") from None
        elif field == 2:
            for number, part in _iterate_fields(_expect_bytes(value, "a feature")):
                if number in _NAMES:
                    parts = [*(parts if number == kind else ()), _expect_bytes(part, _NAMES[number])]
                    kind = number
    return name, (kind, parts)


def _parse_values(kind: int, parts: list[memoryview]) -> Values | None:
    if not kind:
        return None
    if kind == 1:
        return [bytes(_expect_bytes(v, "bytes")) for part in parts for f, v in _iterate_fields(part) if f == 1]
    arrays = [_parse_numbers(kind, part) for part in parts]
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)


def _parse_numbers(kind: int, part: memoryview) -> np.ndarray[Any, Any]:
    arrays: list[np.ndarray[Any, Any]] = []
    single = _FIXED32 if kind == 2 else _VARINT
    for field, value, wire in _iterate_wire(part):
        if field != 1:
            continue
        if wire == _BYTES:
            assert isinstance(value, memoryview)
            arrays.append(_unpack_floats(value) if kind == 2 else _unpack_varints(value))
        elif wire == single:
            assert isinstance(value, int)
            arrays.append(
                np.array([value], np.uint32).view(np.float32)
                if kind == 2
                else _as_int64(np.array([value], np.uint64))
            )
        else:
            raise Malformed(f"has a value of wire type {wire} in a {_NAMES[kind]}")
    if len(arrays) == 1:
        return arrays[0]
    return np.concatenate([np.empty(0, np.float32 if kind == 2 else np.int64), *arrays])


def _unpack_floats(value: memoryview) -> np.ndarray[Any, Any]:
    if len(value) % 4:
        raise Malformed(f"has packed floats of {len(value)} bytes")
    return np.frombuffer(value, "<f4").astype(np.float32)


def _unpack_varints(value: memoryview) -> np.ndarray[Any, Any]:
    if len(value) < 16:
        found, offset = [], 0
        while offset < len(value):
            number, offset = _read_varint(value, offset)
            found.append(number)
        return _as_int64(np.array(found, np.uint64))
    data = np.frombuffer(value, np.uint8)
    ends = np.flatnonzero(data < 0x80)
    if not len(ends) or ends[-1] + 1 != len(data):
        raise Malformed("ends within a number")
    starts = np.concatenate([[0], ends[:-1] + 1])
    sizes = ends - starts + 1
    if sizes.max() > 10:
        raise Malformed("has a number of more than 10 bytes")
    shifts = (np.arange(len(data)) - np.repeat(starts, sizes)).astype(np.uint64) * np.uint64(7)
    return _as_int64(np.bitwise_or.reduceat((data & 0x7F).astype(np.uint64) << shifts, starts))


def _as_int64(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return values.view(np.int64)


def _expect_bytes(value: Any, what: str) -> memoryview:
    if not isinstance(value, memoryview):
        raise Malformed(f"has a number in the place of {what}")
    return value


def _iterate_fields(view: memoryview) -> Iterator[tuple[int, memoryview | int]]:
    for field, value, _ in _iterate_wire(view):
        yield field, value


def _iterate_wire(view: memoryview) -> Iterator[tuple[int, memoryview | int, int]]:
    """Field number, value and wire type of each field of a message; groups are skipped."""
    offset, end = 0, len(view)
    while offset < end:
        tag, offset = _read_varint(view, offset)
        field, wire = tag >> 3, tag & 7
        if not 0 < field < 1 << 29:
            raise Malformed(f"has a field {field}")
        if wire == _START:
            offset = _skip_group(view, offset, field, 0)
            continue
        value, offset = _read_value(view, offset, wire)
        yield field, value, wire


def _read_value(view: memoryview, offset: int, wire: int) -> tuple[memoryview | int, int]:
    if wire == _VARINT:
        return _read_varint(view, offset)
    if wire == _BYTES:
        size, offset = _read_varint(view, offset)
    elif wire in (_FIXED32, _FIXED64):
        size = 4 if wire == _FIXED32 else 8
    else:
        raise Malformed(f"has wire type {wire}")
    if offset + size > len(view):
        raise Malformed(f"ends within a value of {size} bytes")
    part = view[offset : offset + size]
    return (part if wire == _BYTES else int.from_bytes(part, "little")), offset + size


def _skip_group(view: memoryview, offset: int, group: int, depth: int) -> int:
    if depth > 100:
        raise Malformed("is nested too deep")
    while offset < len(view):
        tag, offset = _read_varint(view, offset)
        field, wire = tag >> 3, tag & 7
        if wire == _END:
            if field != group:
                break
            return offset
        if wire == _START:
            offset = _skip_group(view, offset, field, depth + 1)
        else:
            _, offset = _read_value(view, offset, wire)
    raise Malformed("has a group without an end")


def _read_varint(view: memoryview, offset: int) -> tuple[int, int]:
    value = shift = 0
    try:
        while (byte := view[offset]) >= 0x80:
            value |= (byte & 0x7F) << shift
            shift += 7
            offset += 1
            if shift > 63:
                raise Malformed("has a number of more than 10 bytes")
    except IndexError:
        raise Malformed("ends within a number") from None
    return (value | byte << shift) & 0xFFFFFFFFFFFFFFFF, offset + 1
