"""Parses the Protocol Buffers message `tf.train.Example` (tensorflow/core/example/{example,feature}.proto).

    Example { Features features = 1; }         Features { map<string, Feature> feature = 1; }
    Feature { oneof { BytesList bytes_list = 1; FloatList float_list = 2; Int64List int64_list = 3; } }
    BytesList { repeated bytes value = 1; }    FloatList { repeated float value = 1 [packed]; }
    Int64List { repeated int64 value = 1 [packed]; }

The messages are declared here with two differences, which the encoding allows: a map is a list of its entries, and
packed floats are bytes, which numpy reads at once. Floats that are not packed are found as unknown fields.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

Values = list[bytes] | np.ndarray[Any, Any]

_LISTS = ("bytes_list", "float_list", "int64_list")


class Malformed(Exception):
    """The bytes are no such message; the message says why."""


@functools.cache
def _load_example(is_packed: bool) -> Any:
    """The class of the messages, with packed floats as bytes, or with all as floats."""
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    kinds = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="example.proto", syntax="proto3")

    def add(message: str, *fields: tuple[str, Any], is_repeated: bool = False) -> Any:
        """Adds a message with fields of these names and types, numbered from 1."""
        made = file.message_type.add(name=message)
        for number, (name, kind) in enumerate(fields, 1):
            label = kinds.LABEL_REPEATED if is_repeated else kinds.LABEL_OPTIONAL
            named = {"type": kinds.TYPE_MESSAGE, "type_name": kind} if isinstance(kind, str) else {"type": kind}
            made.field.add(name=name, number=number, label=label, **named)
        return made

    numbers = kinds.TYPE_BYTES if is_packed else kinds.TYPE_FLOAT
    for name, kind in zip(_LISTS, (kinds.TYPE_BYTES, numbers, kinds.TYPE_INT64), strict=True):
        add(name, ("value", kind), is_repeated=True)
    feature = add("Feature", *((name, name) for name in _LISTS))
    feature.oneof_decl.add(name="kind")
    for each in feature.field:
        each.oneof_index = 0
    add("Entry", ("key", kinds.TYPE_STRING), ("value", "Feature"))
    add("Features", ("feature", "Entry"), is_repeated=True)
    add("FeatureLists")
    add("Example", ("features", "Features"), ("feature_lists", "FeatureLists"))
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("Example"))


def parse_example(data: bytes, *, is_packed: bool = True) -> dict[str, Values | None]:
    """Returns name -> bytes as a list, or numbers as an array, float32 or int64 [n]; None: the feature is empty.

    Raises:
        Malformed: the bytes are no Example.
    """
    from google.protobuf.message import DecodeError
    from google.protobuf.unknown_fields import UnknownFieldSet

    try:
        message = _load_example(is_packed).FromString(data)
    except DecodeError as error:
        raise Malformed(str(error)) from None
    if message.HasField("feature_lists"):
        raise Malformed("is a SequenceExample, of which a record's features are no function; only Example is read")
    _check_kinds(message, message.features)
    found: dict[str, Values | None] = {}
    for entry in message.features.feature:
        kind = entry.value.WhichOneof("kind")
        _check_kinds(
            entry,
            entry.value,
            *([getattr(entry.value, kind)] if kind and not (kind == "float_list" and is_packed) else []),
        )
        values = getattr(entry.value, kind).value if kind else ()
        if kind == "float_list" and is_packed:
            if any(len(each) % 4 for each in values):
                raise Malformed("a list of floats ends within a number")
            if len(UnknownFieldSet(entry.value.float_list)):
                return parse_example(data, is_packed=False)
            found[entry.key] = np.frombuffer(b"".join(values), "<f4").astype(np.float32)
        elif kind == "bytes_list":
            found[entry.key] = list(values)
        else:
            found[entry.key] = np.array(values, np.int64 if kind == "int64_list" else np.float32) if kind else None
    return found


def _check_kinds(*messages: Any) -> None:
    """Refuse messages in which a field that is declared has a value of another kind: it is read as an unknown one.

    Raises:
        Malformed: a message has one.
    """
    from google.protobuf.unknown_fields import UnknownFieldSet

    for message in messages:
        declared = message.DESCRIPTOR.fields_by_number
        for unknown in UnknownFieldSet(message):
            if unknown.field_number in declared:
                name = declared[unknown.field_number].name
                raise Malformed(f"its field {name!r} in {message.DESCRIPTOR.name} has a value of another kind")
