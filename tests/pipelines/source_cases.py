"""One of each source over files that it makes, for tests that hold for all of them.

`main` is what a process of its own runs: for each line of JSON that it is given it opens a source anew, attaches
consumers to a feeder and prints a line: the fingerprint, and what each consumer has read.
"""

from __future__ import annotations

import csv
import functools
import hashlib
import io
import json
import operator
import sys
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from pipelines import Pipeline, attach, sources

N = 53
Rows = dict[str, Any]


class Case(NamedTuple):
    """A source: how the data of some rows are written into a folder, and it is opened over that."""

    write: Callable[[Path, Rows], None]
    open: Callable[[Path], Any]
    file: str = ""  # whose change must be noticed; none if the data are in memory
    x: Callable[[Any], Any] = operator.itemgetter("x")  # the row of a record
    has_groups: bool = False  # for a block shuffle


def rows(n: int = N, nbytes: int = 12, shift: int = 0) -> Rows:
    """Columns of `n` records; with another `shift` one value differs."""
    rng = np.random.default_rng(1)
    x = rng.integers(0, 100, (n, nbytes // 4), dtype=np.int32).astype(np.float32)
    x[n // 2, 0] += shift
    return {"x": x, "label": np.arange(n), "text": [f'row {i}, "{i % 7}"\n' for i in range(n)]}


def write_npy(folder: Path, data: Rows) -> None:
    for name in ("x", "label"):
        np.save(folder / f"{name}.npy", data[name])


def read_npy(folder: Path) -> tuple[Any, Any]:
    return np.load(folder / "x.npy"), np.load(folder / "label.npy")


def halves(folder: Path, extension: str, data: Rows) -> Iterator[tuple[Any, list[tuple[int, str, Any]]]]:
    """Two files, each with rows of (label, text, x)."""
    rows = list(zip(data["label"].tolist(), data["text"], data["x"].tolist(), strict=True))
    for name, part in (("a", rows[: len(rows) // 2]), ("b", rows[len(rows) // 2 :])):
        with open(folder / f"{name}.{extension}", "w", newline="") as file:
            yield file, part


def write_csv(folder: Path, data: Rows) -> None:
    for file, rows in halves(folder, "csv", data):
        writer = csv.writer(file)
        writer.writerow(["label", "text", *(f"x{i}" for i in range(data["x"].shape[1]))])
        writer.writerows([label, text, *x] for label, text, x in rows)


def write_jsonl(folder: Path, data: Rows) -> None:
    for file, rows in halves(folder, "jsonl", data):
        file.writelines(json.dumps({"label": n, "text": text, "x": x}) + "\n" for n, text, x in rows)


def write_hdf5(folder: Path, data: Rows, chunks: bool = True) -> None:
    import h5py

    with h5py.File(folder / "data.h5", "w") as file:
        options = {"chunks": (8, data["x"].shape[1]), "compression": "gzip"} if chunks else {}
        file.create_dataset("train/x", data=data["x"], **options)
        file["train/label"] = data["label"]
        if chunks:
            file["train/text"] = data["text"]


def read_hdf5(folder: Path, *names: str) -> Any:
    columns = {name: f"train/{name}" for name in names}
    return sources.hdf5(folder / "data.h5", columns, cache_bytes=1 << 20)


def write_huggingface(folder: Path, data: Rows) -> None:
    import datasets

    datasets.disable_progress_bars()
    whole = datasets.Dataset.from_dict({**data, "x": data["x"].tolist()})
    order = np.random.default_rng(0).permutation(len(whole))
    # The rows lie in another order: the indices mapping puts them right.
    whole.select(order, keep_in_memory=True).save_to_disk(folder / "set", max_shard_size="100KB")
    np.save(folder / "order.npy", np.argsort(order))


def read_huggingface(folder: Path, *, in_memory: bool = False) -> Any:
    import datasets

    whole = datasets.load_from_disk(folder / "set", keep_in_memory=in_memory)
    return sources.huggingface(whole.select(np.load(folder / "order.npy"), keep_in_memory=True))


def write_images(folder: Path, data: Rows, classes: int = 2) -> None:
    for label, x in zip(data["label"], data["x"], strict=True):
        path = folder / "images" / (f"{label % classes}" if classes else ".") / f"{label:05}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(x.tobytes())


def write_flat(folder: Path, data: Rows) -> None:
    write_images(folder, data, classes=0)
    write_npy(folder, data)


def read_labelled(folder: Path) -> Any:
    labels = {f"{label:05}": f"class {x[0]:.0f}" for x, label in zip(*read_npy(folder), strict=True)}
    return sources.image_folder(folder / "images", labels=labels)


def write_parquet(folder: Path, data: Rows) -> None:
    import pyarrow
    import pyarrow.parquet

    table = pyarrow.table({**data, "x": data["x"].tolist()})
    pyarrow.parquet.write_table(table, folder / "data.parquet", row_group_size=8)


def read_parquet(folder: Path) -> Any:
    return sources.parquet(folder / "data.parquet", cache_bytes=1 << 20)


def write_tar(folder: Path, data: Rows) -> None:
    with tarfile.open(folder / "data.tar", "w") as archive:
        for label, text, x in zip(data["label"], data["text"], data["x"], strict=True):
            for extension, raw in (("x", x.tobytes()), ("txt", text.encode()), ("cls", b"%d" % label)):
                member = tarfile.TarInfo(f"{label:05}.{extension}")
                member.size = len(raw)
                archive.addfile(member, io.BytesIO(raw))


class Sized:
    def __init__(self, folder: Path) -> None:
        self.x, self.label = read_npy(folder)
        self.identity = hashlib.sha256(self.x.tobytes() + self.label.tobytes()).hexdigest()

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        return self.x[index], {"number": self.label[index], "more": (index, [self.x[index][:2]])}


def read_dataset(folder: Path) -> Any:
    made = Sized(folder)
    return sources.dataset(made, id=made.identity, groups=[*range(0, len(made), 8), len(made)])


def read_stream(folder: Path) -> Any:
    items = Sized(folder)
    return sources.iterable(lambda: (items[i] for i in range(len(items))), len(items))


def read_mapped(folder: Path) -> Any:
    return sources.arrays(x=np.load(folder / "x.npy", mmap_mode="r"), label=read_npy(folder)[1])


def read_arrays(folder: Path) -> Any:
    x, label = read_npy(folder)
    return sources.arrays(x=x, label=label, text=[f"text {i}" for i in range(len(x))], ragged=list(x))


def read_windows(folder: Path) -> Any:
    x, _ = read_npy(folder)
    # As many windows as there are rows, each of a row's values and what follows: they have no step in common.
    steps = np.pad(x, ((0, 0), (0, 1)))
    table = sources.arrays(value=steps.reshape(-1), more=np.arange(steps.size))
    return sources.windows(table, x.shape[1], stride=steps.shape[1], inputs=["value"], target=["more", "value"])


def read_concat(folder: Path) -> Any:
    (x, label), half = read_npy(folder), 9
    parts = {
        name: sources.arrays(x=x[part], label=label[part])
        for name, part in (("a", slice(half)), ("b", slice(half, None)))
    }
    return sources.concat(parts)


def read_concat_of_files(folder: Path) -> Any:
    return sources.concat({name: sources.jsonl(folder / f"{name}.jsonl") for name in ("a", "b")}, field="half")


def read_pack(folder: Path) -> Any:
    x, label = read_npy(folder)
    # As many rows as there are documents, each filled by one: they have no document in common.
    return sources.pack(sources.arrays(x=x.astype(np.int64), label=label), "x", x.shape[1])


def keep_some(record: Rows) -> list[Rows]:
    return [{"x": record["x"]}] if record["label"] % 2 == 0 else []


def read_pieces(folder: Path) -> Any:
    x, label = read_npy(folder)
    # As many pieces as there are rows; every second record has none.
    return sources.flat_map(sources.arrays(x=np.repeat(x, 2, axis=0), label=np.arange(2 * len(label))), keep_some)


def from_bytes(field: str) -> Any:
    return lambda record: np.frombuffer(record[field], np.float32)


def columns_of_x(record: Rows) -> Any:
    return [record[name] for name in record if name[0] == "x"]


IMAGE, PAIR = from_bytes("image"), operator.itemgetter("image")
CASES = {
    "arrays": Case(write_npy, read_arrays),
    "arrays of np.memmap": Case(write_npy, read_mapped, "x.npy"),
    "concat": Case(write_npy, read_concat),
    "concat, of files": Case(write_jsonl, read_concat_of_files, "b.jsonl", has_groups=True),
    "csv": Case(write_csv, lambda folder: sources.csv(str(folder / "*.csv")), "b.csv", columns_of_x, True),
    "dataset": Case(write_npy, read_dataset, "", PAIR, True),
    "flat_map": Case(write_npy, read_pieces, has_groups=True),
    "hdf5": Case(write_hdf5, lambda folder: read_hdf5(folder, "x", "label", "text"), "data.h5", has_groups=True),
    "hdf5, not chunked": Case(
        functools.partial(write_hdf5, chunks=False), lambda folder: read_hdf5(folder, "x", "label"), "data.h5"
    ),
    "huggingface": Case(write_huggingface, read_huggingface, "set/data-00000-of-00001.arrow"),
    "huggingface, in memory": Case(write_huggingface, functools.partial(read_huggingface, in_memory=True)),
    "image_folder, given labels": Case(write_flat, read_labelled, "images/00026.png", IMAGE),
    "image_folder": Case(
        write_images, lambda at: sources.image_folder(at / "images", names=True), "images/0/00026.png", IMAGE
    ),
    "iterable": Case(write_npy, read_stream, "", PAIR, True),
    "jsonl": Case(write_jsonl, lambda at: sources.jsonl(str(at / "*.jsonl")), "b.jsonl", has_groups=True),
    "memmap": Case(write_npy, lambda at: sources.memmap(x=at / "x.npy", label=at / "label.npy"), "x.npy"),
    "pack": Case(write_npy, read_pack, "", operator.itemgetter("tokens")),
    "parquet": Case(write_parquet, read_parquet, "data.parquet", has_groups=True),
    "tar": Case(write_tar, lambda at: sources.tar(at / "data.tar"), "data.tar", from_bytes("x"), True),
    "with_fields": Case(
        write_npy,
        lambda at: sources.with_fields(sources.memmap(x=at / "x.npy"), label=np.load(at / "label.npy")),
        "x.npy",
    ),
    "windows": Case(write_npy, read_windows, "", lambda record: record["x"][:, 0]),
}


def canonical(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name!r}: {canonical(each)}" for name, each in value.items()) + "}"
    if isinstance(value, list | tuple):
        return f"{type(value).__name__}({', '.join(map(canonical, value))})"
    if isinstance(value, np.ndarray | np.generic):
        return f"{type(value).__name__} {value.dtype} {value.shape} {value.tobytes().hex()}"
    return repr(value)


def summarize(record: Rows) -> Rows:
    return {"digest": np.frombuffer(hashlib.sha256(canonical(record).encode()).digest(), np.uint8)}


def add_noise(sample: Rows, rng: np.random.Generator) -> Rows:
    return {**sample, "noise": rng.random(3)}


def make_pipeline(source: Any, **options: Any) -> Pipeline:
    return Pipeline(source, seed=3, **options).map(summarize).map(add_noise)


JOBS: list[Rows] = [
    {"batch_size": 8, "epochs": range(2)},
    {"batch_size": 8, "epochs": range(2), "start_step": 3},
    *({"batch_size": 5, "epochs": range(2), "rank": rank, "world": 2} for rank in range(2)),
]
MEMBERS = 3


def read(loader: Any) -> list[Any]:
    from core_pipes import record

    return [record(batch) for batch in loader]


def read_shared(case: str, folder: str, address: str) -> Rows:
    from core_pipes import together

    pipe = make_pipeline(CASES[case].open(Path(folder)))
    loaders = [attach(address, pipe, name=f"member-{min(i, MEMBERS - 1)}", **job) for i, job in enumerate(JOBS)]
    found = together([functools.partial(read, loader) for loader in loaders])
    return {
        "fingerprint": pipe.fingerprint,
        "batches": found,
        "shared": [loader.stats()["shared_batches"] for loader in loaders],
    }


def main() -> None:
    for request in sys.stdin:
        print(json.dumps(read_shared(**json.loads(request))), flush=True)
