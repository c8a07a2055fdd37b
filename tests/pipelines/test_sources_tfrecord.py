"""tfrecord(): records of TFRecord files, as the `protobuf` package parses them."""

from __future__ import annotations

import contextlib
import functools
import gzip
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelines import sources
from pipelines.errors import PipelineError, SampleError
from pipelines.sources._crc32c import crc32c, mask
from pipelines.sources._tf_example import Malformed, parse_example


@functools.cache
def messages() -> tuple[Any, Any]:
    """The classes Example and SequenceExample, from descriptors written out here."""
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    file = descriptor_pb2.FileDescriptorProto(name="example.proto", package="tf", syntax="proto3")
    kinds = descriptor_pb2.FieldDescriptorProto

    def add(message: Any, name: str, number: int, kind: int, type_name: str = "", repeated: bool = False) -> Any:
        label = kinds.LABEL_REPEATED if repeated else kinds.LABEL_OPTIONAL
        named = {"type_name": type_name} if type_name else {}
        return message.field.add(name=name, number=number, type=kind, label=label, **named)

    for name, kind in (("Bytes", kinds.TYPE_BYTES), ("Float", kinds.TYPE_FLOAT), ("Int64", kinds.TYPE_INT64)):
        add(file.message_type.add(name=f"{name}List"), "value", 1, kind, repeated=True)
    feature = file.message_type.add(name="Feature")
    feature.oneof_decl.add(name="kind")
    for number, name in enumerate(("Bytes", "Float", "Int64"), 1):
        made = add(feature, f"{name.lower()}_list", number, kinds.TYPE_MESSAGE, f".tf.{name}List")
        made.oneof_index = 0
    for outer, field, value in (
        ("Features", "feature", "Feature"),
        ("FeatureLists", "feature_list", "FeatureList"),
    ):
        message = file.message_type.add(name=outer)
        entry_name = "".join(part.title() for part in field.split("_")) + "Entry"
        entry = message.nested_type.add(name=entry_name)
        entry.options.map_entry = True
        add(entry, "key", 1, kinds.TYPE_STRING)
        add(entry, "value", 2, kinds.TYPE_MESSAGE, f".tf.{value}")
        add(message, field, 1, kinds.TYPE_MESSAGE, f".tf.{outer}.{entry_name}", repeated=True)
    add(file.message_type.add(name="FeatureList"), "feature", 1, kinds.TYPE_MESSAGE, ".tf.Feature", repeated=True)
    add(file.message_type.add(name="Example"), "features", 1, kinds.TYPE_MESSAGE, ".tf.Features")
    sequence = file.message_type.add(name="SequenceExample")
    add(sequence, "context", 1, kinds.TYPE_MESSAGE, ".tf.Features")
    add(sequence, "feature_lists", 2, kinds.TYPE_MESSAGE, ".tf.FeatureLists")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return tuple(
        message_factory.GetMessageClass(pool.FindMessageTypeByName(f"tf.{name}"))
        for name in ("Example", "SequenceExample")
    )  # type: ignore[return-value]


def example(features: dict[str, Any]) -> bytes:
    message = messages()[0]()
    for name, values in features.items():
        feature = message.features.feature[name]
        if values is None:
            continue
        kind = (
            "bytes_list"
            if isinstance(values, list)
            else "float_list"
            if values.dtype.kind == "f"
            else "int64_list"
        )
        target = getattr(feature, kind)
        target.SetInParent()
        target.value.extend(values if isinstance(values, list) else values.tolist())
    data: bytes = message.SerializeToString()
    return data


def frame(data: bytes) -> bytes:
    length = struct.pack("<Q", len(data))
    return length + struct.pack("<I", mask(crc32c(length))) + data + struct.pack("<I", mask(crc32c(data)))


def write(path: Path, *records: dict[str, Any]) -> Path:
    path.write_bytes(b"".join(frame(example(record)) for record in records))
    return path


def numbers(*values: int) -> Any:
    return np.array(values, np.int64)


def test_checksums_are_those_of_rfc_3720_and_of_tensorflow() -> None:
    assert crc32c(b"123456789") == 0xE3069283
    assert crc32c(bytes(32)) == 0x8A9136AA
    assert crc32c(b"\xff" * 32) == 0x62A8AB43
    assert crc32c(bytes(range(32))) == 0x46DD794E
    assert crc32c(b"") == 0
    # core/lib/hash/crc32c_test.cc, `Mask`
    assert mask(crc32c(b"foo")) == ((crc32c(b"foo") >> 15 | crc32c(b"foo") << 17) + 0xA282EAD8) % 2**32


def slowly(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


@given(size=st.integers(0, 3000), seed=st.integers(0, 1000))
def test_checksums_of_any_length_are_those_of_the_definition(size: int, seed: int) -> None:
    data = np.random.default_rng(seed).bytes(size)
    assert crc32c(data) == slowly(data)


def test_checksums_of_many_blocks_are_those_of_the_definition() -> None:
    data = np.random.default_rng(0).bytes(200_001)
    assert crc32c(data) == slowly(data)


VALUES = st.one_of(
    st.none(),
    st.lists(st.binary(max_size=300), max_size=5),
    st.lists(st.floats(width=32, allow_nan=False), max_size=40).map(lambda v: np.array(v, np.float32)),
    st.lists(st.integers(-(2**63), 2**63 - 1), max_size=40).map(lambda v: np.array(v, np.int64)),
)


@given(st.dictionaries(st.text(max_size=10), VALUES, max_size=6))
def test_an_example_is_parsed_as_protobuf_parses_it(features: dict[str, Any]) -> None:
    found = parse_example(example(features))
    assert set(found) == set(features)
    for name, values in features.items():
        got = found[name]
        if values is None or isinstance(values, list):
            assert got == values
        else:
            assert got is not None and not isinstance(got, list) and got.dtype == values.dtype
            np.testing.assert_array_equal(got, values)


@given(features=st.dictionaries(st.sampled_from("abc"), VALUES, min_size=1), data=st.data())
def test_a_damaged_example_is_never_another_error(features: dict[str, Any], data: st.DataObject) -> None:
    raw = bytearray(example(features))
    place = data.draw(st.integers(0, len(raw) - 1))
    raw[place] ^= data.draw(st.integers(1, 255))
    with contextlib.suppress(Malformed):
        parse_example(bytes(raw))


def test_repeated_and_unpacked_and_unknown_fields_follow_the_encodings_rules() -> None:
    def field(number: int, data: bytes) -> bytes:
        return bytes([number << 3 | 2, len(data)]) + data

    def entry(feature: bytes) -> bytes:
        return field(1, field(1, field(1, b"x") + field(2, feature)))

    unpacked = b"\x08\x01\x08\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01"  # 1, -1
    floats = b"\x0d\x00\x00\x80\x3f" + field(1, b"\x00\x00\x00\x40")  # 1.0, then packed: 2.0
    for data, expected in (
        (entry(field(3, unpacked)), [1, -1]),
        (entry(field(3, unpacked) + field(3, b"\x0a\x01\x07")), [1, -1, 7]),
        (entry(field(2, floats)), [1.0, 2.0]),
        (entry(field(3, unpacked) + field(2, floats)), [1.0, 2.0]),
        (entry(field(3, unpacked)) + b"\x78\x01" + b"\x7b\x08\x01\x7c", [1, -1]),
        (entry(field(2, floats)) + entry(field(3, unpacked)), [1, -1]),
    ):
        message = messages()[0]()
        message.ParseFromString(data)
        feature = message.features.feature["x"]
        assert list(getattr(feature, feature.WhichOneof("kind")).value) == expected
        found = parse_example(data)["x"]
        assert found is not None and not isinstance(found, list) and found.tolist() == expected


def field(number: int, kind: int, body: bytes) -> bytes:
    """A field of a message: of kind 0 and 5 the value, of kind 2 what follows its length."""
    return bytes([number << 3 | kind]) + (bytes([len(body)]) if kind == 2 else b"") + body


@pytest.mark.parametrize(
    ("number", "values"),
    [
        (1, field(1, 0, b"\x05")),  # bytes that are a number
        (2, field(1, 0, b"\x05")),  # floats that are an integer
        (2, field(1, 2, b"\0\0\0") + field(1, 2, b"\0\0\0\0\0")),  # packed floats of three and five bytes
        (3, field(1, 5, b"\0\0\0\0")),  # integers that are of a fixed length
    ],
)
def test_values_of_another_kind_are_damage_and_no_empty_list(number: int, values: bytes) -> None:
    entry = field(1, 2, b"x") + field(2, 2, field(number, 2, values))
    with pytest.raises(Malformed):
        parse_example(field(1, 2, field(1, 2, entry)))


@pytest.mark.parametrize(
    "data",
    [
        field(1, 0, b"\x05"),
        field(1, 2, field(1, 0, b"\x05")),
        field(1, 2, field(1, 2, field(1, 2, b"x") + field(2, 0, b"\x05"))),
        field(1, 2, field(1, 2, field(1, 2, b"x") + field(2, 2, field(3, 0, b"\x05")))),
    ],
)
def test_a_part_of_an_example_that_is_a_number_is_damage(data: bytes) -> None:
    with pytest.raises(Malformed):
        parse_example(data)


def record(i: int) -> dict[str, Any]:
    return {"image": [b"image %d" % i], "label": numbers(i), "box": np.arange(4, dtype=np.float32) + i}


def test_records_come_in_any_order_from_several_files(tmp_path: Path) -> None:
    write(tmp_path / "b.tfrecord", *map(record, range(5, 9)))
    write(tmp_path / "a.tfrecord", *map(record, range(5)))
    (tmp_path / "c.tfrecord").touch()
    source = sources.tfrecord(str(tmp_path / "*.tfrecord"))
    assert len(source) == 9 and source.features == {"image": "scalar", "label": "scalar", "box": "list"}
    for i in (8, 0, 5, 4, 3):
        found = source[i]
        assert (found["image"], found["label"], found["label"].dtype) == (b"image %d" % i, i, np.int64)
        assert found["box"].dtype == np.float32 and found["box"].tolist() == [i, i + 1, i + 2, i + 3]
    assert source.where(6).startswith(f"{tmp_path}/b.tfrecord:row 1 (byte ")


def test_features_select_and_say_what_is_a_list(tmp_path: Path) -> None:
    path = write(
        tmp_path / "a.tfrecord", record(1), {**record(2), "label": numbers(2, 3)}, {"image": [], "label": None}
    )
    assert sources.tfrecord(path, features=["label"])[0] == {"label": 1}
    lists = sources.tfrecord(path, features={"label": "list", "image": "list"})
    assert lists[0]["label"].tolist() == [1] and lists[0]["image"] == [b"image 1"]
    assert lists[1]["label"].tolist() == [2, 3]
    scalars = sources.tfrecord(path)
    with pytest.raises(SampleError, match=r"sample 1 .*'label' has 2 values, not 1; .*'label': 'list'"):
        scalars[1]
    with pytest.raises(SampleError, match=r"sample 2 .*feature 'image' has 0 values"):
        sources.tfrecord(path, features={"image": "scalar"})[2]
    with pytest.raises(SampleError, match=r"sample 2 .*feature 'label' is empty"):
        sources.tfrecord(path, features={"label": "scalar"})[2]
    with pytest.raises(SampleError, match=r"sample 2 .*has no feature 'box'"):
        sources.tfrecord(path, features=["box"])[2]
    with pytest.raises(PipelineError, match=r"no feature 'depth' \(it has: .*image"):
        sources.tfrecord(path, features=["depth"])
    with pytest.raises(PipelineError, match="must be 'scalar' or 'list', got 'array'"):
        sources.tfrecord(path, features={"label": "array"})  # type: ignore[dict-item]


def test_a_sequence_example_is_refused_by_name(tmp_path: Path) -> None:
    message = messages()[1]()
    message.feature_lists.feature_list["x"].feature.add().int64_list.value.append(1)
    (tmp_path / "a.tfrecord").write_bytes(frame(message.SerializeToString()))
    with pytest.raises(SampleError, match="SequenceExample"):
        sources.tfrecord(tmp_path / "a.tfrecord")


def test_damage_is_named_with_file_and_byte(tmp_path: Path) -> None:
    whole = write(tmp_path / "a.tfrecord", *map(record, range(4))).read_bytes()
    size = len(whole) // 4

    def changed(name: str, data: bytes) -> Path:
        (tmp_path / name).write_bytes(data)
        return tmp_path / name

    damaged = bytearray(whole)
    damaged[size + 20] ^= 1
    source = sources.tfrecord(changed("data", damaged))
    assert source[0]["label"] == 0 and source[2]["label"] == 2
    with pytest.raises(SampleError, match=rf"sample 1 \({tmp_path}/data:row 1 \(byte {size}\)\): its checksum"):
        source[1]
    for cut in (1, 8, 13, size - 1):
        path = changed(f"cut{cut}", whole[: 2 * size + cut])
        with pytest.raises(PipelineError, match=rf"cut{cut}: is cut off: .*{2 * size}"):
            sources.tfrecord(path)
    damaged = bytearray(whole)
    damaged[2 * size + 1] ^= 1  # the length
    with pytest.raises(PipelineError, match=rf"length: is damaged: the length at byte {2 * size} has another"):
        sources.tfrecord(changed("length", damaged))
    with pytest.raises(PipelineError, match=r"text: is no TFRecord file: the length at byte 0"):
        sources.tfrecord(changed("text", b"this is a text, and no record at all"))
    with pytest.raises(PipelineError, match=r"a\.gz: is compressed with gzip"):
        sources.tfrecord(changed("a.gz", gzip.compress(whole)))
    with pytest.raises(PipelineError, match="holds no record"):
        sources.tfrecord(changed("empty", b""))
