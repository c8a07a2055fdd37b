"""Mistakes in files and values that sources of arrays, Datasets, streams, images and windows are given."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from kit.mistakes import Mistake

from pipelines import PipelineError, SampleError, sources


def wrong(what: str, do: Callable[..., Any], *words: str) -> Mistake:
    return Mistake(what, do, PipelineError, words)


def bad_record(what: str, do: Callable[..., Any], *words: str) -> Mistake:
    return Mistake(what, do, SampleError, words)


# --- arrays and memmap


def sparse() -> Any:
    import torch

    return torch.eye(3).to_sparse()


ARRAYS = [
    wrong(f"arrays: {what}", lambda columns=columns: sources.arrays(**columns), words)
    for what, columns, words in (
        ("none", {}, "no column"),
        ("unequal lengths", {"a": np.zeros(3), "b": np.zeros(4)}, "differ in length: a 3, b 4"),
        ("no record", {"a": np.zeros((0, 3))}, "holds no record"),
        ("a number", {"a": np.float32(3)}, "column 'a' must be an array"),
        ("a text", {"a": "text"}, "column 'a' must be an array"),
        ("a scalar array", {"a": np.array(3)}, "scalar"),
        ("masked values", {"a": np.ma.array([1, 2], mask=[False, True])}, "column 'a' has masked values"),
    )
] + [
    wrong("arrays: a sparse tensor", lambda: sources.arrays(x=sparse()), "'x' cannot be an array", "Sparse"),
    wrong("arrays: sparse tensors", lambda: sources.arrays(x=[sparse()] * 2), "column 'x' cannot be an array"),
]


def map_file(make: Callable[[Path], Any]) -> Callable[[Path], Any]:
    return lambda folder: sources.memmap(x=make(folder))


def save(folder: Path, array: Any, name: str = "x.npy") -> Path:
    np.save(folder / name, array)
    return folder / name


def cut_npy(folder: Path) -> Path:
    path = save(folder, np.arange(100))
    path.write_bytes(path.read_bytes()[:-8])
    return path


def make_raw(folder: Path) -> Path:
    (folder / "raw.bin").write_bytes(bytes(64))
    return folder / "raw.bin"


def make_archive(folder: Path) -> Path:
    np.savez(folder / "x.npz", x=np.arange(3))
    return folder / "x.npz"


def map_unequal(folder: Path) -> Any:
    return sources.memmap(x=save(folder, np.arange(100)), y=save(folder, np.arange(1), "y.npy"))


MEMMAP = [
    wrong(f"memmap: {what}", map_file(make), *words)
    for what, make, *words in (
        ("cut off", cut_npy, "x.npy", "is no .npy file that can be mapped"),
        ("a raw file", make_raw, "no .npy header", "np.memmap(path, dtype"),
        ("an archive", make_archive, "is an archive of arrays"),
        ("objects", lambda folder: save(folder, np.array([1, "a"], object)), "Python objects"),
        ("missing", lambda folder: folder / "nowhere.npy", "no such file"),
        ("a scalar", lambda folder: save(folder, np.array(5)), "records along the first axis"),
        ("no record", lambda folder: save(folder, np.empty((0, 3))), "holds no record: x 0"),
        ("in memory", lambda folder: np.arange(5), "data in memory are for arrays"),
        ("copied on writing", lambda folder: np.memmap(make_raw(folder), "u1", "c"), "is not in a file"),
    )
] + [
    wrong("memmap: unequal lengths", map_unequal, "differ in length: x 100, y 1"),
    wrong("memmap: none", sources.memmap, "no column was given"),
]


# --- Datasets and streams


class Shrinking(list[Any]):
    """A Dataset of a record less than it says."""

    def __len__(self) -> int:
        return super().__len__() + 1


DATASET = [
    wrong("dataset: an iterator", lambda: sources.dataset(iter([1, 2])), "map-style"),
    wrong("dataset: no record", lambda: sources.dataset([]), "list holds no record"),
    *(
        wrong(f"dataset: groups {groups}", lambda groups=groups: sources.dataset(["a"] * 3, groups=groups), words)
        for words in ("dataset(): groups must be integers that ascend from 0 to 3, got ",)
        for groups in ([0, 2], [1, 3], [0, 2, 2, 3], [0, 1.5, 3], [], 3)
    ),
    bad_record("dataset: more values", lambda: sources.dataset([(1, 2, 3)])[0], "sample 0 (list[0])", "3 values"),
    bad_record(
        "dataset: it fails", lambda: sources.dataset(Shrinking([{"a": 1}]))[1], "1 (Shrinking[1]): IndexError"
    ),
]


def number() -> Iterator[dict[str, int]]:
    return ({"x": i} for i in range(4))


def fail() -> Iterator[dict[str, int]]:
    yield {"x": 0}
    raise OSError("the connection is lost")


ITERABLE = [
    wrong(f"iterable: {what}", lambda stream=stream, length=length: sources.iterable(stream, length), words)
    for what, stream, length, words in (
        ("a generator", number(), 4, "generator is an iterator, which can be read only once"),
        ("an iterator", map(str, range(3)), 3, "map is an iterator"),
        ("a number", 5, 1, "int can neither be iterated over nor be called"),
        ("a function of no stream", lambda: 5, 1, "record 0: TypeError: 'int' object is not iterable"),
        ("too short", number, 5, "ended after 4 records, but length=5"),
        ("too long", number, 3, "yields more records than length=3"),
        ("length 0", number, 0, "length must be at least 1"),
        ("length 4.0", number, 4.0, "length must be an integer"),
        ("it fails", fail, 3, "record 1: OSError: the connection is lost"),
        ("values without names", [1, 2], 2, "record 0: an item of 1 value (int)"),
        ("a set", [{"x": {1, 2}}], 1, "record 0: 'x' of the record is builtins.set; yield arrays"),
        ("objects", [{"x": np.array([None])}], 1, "'x' of the record is an array of object"),
        ("a number for a name", [{1: 2}], 1, "the key 1, which is not a str"),
    )
]


# --- images


def images(*names: str, **options: Any) -> Callable[[Path], Any]:
    """What reads a folder with files of these names."""

    def read(folder: Path) -> Any:
        for name in names:
            (folder / "photos" / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / "photos" / name).write_bytes(name.encode())
        return sources.image_folder(folder / "photos", **options)

    return read


def link_back(folder: Path) -> Any:
    images("x/a.jpg")(folder)
    (folder / "photos" / "x" / "again").symlink_to(folder / "photos")
    return images()(folder)


def read_empty_image(folder: Path) -> Any:
    images("a.jpg")(folder)
    (folder / "photos" / "a.jpg").write_bytes(b"")
    return images()(folder)[0]


IMAGES = [
    wrong("images: missing", images(), "photos", "no such folder"),
    wrong("images: a file", lambda folder: sources.image_folder(save(folder, np.zeros(1))), "is not a folder"),
    wrong("images: none", images("notes.txt"), "photos", "holds no image"),
    wrong("images: beside folders", images("a.jpg", "dog/b.jpg"), "photos", "both beside and inside"),
    wrong("images: an empty class", images("cat/a.jpg", "dog/notes.txt"), "class folder 'dog' holds no image"),
    wrong("images: of other kinds", images("cat/a.avif"), "'cat' holds no image", "1 .avif"),
    wrong("images: a circle", link_back, "image_folder(", "symbolic links"),
    bad_record("images: an empty file", read_empty_image, "sample 0 (", "a.jpg): the file is empty"),
    wrong("images: labels and folders", images("x/a.jpg", labels={"a": 1}), "are labels already", "flat folder"),
    *(
        wrong(f"images: labels {labels}", images("a.jpg", "b.jpg", labels=labels), *words)
        for labels, *words in (
            ({"a": 1}, "labels: no label for 'b.jpg'"),
            ({}, "no label for 'a.jpg', nor for 1 more of the 2 files"),
            ({"a": None, "b": 1}, "no label for 'a.jpg'"),
            ({"a": float("nan"), "b": 1.0}, "no label for 'a.jpg'"),
            ({"a": float("inf"), "b": 1.0}, "the label of 'a.jpg' is inf"),
            ({"a": 2**70, "b": 1}, "the label of 'a.jpg' is 1180591620717411303424"),
            ({"a": "x", "b": 1}, "must be all integers, all numbers, or all texts", "'a.jpg' has 'x'"),
            ({"a": np.arange(2), "b": np.arange(2)}, "must be all integers"),
            ([0, 1], "must be a mapping file name -> label", "got list"),
        )
    ),
]


# --- windows


def table(n: int = 9, **more: Any) -> Any:
    return sources.arrays(load=np.arange(n, dtype=np.float64), **more)


def windows(steps: Any, **options: Any) -> Any:
    return sources.windows(steps, **{"length": 2, "horizon": 1, "inputs": ["load"], "target": "load", **options})


NAMES = np.array(["a"] * 9)
BACKWARDS = np.concatenate([np.arange(20), np.arange(5, 25)])
WINDOWS = [
    wrong(f"windows: {options}", lambda options=options: windows(table(name=NAMES), **options), words)
    for options, words in (
        ({"length": 0}, "length must be"),
        ({"stride": 0}, "stride must be"),
        ({"inputs": ["nothing"]}, "'nothing'"),
        ({"target": "name"}, "the field 'name' does not hold one number"),
        ({"inputs": []}, "inputs must name each field"),
        ({"length": 20}, "no series has"),
    )
] + [
    wrong(
        "windows: a series in parts",
        lambda: windows(table(3, plant=np.array(["a", "b", "a"])), length=1, series="plant"),
        *("by 'plant'", "must lie together"),
    ),
    bad_record(
        "windows: a missing value",
        lambda: windows(sources.arrays(load=np.array([0.0, 1, 2, np.nan, 4, 5])))[1],
        *("steps 1 to 3", "missing or infinite"),
    ),
    *(
        wrong(
            f"windows: {times.dtype} runs backwards",
            lambda times=times, options=options: windows(table(40, t=times), **options),
            *("runs backwards at", "row 20, and 0 times more: 't'", "series="),
        )
        for times, options in ((BACKWARDS, {"time": "t"}), (np.datetime64("2024-01-01") + BACKWARDS, {}))
    ),
    *(
        wrong(
            f"windows that overlap: {what}",
            lambda divide=divide: divide(windows(table(80), length=4, horizon=2)),
            *("split the table by time first", "length + horizon (6)"),
        )
        for what, divide in (
            ("split", lambda made: made.split(0.8, seed=1)),
            ("by", lambda made: made.take(60).split(0.8, by=np.arange(60))),
            ("folds", lambda made: made.folds(4)),
            ("number_folds", lambda made: made.number_folds(4)),
        )
    ),
]


# --- sources of other sources


def numbers(**columns: Any) -> Any:
    return sources.arrays(x=np.array([1, 2, 0]), **columns)


def divide(record: dict[str, Any]) -> Any:
    return [{"x": 1 // int(record["x"])}]


TEXTS = sources.arrays(x=["a", "b"])
DERIVED = [
    wrong(f"concat: {what}", lambda parts=parts, options=options: sources.concat(parts, **options), *words)
    for what, parts, options, *words in (
        ("a list", [numbers()], {}, "needs a mapping of names to sources"),
        ("none", {}, {}, "needs a mapping of names to sources"),
        ("a Dataset", {"a": [1, 2]}, {}, "needs a mapping of names to sources"),
        ("a number as a name", {1: numbers()}, {}, "the name of a source must be a text"),
        ("no field", {"a": numbers()}, {"field": ""}, "field must be a text"),
        ("its field is taken", {"a": numbers()}, {"field": "x"}, "'a' have a field 'x': give field="),
        (
            "texts and numbers",
            {"a": numbers(), "b": TEXTS},
            {},
            "numbers in 'a'",
            "a text in 'b' (arrays(x):row 0)",
        ),
        (
            "another field",
            {"a": numbers(), "b": numbers(y=[1, 2, 3])},
            {},
            "'y' has nothing in 'a'",
            "numbers in 'b'",
        ),
        (
            "classes of other numbers",
            {name: TEXTS.number_classes("x", names) for name, names in (("a", "ab"), ("b", "ba"))},
            {},
            "('a', 'b') and ('b', 'a')",
            "source.number_classes('x', names)",
        ),
    )
] + [
    wrong(
        "pack: a number", lambda: sources.pack(numbers(), 3, 8), "tokens must be the name of a field or a function"
    ),
    wrong("pack: another field", lambda: sources.pack(numbers(), "text", 8), "has no field 'text' (it has: x)"),
    wrong("pack: length 0", lambda: sources.pack(numbers(), "x", 0), "pack(): length must be at least 1"),
    wrong(
        "pack: buffer 0", lambda: sources.pack(numbers(), "x", 8, buffer=0), "pack(): buffer must be at least 1"
    ),
    wrong("pack: 0.5 as pad", lambda: sources.pack(numbers(), "x", 8, pad=0.5), "pack(): pad must be an integer"),
    wrong(
        "pack: a text as seed", lambda: sources.pack(numbers(), "x", 8, seed="0"), "pack(): seed must be an int"
    ),
    wrong("pack: no token", lambda: sources.pack(numbers(), lambda _: [], 8), "no document of arrays(3 records)"),
    bad_record(
        "pack: a number a document", lambda: sources.pack(numbers(), "x", 8), "tokens must be integers [n]"
    ),
    wrong("flat_map: no function", lambda: sources.flat_map(numbers(), 3), "needs a function of a record, got 3"),
    wrong("flat_map: nothing", lambda: sources.flat_map(numbers(), lambda _: []), "makes nothing of the records"),
    wrong(
        "flat_map: texts", lambda: sources.flat_map(numbers(), lambda one: one), "flat_map(): record 0", "names="
    ),
    bad_record(
        "flat_map: it fails", lambda: sources.flat_map(numbers(), divide), "sample 2 (", "ZeroDivisionError"
    ),
    wrong("filter: no function", lambda: numbers().filter("x"), "needs a function of a record, got 'x'"),
    bad_record("filter: it fails", lambda: numbers().filter(divide), "sample 2 (", "ZeroDivisionError"),
    bad_record("filter: an array", lambda: numbers().filter(lambda _: np.arange(2)), "sample 0 (", "ambiguous"),
]

ROWS = [*ARRAYS, *MEMMAP, *DATASET, *ITERABLE, *IMAGES, *WINDOWS, *DERIVED]
