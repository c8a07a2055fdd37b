"""hdf5(): data sets of every layout and type; links, user blocks, damage, and what lies in other files."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipelines import sources
from pipelines.errors import PipelineError, SampleError
from pipelines.sources import Source

h5py = pytest.importorskip("h5py")
N = 6


def write(path: Path, **data: Any) -> Path:
    with h5py.File(path, "w") as file:
        for name, values in data.items():
            file[name] = values
    return path


def values(source: Source, field: str) -> list[Any]:
    """A field of all records, which a pickled copy reads, too."""
    copy = pickle.loads(pickle.dumps(source))
    found = [record[field] for record in source]
    assert [repr(record[field]) for record in copy] == list(map(repr, found))
    return found


def test_a_data_set_in_chunks_and_one_in_one_piece_are_read_alike(tmp_path: Path) -> None:
    wide = np.arange(N * 4, dtype=">i4").reshape(N, 4)
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["plain"] = wide
        file.create_dataset("packed", data=wide, chunks=(4, 3), compression="gzip", shuffle=True, fletcher32=True)
        file.create_dataset("never_written", (N, 2), "f4", fillvalue=7)
    source = sources.hdf5(tmp_path / "a.h5")
    assert list(source.columns) == ["never_written", "packed", "plain"]
    for name in ("plain", "packed"):
        found = values(source, name)
        assert found[0].dtype == np.int32 and np.array_equal(found, wide)
    assert np.array_equal(values(source, "never_written"), np.full((N, 2), 7, np.float32))
    assert source.groups is not None and source.groups.tolist() == [0, 4, 6]
    found = source[1]["plain"]
    found[:] = -1
    assert source[1]["plain"].tolist() == [4, 5, 6, 7], "a record may be changed"


def test_values_are_of_the_files_types(tmp_path: Path) -> None:
    texts, dtype = ["a", "é", "", "d", "e", "f"], [("a", "i2"), ("b", ">f8"), ("s", "S1")]
    compound = np.array([(i, i / 2, b"q") for i in range(N)], dtype)
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["text"], file["compound"], file["flag"] = texts, compound, np.arange(N) % 2 == 0
        file["fixed"] = np.array([b"aa", b"b", b"", b"d", b"e", b"f"], "S3")
        ragged = file.create_dataset("ragged", (N,), h5py.vlen_dtype("f4"))
        for row in range(N):
            ragged[row] = np.arange(row)
        file.create_dataset("words", data=np.array([["x", "y"]] * N, object), dtype=h5py.string_dtype())
    source = sources.hdf5(tmp_path / "a.h5")
    assert values(source, "text") == texts and values(source, "fixed") == ["aa", "b", "", "d", "e", "f"]
    assert [row.tolist() for row in values(source, "ragged")] == [list(range(row)) for row in range(N)]
    third = values(source, "compound")[2]
    assert (third["a"], third["a"].dtype, third["b"], third["b"].dtype, third["s"]) == (2, "i2", 1, "f8", b"q")
    assert values(source, "ragged")[2].dtype == np.float32
    assert values(source, "flag")[:2] == [True, False] and values(source, "words")[0] == ["x", "y"]


def test_links_inside_the_file_are_names_as_any(tmp_path: Path) -> None:
    path = write(tmp_path / "a.h5", **{"deep/x": np.arange(N)})
    with h5py.File(path, "a") as file:
        file["soft"] = h5py.SoftLink("/deep/x")
        file["hard"] = file["deep/x"]
    with h5py.File(path, "r"):
        source = sources.hdf5(path, {"a": "soft", "b": "hard", "c": "/deep/x"})
        assert [int(source[3][name]) for name in "abc"] == [3, 3, 3], "also while it is open"


def test_a_file_with_a_user_block_as_matlab_writes_it_is_mapped_at_the_right_place(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.mat", "w", userblock_size=512) as file:
        file["x"] = np.arange(N)
        file["after"] = np.arange(1000)[:N] * 7
    source = sources.hdf5(tmp_path / "a.mat")
    assert source.groups is None, "both are mapped"
    assert values(source, "x") == list(range(N)) and values(source, "after") == [7 * i for i in range(N)]


def test_a_damaged_chunk_is_a_sample_error_of_its_rows_alone(tmp_path: Path) -> None:
    path, x = tmp_path / "a.h5", np.random.default_rng(0).random((30, 50))
    with h5py.File(path, "w") as file:
        place = file.create_dataset("x", data=x, chunks=(10, 50), compression="gzip").id.get_chunk_info(1)
    with path.open("r+b") as damaged:
        damaged.seek(place.byte_offset)
        damaged.write(bytes(40))
    source = sources.hdf5(path)
    assert np.array_equal([source[i]["x"] for i in (0, 9, 20, 29)], x[[0, 9, 20, 29]])
    for row in (10, 15, 19):
        with pytest.raises(SampleError, match=rf"sample {row} \({path}:row {row}\): cannot be read"):
            source[row]


def test_several_files_follow_each_other_and_must_be_alike(tmp_path: Path) -> None:
    write(tmp_path / "1.h5", x=np.arange(4, dtype="i4"), y=np.arange(4))
    with h5py.File(write(tmp_path / "2.h5", y=np.arange(4, 7)), "a") as file:
        file.create_dataset("x", data=np.arange(4, 7, dtype="i4"), chunks=(2,))
    source = sources.hdf5(str(tmp_path / "[12].h5"))
    assert values(source, "x") == values(source, "y") == list(range(7))
    assert source.where(5) == f"{tmp_path}/2.h5:row 1"
    write(tmp_path / "4.h5", y=np.arange(2))
    with pytest.raises(PipelineError, match=r"4\.h5: has no data set 'x'"):
        sources.hdf5([tmp_path / "1.h5", tmp_path / "4.h5"])


def test_packed_numbers_are_refused(tmp_path: Path) -> None:
    with h5py.File(write(tmp_path / "1.h5", t=np.arange(4, dtype="i2")), "a") as file:
        file["t"].attrs["scale_factor"] = 0.01
    with pytest.raises(PipelineError, match=r"'t' are packed, by its scale_factor.*xarray"):
        sources.hdf5(tmp_path / "1.h5")
