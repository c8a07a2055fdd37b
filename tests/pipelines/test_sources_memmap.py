"""memmap(): arrays in files, of any layout and type, without a copy."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipelines import sources
from pipelines.errors import PipelineError

WIDE = np.arange(24).reshape(4, 3, 2)


def save(path: Path, array: Any) -> Path:
    np.save(path, array)
    return path


@pytest.mark.parametrize(
    "array",
    [
        WIDE,
        np.asfortranarray(WIDE),
        WIDE.astype(">f8"),
        WIDE.astype(">i4")[:, 0, 0],
        np.array([1.5, 2.5], np.float16),
        np.array([True, False]),
        np.array([1j, 2]),
        np.array(["2024-01-01", "2024-02-01"], "M8[D]"),
        np.zeros((3, 0)),
    ],
    ids=lambda array: f"{array.dtype.str}{list(array.shape)}{'F' if array.flags.fnc else ''}",
)
def test_rows_are_those_of_the_array_in_native_byte_order(tmp_path: Path, array: Any) -> None:
    source = sources.memmap(x=save(tmp_path / "x.npy", array))
    copy = pickle.loads(pickle.dumps(source))
    assert len(source) == len(array)
    for index, row in enumerate(array):
        for found in (source[index]["x"], copy[index]["x"]):
            assert np.array_equal(found, row) and found.dtype == array.dtype.newbyteorder("=")
            assert found.dtype.isnative
    assert np.array_equal(source.column("x"), array)
    assert copy.identity() == source.identity()


def test_texts_and_structured_elements_are_values_of_python(tmp_path: Path) -> None:
    made = np.array(
        [((1,), [1, 2], "a"), ((2,), [3, 4], "bc")], [("n", [("q", "i2")]), ("v", "u1", 2), ("t", "U2")]
    )
    source = sources.memmap(
        x=save(tmp_path / "x.npy", made), text=save(tmp_path / "t.npy", np.array(["a", "bcd"]))
    )
    second = source[1]
    assert second["text"] == "bcd" and type(second["text"]) is str
    assert (second["x"]["n"], second["x"]["v"].tolist(), second["x"]["t"]) == ({"q": 2}, [3, 4], "bc")


def test_views_of_a_raw_file_are_places_in_it(tmp_path: Path) -> None:
    whole = np.arange(20, dtype=np.int16).reshape(5, 4)
    whole.tofile(tmp_path / "raw.bin")
    mapped = np.memmap(tmp_path / "raw.bin", np.int16, "r", shape=(5, 4))
    source = pickle.loads(pickle.dumps(sources.memmap(part=mapped[1:4], back=mapped[:1:-1, ::2])))
    assert np.array_equal(source.column("part"), whole[1:4])
    assert np.array_equal([record["back"] for record in source], whole[:1:-1, ::2])
    assert source.where(2) == f"{tmp_path}/raw.bin:row 2"


def test_what_was_written_into_a_map_is_read(tmp_path: Path) -> None:
    mapped = np.memmap(tmp_path / "raw.bin", np.int32, "w+", shape=(5,))
    mapped[:] = range(5)
    assert [record["x"] for record in pickle.loads(pickle.dumps(sources.memmap(x=mapped)))] == list(range(5))


def test_a_record_may_be_changed_and_the_file_stays(tmp_path: Path) -> None:
    source = sources.memmap(x=save(tmp_path / "x.npy", WIDE))
    source[0]["x"][:] = -1
    assert np.array_equal(source[0]["x"], WIDE[0]) and np.array_equal(np.load(tmp_path / "x.npy"), WIDE)


def test_what_cannot_be_mapped_is_refused_with_what_to_do(tmp_path: Path) -> None:
    save(tmp_path / "x.npy", np.arange(100))
    whole = (tmp_path / "x.npy").read_bytes()
    (tmp_path / "cut.npy").write_bytes(whole[:-8])
    (tmp_path / "raw.bin").write_bytes(bytes(64))
    np.savez(tmp_path / "x.npz", x=np.arange(3))
    np.save(tmp_path / "objects.npy", np.array([1, "a"], object), allow_pickle=True)
    for column, said in (
        (tmp_path / "cut.npy", r"cut\.npy'\): is no \.npy file that can be mapped"),
        (tmp_path / "raw.bin", r"no \.npy header; give a raw file as np\.memmap\(path, dtype"),
        (tmp_path / "x.npz", r"is an archive of arrays"),
        (tmp_path / "objects.npy", "Python objects"),
        (tmp_path / "nowhere.npy", "no such file"),
        (save(tmp_path / "one.npy", np.array(5)), "records along the first axis"),
        (save(tmp_path / "none.npy", np.empty((0, 3))), "holds no record: x 0"),
        (np.arange(5), "data in memory are for arrays"),
        (np.memmap(tmp_path / "raw.bin", "u1", "c"), "is not in a file"),
    ):
        with pytest.raises(PipelineError, match=said):
            sources.memmap(x=column)
    with pytest.raises(PipelineError, match="differ in length: x 100, y 1"):
        sources.memmap(x=tmp_path / "x.npy", y=save(tmp_path / "y.npy", np.arange(1)))
    with pytest.raises(PipelineError, match="no column was given"):
        sources.memmap()


def test_whatever_byte_of_the_header_is_damaged_the_error_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "a.npy"
    np.save(path, np.arange(12).reshape(4, 3))
    whole = path.read_bytes()
    refused: list[str] = []
    for place in range(128):
        for byte in (0, ord("("), ord("'"), 255):
            path.write_bytes(whole[:place] + bytes([byte]) + whole[place + 1 :])
            try:
                sources.memmap(x=path)
            except PipelineError as error:
                refused.append(str(error))
    assert len(refused) > 100 and all(str(path) in said for said in refused)
