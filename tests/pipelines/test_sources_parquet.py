"""parquet(): rows of real files, in any order, in any process."""

from __future__ import annotations

import itertools
import multiprocessing
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipelines import Pipeline, sources
from pipelines.errors import PipelineError, SampleError
from pipelines.prepare.inference import prepare_first_sample


def write(path: Path, columns: dict[str, Any], rows_in_group: int = 4) -> Path:
    pq.write_table(pa.table(columns), path, row_group_size=rows_in_group)
    return path


def images(n: int, first: int = 0) -> dict[str, Any]:
    rows = [{"bytes": b"image %d" % (first + i), "path": None} for i in range(n)]
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    return {"image": pa.array(rows, kind), "label": pa.array(range(first, first + n), pa.int64())}


def test_rows_of_several_files_are_in_the_order_of_the_paths(tmp_path: Path) -> None:
    b = write(tmp_path / "b.parquet", images(7, first=10))
    a = write(tmp_path / "a.parquet", images(10))
    write(tmp_path / "c.parquet", images(0))
    source = sources.parquet(str(tmp_path / "*.parquet"))
    for index in range(17):
        assert source[index] == {"image": b"image %d" % index, "label": index}
    assert source.where(12) == f"{tmp_path}/b.parquet:row 2" and len(source) == 17
    assert [int(record["label"]) for record in sources.parquet([b, a], columns=["label"])][6:8] == [16, 0]


def test_values_keep_their_kind(tmp_path: Path) -> None:
    columns: list[tuple[Any, Any, Any]] = [
        (pa.array([1.5, 2.5], pa.float32()), np.float32, 1.5),
        (pa.array([1, 2], pa.int16()), np.int16, 1),
        (pa.array([True, False]), bool, True),
        (pa.array(["one", "two"]), None, "one"),
        (pa.array(["x", "y"]).dictionary_encode(), None, "x"),
        (pa.array([b"\x00\xff", b""], pa.large_binary()), None, b"\x00\xff"),
        (pa.array([[1, 2], [3]], pa.list_(pa.float32())), np.float32, [1, 2]),
        (pa.array([[1, 2], [3, 4]], pa.list_(pa.int8(), 2)), np.int8, [1, 2]),
        (pa.array([[[1, 2], [3, 4]], [[5, 6]]]), np.int64, [[1, 2], [3, 4]]),
        (pa.array([["a", "b"], []]), None, ["a", "b"]),
        (pa.array([[{"n": 1}], []]), None, [{"n": 1}]),
    ]
    arrays = {f"c{number}": array for number, (array, _, _) in enumerate(columns)}
    one, two = sources.parquet(write(tmp_path / "a.parquet", arrays))
    for value, (_, dtype, expected) in zip(one.values(), columns, strict=True):
        assert (value if dtype is None else value.tolist()) == expected and getattr(value, "dtype", None) == dtype
    assert two["c9"] == two["c10"] == []


def test_lists_of_lists_are_arrays_of_the_files_dtype(tmp_path: Path) -> None:
    series = [np.arange(3 * n, dtype=np.float32).reshape(3, n) for n in (4, 0, 7)]  # [channels, time]
    columns = {
        "ct": pa.array([s.tolist() for s in series], pa.list_(pa.list_(pa.float32()))),
        "tc": pa.array([s.T.tolist() for s in series], pa.list_(pa.list_(pa.float32(), 3))),
        "large": pa.array([s.tolist() for s in series], pa.large_list(pa.large_list(pa.int16()))),
        "deep": pa.array([[s.tolist()] * 2 for s in series], pa.list_(pa.list_(pa.list_(pa.float32())))),
        "flags": pa.array([[[True, False]]] * 3),
    }
    source = sources.parquet(write(tmp_path / "a.parquet", columns, rows_in_group=2))
    for record, expected in zip(source, series, strict=True):
        for name, wanted in (("ct", expected), ("tc", expected.T), ("large", expected), ("deep", [expected] * 2)):
            assert record[name].dtype == (np.int16 if name == "large" else np.float32)
            assert record[name].shape == np.shape(wanted)
            np.testing.assert_array_equal(record[name], wanted)
        assert record["flags"].dtype == bool and record["flags"].tolist() == [[True, False]]
        record["ct"][:] = -1  # the reader's own
    np.testing.assert_array_equal(source[2]["ct"], series[2])


def ray_field(name: str, storage: Any, kind: str, described: bytes = b"") -> Any:
    """A column as Ray Data writes it, for a process that does not know Ray's types."""
    about = {b"ARROW:extension:name": b"ray.data.arrow_" + kind.encode(), b"ARROW:extension:metadata": described}
    return pa.field(name, storage, metadata=about)


class Grid(pa.ExtensionType):  # type: ignore[misc]
    """As `datasets` registers a type, in processes that import it."""

    def __init__(self) -> None:
        super().__init__(pa.list_(pa.int64()), "tests.grid")

    def __arrow_ext_serialize__(self) -> bytes:
        return b""

    @classmethod
    def __arrow_ext_deserialize__(cls, storage: Any, described: bytes) -> Grid:
        return cls()


def test_tensors_are_arrays_of_their_shape_whatever_types_a_process_knows(tmp_path: Path) -> None:
    numbers = pa.array([range(6), range(6, 12)], pa.large_list(pa.uint8()))
    fixed = pa.fixed_shape_tensor(pa.uint8(), (3, 2))
    grid = pa.array([[1, 2], [3]], pa.list_(pa.int64()))
    schema = pa.schema(
        [
            ray_field("ray", numbers.type, "tensor_v2", b"[3, 2]"),
            pa.field("arrow", fixed),
            pa.field("grid", Grid()),
        ]
    )
    arrow, own = (
        pa.ExtensionArray.from_storage(kind, values.cast(kind.storage_type))
        for kind, values in ((fixed, numbers), (Grid(), grid))
    )
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table([numbers, arrow, own], schema=schema), path)
    pa.register_extension_type(Grid())
    try:
        registered, where_known = sources.parquet(path), sources.parquet(path)[1]
    finally:
        pa.unregister_extension_type("tests.grid")
    source = sources.parquet(path)
    assert source.identity() == registered.identity() and source.column("ray").shape == (2, 3, 2)
    for record in (source[1], where_known):
        assert record["ray"].dtype == record["arrow"].dtype == np.uint8
        assert record["ray"].tolist() == record["arrow"].tolist() == [[6, 7], [8, 9], [10, 11]]
        assert record["grid"].tolist() == [3]
    with_null = pa.table([pa.array([None, range(6)], numbers.type)], schema=pa.schema([schema.field("ray")]))
    pq.write_table(with_null, tmp_path / "null.parquet")
    source = sources.parquet(tmp_path / "null.parquet")
    assert source[1]["ray"].tolist() == [[0, 1], [2, 3], [4, 5]]
    with pytest.raises(SampleError, match="column 'ray' is null"):
        source[0]
    uneven = pa.array([[1, 2, 3], [4], [5, 6]], pa.list_(pa.int64()))  # of the right number in all
    schema = pa.schema([ray_field("x", uneven.type, "tensor", b"[2]")])
    pq.write_table(pa.table([uneven], schema=schema), tmp_path / "uneven.parquet")
    source = sources.parquet(tmp_path / "uneven.parquet")
    assert source[2]["x"].tolist() == [5, 6]
    for read in (lambda: source[0], lambda: source.column("x")):
        with pytest.raises((SampleError, PipelineError)):
            read()
    other = tmp_path / "b.parquet"
    pq.write_table(
        pa.table([numbers], schema=pa.schema([ray_field("ray", numbers.type, "tensor", b"[6]")])), other
    )
    with pytest.raises(PipelineError, match=r"'ray' is .* of shape \[6\], not .* of shape \[3, 2\], unlike in"):
        sources.parquet([path, other], columns="ray")


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        (ray_field("x", pa.binary(), "pickled_object"), b"cos\nsystem\n.", "pickled Python objects"),
        (
            ray_field("x", pa.struct({"data": pa.list_(pa.int8())}), "variable_shaped_tensor", b"2"),
            {"data": [1]},
            "tensors of unequal shapes",
        ),
        (
            ray_field("x", pa.list_(pa.string()), "tensor", b"[1]"),
            ["a"],
            "tensors stored as list<element: string>",
        ),
        (ray_field("x", pa.list_(pa.int8()), "tensor", b"\x80\x05K\x01\x85."), [1], "of an unknown shape"),
        (pa.field("x", pa.fixed_shape_tensor(pa.int8(), (1, 1), permutation=[1, 0])), [1], "with permuted axes"),
    ],
)
def test_columns_that_are_no_arrays_of_one_shape_are_refused_when_the_source_is_made(
    tmp_path: Path, field: Any, value: Any, reason: str
) -> None:
    path = tmp_path / "a.parquet"
    values = pa.array([value], getattr(field.type, "storage_type", field.type))
    if isinstance(field.type, pa.BaseExtensionType):
        values = pa.ExtensionArray.from_storage(field.type, values)
    pq.write_table(pa.table([values, pa.array([1])], schema=pa.schema([field, pa.field("y", pa.int64())])), path)
    with pytest.raises(PipelineError, match=rf"a\.parquet: column 'x' has .*{reason}"):
        sources.parquet(path)
    assert sources.parquet(path, columns="y")[0] == {"y": 1}


def test_only_the_asked_columns_are_read(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", images(3))
    assert sources.parquet(path, columns=("label",))[1] == {"label": 1}
    source = sources.parquet(path, columns="label")
    assert source[1] == {"label": 1} and source.identity() != sources.parquet(path).identity()


@pytest.mark.filterwarnings("ignore:.*rows were decoded")
def test_the_cache_stays_within_its_limit_and_changes_nothing(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", {"x": np.arange(1000), "y": [f"text {i}" for i in range(1000)]}, 100)
    source = sources.parquet(path, cache_bytes=6000)
    numbers = sources.parquet(path, "x")
    assert list(Pipeline(numbers.take(500)).fields) == ["x"] and numbers._cache.size == 0, "none is kept for these"
    for i in np.random.default_rng(1).permutation(1000).tolist():
        assert source[i] == {"x": i, "y": f"text {i}"}
        assert source._cache.size <= 6000 and len(source._cache._held) >= 1
    assert sources.parquet(path).identity() == source.identity()


@pytest.mark.filterwarnings("ignore:This process")
def test_a_forked_child_reads_what_its_parent_has_and_has_not_read(tmp_path: Path) -> None:
    source = sources.parquet(write(tmp_path / "a.parquet", {"x": np.arange(100)}, 10))
    source[3]
    source._cache._lock.__enter__()  # as if another thread of the parent were reading when it forks
    try:
        context = multiprocessing.get_context("fork")
        receive, send = context.Pipe(duplex=False)
        child = context.Process(target=lambda: send.send([int(source[i]["x"]) for i in (3, 55, 99)]), daemon=True)
        child.start()
        assert receive.poll(300)
        assert receive.recv() == [3, 55, 99]
        child.join(300)
    finally:
        source._cache._lock.__exit__()
    assert source[99] == {"x": 99}


def bytes_as_array(sample: dict[str, Any]) -> dict[str, Any]:
    return {"label": sample["label"], "image": np.frombuffer(sample["image"], np.uint8)}


def test_a_group_of_bad_records_is_decoded_once_to_find_the_first_good_one(tmp_path: Path) -> None:
    rows = [None] * 30 + [bytes(50)] * 30
    table = pa.table({"image": pa.array(rows, pa.binary()), "label": list(range(60))})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=60)
    source = sources.parquet(tmp_path / "a.parquet", columns=("image", "label"))
    decode, groups = source._decode, list[int]()
    source._decode = lambda group: (groups.append(group), decode(group))[1]
    sample = prepare_first_sample(Pipeline(source, on_error="skip", max_skipped=1.0).map(bytes_as_array))
    assert sample["label"] == 30 and groups == [0]
    assert source._cache.size == 0, "what was decoded is not kept"


def varint(value: int, length: int = 0) -> bytes:
    """A signed integer as Parquet's metadata have it; of so many bytes at least."""
    value *= 2
    parts = [value >> shift & 0x7F for shift in range(0, max(value.bit_length(), 7 * length, 1), 7)]
    return bytes([*(part | 0x80 for part in parts[:-1]), parts[-1]])


def test_row_groups_and_pages_that_claim_more_than_they_hold_are_not_decoded(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"

    def write_claiming(rows: Any, before: bytes, after: bytes, **options: Any) -> None:
        """Replaces what the first page says, or all over the file's end, whose length follows it."""
        pq.write_table(pa.table({"x": rows}), path, compression="none", store_schema=False, **options)
        data = path.read_bytes()
        (length,) = struct.unpack("<I", data[-8:-4])
        pages, end = data[: -8 - length].replace(before, after, 1), data[-8 - length : -8].replace(before, after)
        assert pages + end != data[:-8]
        path.write_bytes(pages + end + struct.pack("<I", len(end)) + b"PAR1")

    write_claiming([7] * 70_000, b"\x16" + varint(70_000), b"\x16" + varint(1 << 40))
    with pytest.raises(SampleError, match=r"a\.parquet:row 5\): .* 1099511627776 rows, 8\.19e\+03 GiB"):
        sources.parquet(path)[5]
    for version in ("1.0", "2.0"):
        claim = b"\x15" + varint(70_005), b"\x15" + varint(1_000_000, 3)
        write_claiming([[7] * 70_000, [8] * 5], *claim, use_dictionary=False, data_page_version=version)
        with pytest.raises(SampleError, match=r"a\.parquet:row 0\): cannot be read: .* do not match num_values"):
            sources.parquet(path)[0]


def test_pages_of_every_kind_are_read_as_they_are(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    lists = [rng.integers(0, 99, size).tolist() for size in rng.integers(0, 50, 3000)]
    texts = [[str(i)] * (i % 4) for i in range(3000)]
    table = pa.table({"x": lists, "t": texts, "n": pa.array([None, *range(2999)])})
    for version in ("1.0", "2.0"):
        for options in ({"compression": "snappy"}, {"use_dictionary": False, "write_statistics": False}):
            path = tmp_path / f"{version}{len(options)}.parquet"
            sizes = {"data_page_size": 2000, "row_group_size": 1000}
            pq.write_table(table, path, data_page_version=version, **sizes, **options)
            source = sources.parquet(path, ("x", "t"))
            assert [row["x"].tolist() for row in source] == lists


def test_bytes_of_all_lengths_are_read_as_arrow_reads_them(tmp_path: Path) -> None:
    values = [b"", b"a", b"bc" * 500, b"", b"d"]
    kinds = (pa.binary(), pa.large_binary(), pa.string())
    for kind, column in itertools.product(kinds, ([*values, None], values, [b"", b""])):
        array = pa.array(column, kind)
        source = sources.parquet(write(tmp_path / "a.parquet", {"x": array}, 2))
        for index, value in enumerate(array.drop_null().to_pylist()):
            assert source[index]["x"] == value and type(source[index]["x"]) is type(value)
