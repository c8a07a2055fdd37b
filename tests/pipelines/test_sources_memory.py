"""Sources in memory and in maps of files, parts of them, and what all of them have."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelines import sources
from pipelines.errors import PipelineError, SampleError
from pipelines.ipc import memory_pickle
from pipelines.sources._strings import Strings


def test_columns_keep_their_values_and_ragged_lists_are_of_one_dtype() -> None:
    mixed = ["one", b"two", None]
    series = [np.zeros((2, n), np.float32) for n in (3, 0, 5)]
    source = sources.arrays(ids=[[1, 2], [], [3.5]], series=series, x=mixed, data=(b"1", b"2", b""))
    assert [source[i]["ids"].dtype for i in range(3)] == [np.float64] * 3
    assert [(row["series"].shape, row["series"].dtype) for row in source] == [((2, n), "f4") for n in (3, 0, 5)]
    assert [row["x"] for row in source] == mixed and [row["data"] for row in source] == [b"1", b"2", b""]
    assert sources.arrays(ids=[[1, 2], []])[1]["ids"].dtype == np.int64


def test_identity_of_arrays_is_their_content_or_the_given_id() -> None:
    def name(**columns: Any) -> str:
        return json.dumps(sources.arrays(**columns).identity())

    images, labels = np.arange(10 * 3 * 64).reshape(10, 3, 8, 8).astype(np.uint8), np.arange(10)
    same, changed = name(image=images, label=labels), images.copy()
    assert name(image=np.asfortranarray(images), label=labels.copy()) == same
    changed[9, 0, 0, 0] ^= 1
    columns: list[dict[str, Any]] = [{"image": changed, "label": labels}, {"image": images, "target": labels}]
    columns += [{"image": images, "label": labels.astype(np.int32)}, {"x": labels, "id": "mine"}]
    columns += [{"text": text} for text in (["ab", "c"], ["a", "bc"], [b"a", b"bc"])]
    columns += [{"rows": rows} for rows in ([[1], [2, 3]], [[1, 2], [3]])]
    assert len({same, *(name(**options) for options in columns)}) == len(columns) + 1
    assert name(x=labels, id="mine") == name(x=labels + 1, id="mine")
    for n in (0, -1, 11):
        with pytest.raises(PipelineError, match=r"take\(.*\) of a source of 10 records"):
            sources.arrays(x=labels).take(n)


class Pairs(list[Any]):
    """A map-style Dataset."""


def test_items_of_a_dataset_become_records_of_its_readers_own() -> None:
    assert sources.dataset(Pairs([{"a": 1}]))[0] == {"a": 1}
    assert sources.dataset(Pairs([("pixels", 5)]))[0] == {"image": "pixels", "label": 5}
    assert sources.dataset(Pairs([(1, 2, 3)]), names=("x", "y", "z"))[0] == {"x": 1, "y": 2, "z": 3}
    assert sources.dataset(Pairs([5]), names=("x",))[0] == {"x": 5}
    subset = type("Subset", (Pairs,), {})  # called as one of torch's
    assert sources.dataset(subset([{"a": 1}])).where(0) == "Subset[0]"
    assert sources.dataset(Pairs([{"a": 1}] * 4)).take(2).identity() is None
    one, same = (sources.dataset(Pairs([{}]), id="pairs").identity() for _ in range(2))
    assert one == same is not None and sources.dataset(Pairs([{}])).identity() is None
    torch = pytest.importorskip("torch")
    data = torch.utils.data.TensorDataset(torch.zeros(4, 2), torch.arange(4))
    record = sources.dataset(data)[1]
    assert isinstance(record["image"], np.ndarray) and int(record["label"]) == 1
    record["image"][:] = 5
    assert float(data[1][0].sum()) == 0


def test_tensors_that_numpy_cannot_hold_are_converted_exactly() -> None:
    torch = pytest.importorskip("torch")
    half = torch.full((2, 3), 1.5, dtype=torch.bfloat16)
    columns = {"half": half, "graph": torch.ones(2, requires_grad=True), "alike": [half[0], half[1]]}
    columns |= {"scalar": list(half[0, :2]), "ragged": [half[0], half[1, :1]]}
    columns |= {"int": torch.arange(4).reshape(2, 2)}
    source = sources.arrays(**columns, unmasked=np.ma.array([1, 2]))
    assert [value.tolist() for value in source[1].values()] == [[1.5] * 3, 1, [1.5] * 3, 1.5, [1.5], [2, 3], 2]
    assert source.columns["alike"].shape == (2, 3) and source.columns["scalar"].shape == (2,)
    assert [value.dtype.name for value in source[1].values()] == ["float32"] * 5 + ["int64"] * 2
    assert sources.dataset(Pairs([{"x": half}]))[0]["x"].dtype == np.float32


def test_parts_of_parts_read_the_first_source_and_its_errors_carry_the_index_in_the_part() -> None:
    class Odd(Pairs):
        def __getitem__(self, index: Any) -> Any:
            if index % 2:
                raise ValueError("odd")
            return {"number": index}

    whole = sources.dataset(Odd(range(100)), id="odd")
    part = whole.split(0.5, seed=1)[0].take(20)
    assert isinstance(part, sources.Subset) and part.source is whole
    bad = next(i for i in range(len(part)) if part.indices[i] % 2 and part.indices[i] != i)
    with pytest.raises(SampleError) as caught:
        part[bad]
    assert caught.value.index == bad
    assert caught.value.where == part.where(bad) == f"Odd[{part.indices[bad]}]"
    assert "odd" in caught.value.reason and isinstance(caught.value.__cause__, ValueError)


any_text = st.text(st.characters(exclude_categories=()))  # lone surrogates, as odd file names have


@given(st.lists(any_text) | st.lists(st.binary()))
def test_strings_are_the_sequence_that_they_were_made_of(values: list[Any]) -> None:
    for made in (Strings(values), pickle.loads(pickle.dumps(Strings(values)))):
        assert list(made) == values and len(made) == len(values)
        assert [made[i - len(values)] for i in range(len(values))] == values
        assert made[1:3] == values[1:3]
        for outside in (len(values), -len(values) - 1):
            with pytest.raises(IndexError):
                made[outside]


def test_a_process_maps_texts_where_they_are() -> None:
    n = 50_000
    texts = [f"text {i}" for i in range(n)]
    source = sources.arrays(text=texts, raw=np.array([t.encode() for t in texts]), label=np.arange(n))
    fd = memory_pickle.dump(source)
    try:
        copy = memory_pickle.load(fd)
        header = int.from_bytes(os.pread(fd, 8, 8), "little")
        assert header < 3000, "bytes of the pickle itself"
        assert copy[n - 1] == {"text": f"text {n - 1}", "raw": f"text {n - 1}".encode(), "label": n - 1}
        assert copy.identity() == source.identity()
    finally:
        os.close(fd)


WIDE = np.arange(24).reshape(4, 3, 2)


def save(path: Path, array: Any) -> Path:
    np.save(path, array)
    return path


def test_rows_are_those_of_the_array_in_native_byte_order(tmp_path: Path) -> None:
    arrays = [
        WIDE,
        np.asfortranarray(WIDE),
        WIDE.astype(">f8"),
        WIDE.astype(">i4")[:, 0, 0],
        np.array([1.5], "f2"),
    ]
    arrays += [np.array([True, False]), np.array([1j, 2]), np.array(["2024-01-01"], "M8[D]"), np.zeros((3, 0))]
    for number, array in enumerate(arrays):
        source = sources.memmap(x=save(tmp_path / f"{number}.npy", array))
        copy = pickle.loads(pickle.dumps(source))
        assert len(source) == len(array) and copy.identity() == source.identity()
        for index, row in enumerate(array):
            for value in (source[index]["x"], copy[index]["x"]):
                assert np.array_equal(value, row) and value.dtype == array.dtype.newbyteorder("=")
        assert np.array_equal(source.column("x"), array)


def test_structured_elements_and_texts_are_values_of_python_and_views_are_places_in_a_file(tmp_path: Path) -> None:
    dtype = [("n", [("q", ">i2")]), ("v", "u1", 2), ("t", "U2")]
    structured = np.array([((1,), [1, 2], "a"), ((2,), [3, 4], "bc")], dtype)
    texts = save(tmp_path / "t.npy", np.array(["a", "bcd"]))
    second = sources.memmap(x=save(tmp_path / "x.npy", structured), text=texts)[1]
    assert second["text"] == "bcd" and type(second["text"]) is str
    assert (second["x"]["n"], second["x"]["v"].tolist(), second["x"]["t"]) == ({"q": 2}, [3, 4], "bc")
    np.array([(1, 2.5), (3, 4.5)], [("n", ">i2"), ("v", "f4")]).tofile(tmp_path / "raw.bin")
    mapped = np.memmap(tmp_path / "raw.bin", [("n", ">i2"), ("v", "f4")], "r")
    for source in (sources.arrays(x=mapped), sources.memmap(x=mapped)):
        assert source[1]["x"] == {"n": 3, "v": 4.5}
        for column in (source.column("x"), pickle.loads(pickle.dumps(source)).column("x")):
            assert column.dtype == [("n", "i2"), ("v", "f4")] and column.tolist() == [(1, 2.5), (3, 4.5)]
    written = np.memmap(tmp_path / "new.bin", np.int16, "w+", shape=(5, 4))
    whole = written[:] = np.arange(20, dtype=np.int16).reshape(5, 4)
    source = pickle.loads(pickle.dumps(sources.memmap(part=written[1:4], back=written[:1:-1, ::2])))
    assert np.array_equal(source.column("part"), whole[1:4]), "what was written into the map"
    assert np.array_equal([record["back"] for record in source], whole[:1:-1, ::2])
    assert source.where(2) == f"{tmp_path}/new.bin:row 2"


@pytest.mark.parametrize("keeps_a_link", [False, True])
def test_a_file_that_was_replaced_since_is_not_read_instead(tmp_path: Path, keeps_a_link: bool) -> None:
    values = np.zeros(100_000)
    values[50_000] = 1
    mapped = np.load(save(tmp_path / "x.npy", values), mmap_mode="r")
    if keeps_a_link:
        os.link(tmp_path / "x.npy", tmp_path / "link.npy")
    values[50_000] = 2
    os.replace(save(tmp_path / "y.npy", values), tmp_path / "x.npy")
    with pytest.raises(PipelineError, match="is not in a file"):
        sources.memmap(x=mapped)
    source = sources.arrays(x=mapped)
    for each in (source, pickle.loads(pickle.dumps(source))):
        assert each.column("x")[50_000] == each[50_000]["x"] == 1
    assert source.identity() != sources.arrays(x=values).identity()


def test_columns_of_pandas_in_different_orders_are_refused() -> None:
    pandas = pytest.importorskip("pandas")
    table = pandas.DataFrame({"x": np.arange(9.0), "y": np.arange(9)})
    shuffled = table.sample(frac=1, random_state=0)
    with pytest.raises(PipelineError, match=r"'y'.*another order.*'x'.*to_numpy"):
        sources.arrays(x=table["x"], y=shuffled["y"])
    alike = sources.arrays(x=shuffled[["x"]], y=shuffled["y"])
    assert all(record["x"][0] == record["y"] for record in alike)
    assert len(sources.arrays(x=table["x"], y=shuffled["y"].to_numpy())) == 9


def test_a_pointer_of_git_lfs_is_no_data(tmp_path: Path) -> None:
    (path := tmp_path / "x.csv").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 12\n")
    with pytest.raises(PipelineError, match="git lfs pull"):
        sources.csv(path)
