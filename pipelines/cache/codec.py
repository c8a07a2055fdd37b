"""Encodes samples as bytes and decodes them exactly: types, dtypes, shapes and memory layouts are preserved.

Nothing is pickled: a sample with a value other than an array, a number, bytes, a text or None, in plain dicts and
tuples, cannot be encoded.

A record is a header (`_HEADER`), the description of its fields (JSON) and their bytes one after the other. The
description lists the fields of a flat sample; of a nested one it holds `fields`, named by their paths, and `tree`.
The header holds the sample's index and a digest (xxHash, XXH3 with 64 bits) of all the rest, so reading detects a
record that is incomplete, damaged or of another sample.
"""

from __future__ import annotations

import functools
import json
import os
import struct
import zlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from pipelines.samples.memory_order import AxisOrder, allocate, layout_of
from pipelines.samples.nested import Path, join_path

# Mark, bytes of the description, index, bytes of the fields, digest of all, checksum of what stands before it.
_HEADER = struct.Struct("<4sIQQQI4x")
_MAGIC = b"smp1"
_FIRST_READ = 512  # bytes that are read at once in the hope that header and description lie in them
_MAX_BUFFERS = 1000  # IOV_MAX is 1024


class CorruptRecord(Exception):
    """The bytes at an offset are not an intact record of the sample."""


class _Field(NamedTuple):
    name: str
    kind: str
    dtype: str
    shape: tuple[int, ...]
    layout: AxisOrder
    nbytes: int


def encode(index: int, sample: Any) -> list[Any] | str:
    """Encodes a sample.

    Returns:
        Buffers to write one after the other, or a text that says why the sample cannot be encoded.
    """
    if type(sample) is not dict:  # a class of its own may do what is not in its items
        return f"the sample is {type(sample).__module__}.{type(sample).__qualname__}, not a plain dict"
    fields: list[_Field] = []
    buffers: list[Any] = []
    arrays: list[Any] = []
    tree = None
    values: list[tuple[Any, Any]] = list(sample.items())
    if any(isinstance(value, dict | tuple) for value in sample.values()):
        values = []
        try:
            tree = _describe_tree(sample, (), values)
        except TypeError as error:
            return str(error)
    for name, value in values:
        encoded = _encode_value(name, value)
        if isinstance(encoded, str):
            return encoded
        if type(value) is np.ndarray:
            if any(np.may_share_memory(value, other) for other in arrays):
                return f"the field {name!r} lies in the same memory as another"
            arrays.append(value)
        fields.append(encoded[0])
        buffers.append(encoded[1])
    if len(buffers) > _MAX_BUFFERS - 2:
        return f"the sample has {len(buffers)} fields"
    description = json.dumps(fields if tree is None else {"tree": tree, "fields": fields}).encode()
    size = sum(field.nbytes for field in fields)
    head = _HEADER.pack(_MAGIC, len(description), index, size, _compute_digest(index, description, buffers), 0)
    return [head[:-8] + struct.pack("<I4x", zlib.crc32(description, zlib.crc32(head[:-8]))), description, *buffers]


def _describe_tree(value: Any, path: Path, leaves: list[tuple[Any, Any]]) -> Any:
    """The dicts and tuples of a sample as JSON; appends the values in them to `leaves`."""
    if isinstance(value, dict | tuple):
        if type(value) not in (dict, tuple):
            raise TypeError(
                f"the field {join_path(path)!r} is {type(value).__module__}.{type(value).__qualname__}"
            )
        if isinstance(value, tuple):
            return ["tuple", [_describe_tree(part, (*path, i), leaves) for i, part in enumerate(value)]]
        odd = next((name for name in value if type(name) is not str), None)
        if odd is not None:
            raise TypeError(f"the field name {odd!r} is not a str")
        return ["dict", [[name, _describe_tree(part, (*path, name), leaves)] for name, part in value.items()]]
    leaves.append((join_path(path), value))
    return ["leaf"]


def _build_tree(tree: Any, leaves: Iterator[Any]) -> Any:
    kind, *parts = tree
    if kind == "dict":
        return {name: _build_tree(part, leaves) for name, part in parts[0]}
    return tuple(_build_tree(part, leaves) for part in parts[0]) if kind == "tuple" else next(leaves)


def _encode_value(name: Any, value: Any) -> tuple[_Field, Any] | str:
    if type(name) is not str:
        return f"the field name {name!r} is not a str"
    if type(value) is np.ndarray or isinstance(value, np.generic):
        if value.dtype.kind not in "biufc":
            return f"the field {name!r} is an array of {value.dtype}"
        layout = layout_of(value)
        flat = np.asarray(value) if layout is None else np.ascontiguousarray(np.transpose(value, layout))
        buffer = flat.reshape(-1).view(np.uint8)
        return _Field(name, "array", value.dtype.str, value.shape, layout, buffer.nbytes), buffer
    if type(value) is bytes:
        kind, raw = "bytes", value
    elif type(value) is str:
        kind, raw = "str", value.encode("utf-8", "surrogatepass")
    elif value is None or type(value) in (bool, int, float):
        kind, raw = "json", json.dumps(value).encode()
    else:
        return f"the field {name!r} is {type(value).__module__}.{type(value).__qualname__}"
    return _Field(name, kind, "", (), None, len(raw)), raw


def read_record(fd: int, offset: int, index: int, limit: int) -> dict[str, Any]:
    """Reads the record at an offset of a file.

    Args:
        index: of the sample.
        limit: an upper bound of the size of a record, in bytes.

    Returns:
        The sample, in newly allocated memory.

    Raises:
        CorruptRecord: there is no intact record of that sample.
    """
    try:
        begin = os.pread(fd, _FIRST_READ, offset)
        if len(begin) < _HEADER.size:
            raise CorruptRecord("it ends too early")
        mark, length, whose, size, digest, check = _HEADER.unpack_from(begin)
        if mark != _MAGIC or whose != index or size > limit or length > limit:
            raise CorruptRecord("it belongs to another sample")
        description = begin[_HEADER.size : _HEADER.size + length]
        if len(description) < length:
            description = os.pread(fd, length, offset + _HEADER.size)
        if zlib.crc32(description, zlib.crc32(begin[: _HEADER.size - 8])) != check:
            raise CorruptRecord("its description is damaged")
        tree, fields = _parse_fields(description)
        buffers = [_allocate_buffer(field) for field in fields]
        if buffers and os.preadv(fd, [_view_bytes(b) for b in buffers], offset + _HEADER.size + length) != size:
            raise CorruptRecord("it ends too early")
    except OSError as error:
        raise CorruptRecord(str(error)) from error
    if _compute_digest(index, description, [_view_bytes(b) for b in buffers]) != digest:
        raise CorruptRecord("its digest does not match")
    if tree is None:
        return {field.name: _decode_value(field, buffer) for field, buffer in zip(fields, buffers, strict=True)}
    values = (_decode_value(field, buffer) for field, buffer in zip(fields, buffers, strict=True))
    nested: dict[str, Any] = _build_tree(tree, values)
    return nested


@functools.lru_cache(maxsize=256)
def _parse_fields(description: bytes) -> tuple[Any, list[_Field]]:
    listed = json.loads(description)
    tree = None
    if isinstance(listed, dict):
        tree, listed = listed["tree"], listed["fields"]
    return tree, [
        _Field(name, kind, dtype, tuple(shape), None if layout is None else tuple(layout), nbytes)
        for name, kind, dtype, shape, layout, nbytes in listed
    ]


def _allocate_buffer(field: _Field) -> Any:
    if field.kind != "array":
        return bytearray(field.nbytes)
    return (
        np.empty(field.shape, field.dtype)
        if field.layout is None
        else allocate(field.shape, field.dtype, field.layout)
    )


def _view_bytes(buffer: Any) -> Any:
    if isinstance(buffer, bytearray):
        return buffer
    layout = layout_of(buffer)
    assert layout is not None
    return buffer.transpose(layout).reshape(-1).view(np.uint8)


def _decode_value(field: _Field, buffer: Any) -> Any:
    if field.kind == "array":
        return buffer[()] if field.layout is None else buffer
    raw = bytes(buffer)
    if field.kind == "bytes":
        return raw
    return raw.decode("utf-8", "surrogatepass") if field.kind == "str" else json.loads(raw)


def _compute_digest(index: int, description: bytes, buffers: Sequence[Any]) -> int:
    import xxhash

    digest = xxhash.xxh3_64(description, seed=index)
    for buffer in buffers:
        digest.update(buffer)
    number: int = digest.intdigest()
    return number
