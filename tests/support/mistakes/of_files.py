"""Mistakes in files of rows and records: CSV, JSON lines, Parquet, HDF5, tar, Datasets of Hugging Face."""

from __future__ import annotations

import gzip
import io
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from kit.mistakes import Mistake

from mistakes.of_sources import bad_record, wrong
from pipelines import sources


def read(kind: str, content: str | bytes, **options: Any) -> Callable[[Path], Any]:
    """What reads a file with this content."""

    def open_file(folder: Path) -> Any:
        path = folder / f"a.{kind}"
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return getattr(sources, kind)(path, **options)

    return open_file


def read_several(kind: str, *contents: bytes) -> Callable[[Path], Any]:
    """What reads a file for each of these contents, called 0, 1 ..."""

    def open_files(folder: Path) -> Any:
        for number, content in enumerate(contents):
            (folder / f"{number}.{kind}").write_bytes(content)
        return getattr(sources, kind)(str(folder / f"*.{kind}"))

    return open_files


def make_parquet(**columns: Any) -> bytes:
    import pyarrow
    import pyarrow.parquet

    file = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table(columns), file)
    return file.getvalue()


def make_tar(*members: tuple[str, bytes]) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return file.getvalue()


def make_link() -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        info = tarfile.TarInfo("b.jpg")
        info.type, info.linkname = tarfile.LNKTYPE, "a.jpg"
        archive.addfile(info)
    return file.getvalue()


def give_open_file(kind: str) -> Callable[[Path], Any]:
    def give(folder: Path) -> Any:
        (folder / "a").write_bytes(b"a\n1\n")
        with open(folder / "a") as file:
            return getattr(sources, kind)(file)

    return give


KINDS = ("csv", "jsonl", "parquet", "tar", "hdf5")
PATHS = [
    row
    for kind in KINDS
    for row in (
        wrong(
            f"{kind}: missing", lambda folder, k=kind: getattr(sources, k)(folder / "none"), "none", "no such file"
        ),
        wrong(f"{kind}: a folder", lambda folder, k=kind: getattr(sources, k)(folder), "is a folder"),
        wrong(f"{kind}: no match", lambda folder, k=kind: getattr(sources, k)(f"{folder}/x*"), "matches no file"),
        wrong(f"{kind}: no path", lambda folder, k=kind: getattr(sources, k)([]), "no path"),
        wrong(
            f"{kind}: a number", lambda folder, k=kind: getattr(sources, k)([1]), "needs the path of a file", "got"
        ),
        wrong(f"{kind}: an open file", give_open_file(kind), "needs the path of a file, or several, got"),
        wrong(f"{kind}: twice", lambda folder, k=kind: twice(folder, k), "given twice"),
    )
]


def twice(folder: Path, kind: str) -> Any:
    (folder / "a").write_bytes(b"a\n1\n")
    return getattr(sources, kind)([folder / "a"] * 2)


# --- csv and jsonl

ZIP = b"PK\x03\x04" + bytes(100)
CSV = [
    wrong(f"csv: {what}", read("csv", content, **options), "a.csv", *words)
    for what, content, options, *words in (
        ("two columns of one name", "a,a\n1,2\n", {}, "two columns are called 'a'"),
        ("no such column", "a,b\n1,2\n", {"columns": ["c"]}, "no column 'c' (it has: a, b)"),
        ("no record", "a,b\n", {}, "holds no record"),
        ("empty", "", {}, "is empty"),
        ("gzip", gzip.compress(b"a,b\n1,2\n"), {}, "is compressed with gzip", "decompress it"),
        ("zip", ZIP, {}, "is compressed with zip"),
        ("semicolons", "a;b\n1;2\n", {}, "the header is one column", "give delimiter="),
        ("tabs", "a\tb\n1\t2\n", {}, "the header is one column", "give delimiter="),
        ("bars", "a|b\n1|2\n", {}, "the header is one column", "give delimiter="),
        ("an open quote", 'a,b\n3,"x\n4,y', {}, "opens a quoted field that is never closed", "quote=None"),
        ("open elsewhere", 'a,b\n1,2\n,"x\n3,4\n', {"columns": ["a"]}, "a quoted field that is never closed"),
        (
            *("open, missing values", 'a,b\n1,2\nNA,"x\n3,4\n', {"columns": ["a"], "missing": "nan"}),
            "a quoted field that is never closed",
        ),
        ("a short row", "a,b\n1,x\n3\n", {}, "Row #3: Expected 2 columns, got 1"),
        ("a long row", "a,b\n1,x\n4,z,9\n", {}, "Row #3: Expected 2 columns, got 3"),
        ("not UTF-8", b"a,b\n" + b"1,x\n" * 9000 + b"5,\xff\n", {}, "Row #9002: ", "UTF8"),
        ("no number", "a,b\n1,2\nunknown,2\n", {"columns": {"a": "int8"}}, "record 2", "invalid value 'unknown'"),
        ("a plus", "a,b\n+1,u\n", {"columns": {"a": "int64"}}, "int64: invalid value '+1'"),
        ("an underscore", "a,b\n6_0,u\n", {"columns": {"a": "int64"}}, "int64: invalid value '6_0'"),
        ("large", "a,b\n1e39,u\n", {"columns": {"a": "float32"}}, "'a' holds 1e+39, which float32 cannot hold: "),
        ("too large to halve", "a,b\n1e39,u\n", {"columns": {"a": "float16"}}, "which float16 cannot hold: "),
    )
] + [
    wrong(f"csv: {what}", read("csv", "a,b\n1,2\n", **options), words)
    for what, options, words in (
        ("a type", {"columns": {"a": "complex64"}}, "type of field 'a' must be"),
        ("no columns", {"columns": []}, "must name each column once"),
        ("a long delimiter", {"delimiter": "||"}, "delimiter must be one ASCII character"),
        ("a quote as delimiter", {"delimiter": '"'}, "delimiter and quote must differ"),
        ("missing=drop", {"missing": "drop"}, "missing must be 'error' or 'nan', got 'drop'"),
    )
]
CSV += [
    wrong("csv: heads", read_several("csv", b"a,b\n1,2\n", b"b,a\n1,2\n"), "1.csv begins with b, a", "0.csv with"),
    wrong("csv: no such field", lambda folder: read("csv", "a,b\n1,2\n")(folder).column("c"), "no field 'c'"),
    bad_record(
        "csv: a blank", lambda folder: read("csv", "x,y\n1,0\n ,0\n")(folder)[1], "record 2", "'x' is null"
    ),
]

BIG = '{"x": %s}\n{"x": 1.5}'
JSONL = [
    wrong(f"jsonl: {what}", read("jsonl", content, **options), words)
    for what, content, options, words in (
        ("no JSON", '{"x": 1}\n{bad', {}, "Missing a name for object member. in record 2"),
        ("lists", "[1, 2]\n[3]\n", {}, "object to array in record 1"),
        ("no field", "{}\n{}\n", {}, "no line is a JSON object with a field"),
        ("no lines", "\n\n", {}, "no line is a JSON object with a field"),
        ("gzip", gzip.compress(b'{"x": 1}'), {}, "a.jsonl: is compressed with gzip"),
        ("not UTF-8", '{"x": "é"}'.encode("latin1"), {}, "UTF8"),
        ("a text", '{"x": 1}\n{"x": "three"}', {}, "changed from number to string in record 2"),
        ("a text for a number", '{"x": "three"}', {"columns": {"x": "int16"}}, "number to string"),
        ("too large", '{"x": 300}', {"columns": {"x": "uint8"}}, "uint8, couldn't parse:300"),
        ("a boolean", '{"x": [1, true]}', {}, "number to boolean"),
        ("lists of lists", '{"x": [1]}\n{"x": [[1]]}', {}, "number to array"),
        ("20 digits", '{"x": 12345678901234567890}', {}, "declare its type"),
        ("2^53 + 1", BIG % 9007199254740993, {}, "'x' has numbers of 2"),
        ("2^53 + 1 in lists", '{"x": [[1.5], [9007199254740993]]}', {}, "'x' has numbers of 2"),
        (
            *("2^63 in a dict", '{"x": {"id": 9223372036854775808}}\n{"x": {"id": 9007199254740993}}', {}),
            "'x', 'id' in its dict, has numbers of 2",
        ),
        ("in dicts of a list", '{"x": [{"y": [2.5, 9007199254740993]}]}', {}, "'x', 'y' in its dict, has numbers"),
        ("no float32", '{"x": [1.0, 1e39]}', {"columns": {"x": "float32"}}, "which float32 cannot hold: "),
        ("no such field", '{"x": 1, "y": 2}', {"columns": ["z"]}, "has a field 'z' (it has: x, y)"),
        ("a type", '{"x": 1}', {"columns": {"x": "number"}}, "must be 'str', 'bool'"),
    )
]


def null_in_a_list(folder: Path) -> Any:
    return read("jsonl", '{"x": {"v": [null, 1]}}\n{"x": {"v": [3, 2]}}')(folder)[0]


JSONL += [bad_record("jsonl: a null", null_in_a_list, "column 'x' has a value 'v' that has a null in its list")]


# --- parquet, tar, hdf5

GOOD = make_parquet(image=[b"1", b"2"], label=[0, 1])


def rename_column() -> bytes:
    import pyarrow
    import pyarrow.parquet

    file = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table([pyarrow.array([1]), pyarrow.array([2])], names=["a", "a"]), file)
    return file.getvalue()


PARQUET = [
    wrong(f"parquet: {what}", do, *words)
    for what, do, *words in (
        ("no column", read("parquet", GOOD, columns=["x"]), "a.parquet", "no column 'x' (it has: image, label)"),
        ("none", read("parquet", GOOD, columns=[]), "columns must name"),
        ("no row", read("parquet", make_parquet(x=np.zeros(0))), "a.parquet: holds no row"),
        ("a text", read("parquet", "no parquet" * 100), "a.parquet: is no Parquet file, or is cut off"),
        ("one name", read("parquet", rename_column()), "a.parquet: two columns are called 'a'"),
        (
            *("other columns", read_several("parquet", GOOD, make_parquet(label=[1.0]))),
            *("1.parquet: has the columns label, but ", "0.parquet has image, label"),
        ),
        (
            *("another type", read_several("parquet", make_parquet(x=[1]), make_parquet(x=[1.0]))),
            *("1.parquet: column 'x' is double, not int64, unlike in ", "0.parquet"),
        ),
    )
] + [
    bad_record(f"parquet: {what}", lambda folder, c=column: read("parquet", make_parquet(x=c))(folder)[1], *words)
    for what, column, *words in (
        ("a null", [0, None], "sample 1 (", "a.parquet:row 1): column 'x' is null"),
        ("empty", [{"bytes": b"1", "path": "1"}, {"bytes": None, "path": "2"}], "row 1): column 'x' has no bytes"),
        ("no matrix", [[[1.0]], [[1.0, 2.0], [3.0]]], "row 1): column 'x' has lists of 1 to 2 values in one list"),
        ("a null in lists", [[[1.0]], [[1.0, None]]], "row 1): column 'x' has a null in its list"),
        ("a null for a list", [[[1.0]], [[1.0], None]], "row 1): column 'x' has a null in its list"),
        ("a null among texts", [["a"], ["c", None]], "column 'x' has a null in its list"),
    )
]

JPG = make_tar(("a.jpg", b"x"))
SHARDS = [make_tar(*((f"{n}-{i}.txt", b"%d" % i) for i in range(5))) for n in range(2)]
TAR = [
    wrong(f"tar: {what}", read("tar", content, **options), "a.tar", *words)
    for what, content, options, *words in (
        ("no extension", JPG, {"rename": {"jpeg": "image"}}, "no member has the extension 'jpeg'", "are: jpg)"),
        ("one name twice", make_tar(("a.jpg", b""), ("a.JPG", b"")), {}, "has the field 'jpg' already"),
        ("a key", make_tar(("a.key", b"")), {}, "has the field 'key' already"),
        ("other names", make_tar(("README", b"")), {}, "holds no file named like"),
        ("no member", make_tar(), {}, "holds no file named like"),
        ("packed", gzip.compress(JPG * 20), {}, "is no uncompressed tar archive"),
        ("empty", b"", {}, "is empty"),
        ("a link", make_link(), {}, "b.jpg: is a link"),
        ("two joined", b"".join(SHARDS), {}, "the archive ends at byte 5120, and data follow", "byte 10240"),
        ("zeros", SHARDS[0][:2048] + bytes(1024) + SHARDS[0][3072:], {}, "ends at byte 2048, and data follow"),
        ("a damaged header", SHARDS[0][:2048] + b"\x01" * 512 + SHARDS[0][2560:], {}, "is damaged at byte 2048"),
    )
]


def hdf5(columns: Any = None, **data: Any) -> Callable[[Path], Any]:
    def open_file(folder: Path) -> Any:
        import h5py

        with h5py.File(folder / "a.h5", "w") as file:
            for name, values in data.items():
                file[name] = values
        return sources.hdf5(folder / "a.h5", columns)

    return open_file


def store_elsewhere(name: str) -> Callable[[Path], Any]:
    """Data sets that lie in other files, of which one is asked for."""

    def open_file(folder: Path) -> Any:
        import h5py

        hdf5(x=np.arange(6))(folder)
        layout = h5py.VirtualLayout((6,), "i8")
        layout[:] = h5py.VirtualSource(folder / "a.h5", "x", (6,))
        with h5py.File(folder / "b.h5", "w") as file:
            file.create_virtual_dataset("virtual", layout)
            file["linked"] = h5py.ExternalLink("a.h5", "/x")
            file.create_dataset("raw", (6,), "i8", external=[(str(folder / "raw.bin"), 0, 48)])
        return sources.hdf5(folder / "b.h5", [name])

    return open_file


def unlike_hdf5(folder: Path) -> Any:
    import h5py

    hdf5(x=np.arange(2))(folder)
    with h5py.File(folder / "b.h5", "w") as file:
        file["x"] = np.arange(2, dtype="i4")
    return sources.hdf5(str(folder / "*.h5"))


LENGTHS = {"x": np.arange(3), "y": np.arange(4), "one": 5, "none": np.empty((0, 2))}
HDF5 = [
    wrong(f"hdf5: {what}", do, *words)
    for what, do, *words in (
        ("unequal", hdf5(None, **LENGTHS), "differ in length: none 0, one is a single value, x 3, y 4; say which"),
        ("a scalar", hdf5(["one"], **LENGTHS), "one is a single value"),
        ("no row", hdf5(["none"], **LENGTHS), "holds no row"),
        ("one name", hdf5(["x", "x"], **LENGTHS), "must name each column once"),
        ("none", hdf5({}, **LENGTHS), "columns must name a data set"),
        ("no such data set", hdf5(["lost"], **{"deep/x": [1]}), "a.h5: has no data set 'lost' (it has: deep/x"),
        ("a group", hdf5(["deep"], **{"deep/x": [1]}), "a.h5: has no data set 'deep' (it has: deep/x"),
        ("empty", read("hdf5", b""), "a.hdf5: is no HDF5 file, or is cut off"),
        ("a text", read("hdf5", b"something else"), "a.hdf5: is no HDF5 file, or is cut off"),
        ("a virtual data set", store_elsewhere("virtual"), "'virtual' is stored in other files", "a.h5"),
        ("a link to a file", store_elsewhere("linked"), "'linked' is stored in other files", "a.h5"),
        ("a raw file", store_elsewhere("raw"), "'raw' is stored in other files", "raw.bin"),
        ("unlike files", unlike_hdf5, "b.h5: 'x' is int32[], not int64[], unlike in ", "a.h5"),
        ("an address", lambda: sources.hdf5("http://127.0.0.1:9/x.h5"), "read addresses, too"),
    )
]


# --- Hugging Face and addresses


def huggingface(change: Callable[[Any, Any], Any], **options: Any) -> Callable[[], Any]:
    """What reads what is made of the library and a Dataset of it."""

    def open_dataset() -> Any:
        import datasets

        return sources.huggingface(change(datasets, datasets.Dataset.from_dict({"x": [1, None]})), **options)

    return open_dataset


def outside(datasets: Any, _: Any) -> Any:
    made = datasets.Dataset.from_dict({"image": [{"bytes": None, "path": "1.png"}]})
    return made.cast_column("image", datasets.Image())


HUGGINGFACE = [
    wrong(f"huggingface: {what}", huggingface(change), *words)
    for what, change, *words in (
        ("splits", lambda lib, made: lib.DatasetDict(train=made, test=made), "DatasetDict", "('train', 'test')"),
        ("a stream", lambda _, made: made.to_iterable_dataset(), "no random access; give it to iterable"),
        ("a format", lambda _, made: made.with_format("torch", columns=["x"]), "format 'torch'", "columns=['x']"),
        ("a transform", lambda _, made: made.with_transform(lambda rows: rows), "has a transform; ", "as a stage"),
        ("no record", lambda _, made: made.select([]), "holds no record"),
        ("a list", lambda *_: [1, 2], "needs a datasets.Dataset, got list"),
    )
] + [
    wrong("huggingface: no column", huggingface(lambda _, d: d, columns=["y"]), "no column 'y' (there are: x)"),
    bad_record("huggingface: null", lambda: huggingface(lambda _, d: d)()[1], "[1]): column 'x' is null"),
    bad_record(
        "huggingface: outside", lambda: huggingface(outside)()[0], "outside of the data, in 1.png: ", "save_to"
    ),
]

ADDRESSES = [wrong("an unknown protocol", lambda: sources.csv("nosuch://host/x.csv"), "rotocol")]

ROWS: list[Mistake] = [*PATHS, *CSV, *JSONL, *PARQUET, *TAR, *HDF5, *HUGGINGFACE, *ADDRESSES]
