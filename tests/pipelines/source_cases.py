"""One of each source over files that it makes, for tests that hold for all of them.

`main` is what a process of its own runs: for each line of JSON that it is given it opens a source anew, attaches
consumers to a feeder and prints a line: the fingerprint, and what each consumer has read.
"""

from __future__ import annotations

import functools
import hashlib
import io
import json
import operator
import sys
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pipelines import Pipeline, attach, sources

N = 53
Rows = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """A source and the data that it reads.

    Attributes:
        write: writes the data of some rows into a folder.
        open: makes the source over a folder.
        file: a file of the folder whose change must be noticed; "" if the data are in memory.
        x: the row of `x` in a record of the source.
        has_groups: whether a block shuffle has something to group.
    """

    write: Callable[[Path, Rows], None]
    open: Callable[[Path], Any]
    file: str
    x: Callable[[Any], Any] = operator.itemgetter("x")
    has_groups: bool = False


def rows(n: int = N, nbytes: int = 12, shift: int = 0) -> Rows:
    """Columns of `n` records; with another `shift` one value differs."""
    rng = np.random.default_rng(1)
    x = rng.integers(0, 100, (n, nbytes // 4), dtype=np.int32).astype(np.float32)
    x[n // 2, 0] += shift
    return {"x": x, "label": np.arange(n), "text": [f'row {i}, "{i % 7}"\n' for i in range(n)]}


def write_npy(folder: Path, data: Rows) -> None:
    np.save(folder / "x.npy", data["x"])
    np.save(folder / "label.npy", data["label"])


def read_npy(folder: Path) -> tuple[Any, Any]:
    return np.load(folder / "x.npy"), np.load(folder / "label.npy")


def write_csv(folder: Path, data: Rows) -> None:
    import csv

    half = len(data["label"]) // 2
    for name, part in (("a", slice(0, half)), ("b", slice(half, None))):
        with open(folder / f"{name}.csv", "w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["label", "text", *(f"x{i}" for i in range(data["x"].shape[1]))])
            for label, text, x in zip(
                data["label"][part], data["text"][part], data["x"][part].tolist(), strict=True
            ):
                writer.writerow([label, text, *x])


def write_jsonl(folder: Path, data: Rows) -> None:
    half = len(data["label"]) // 2
    for name, part in (("a", range(half)), ("b", range(half, len(data["label"])))):
        with open(folder / f"{name}.jsonl", "w") as file:
            for i in part:
                row = {"label": int(data["label"][i]), "text": data["text"][i], "x": data["x"][i].tolist()}
                file.write(json.dumps(row) + "\n")


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


def write_images(folder: Path, data: Rows) -> None:
    for label, x in zip(data["label"], data["x"], strict=True):
        path = folder / "images" / f"{label % 2}" / f"{label:05}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(x.tobytes())


def write_flat(folder: Path, data: Rows) -> None:
    (folder / "images").mkdir(exist_ok=True)
    for label, x in zip(data["label"], data["x"], strict=True):
        (folder / "images" / f"{label:05}.png").write_bytes(x.tobytes())
    write_npy(folder, data)


def read_labelled(folder: Path) -> Any:
    labels = {f"{label:05}": f"class {x[0]:.0f}" for x, label in zip(*read_npy(folder), strict=True)}
    return sources.image_folder(folder / "images", labels=labels)


def write_parquet(folder: Path, data: Rows) -> None:
    import pyarrow
    import pyarrow.parquet

    table = pyarrow.table({**data, "x": data["x"].tolist()})
    pyarrow.parquet.write_table(table, folder / "data.parquet", row_group_size=8)


def write_tar(folder: Path, data: Rows) -> None:
    with tarfile.open(folder / "data.tar", "w") as archive:
        for label, text, x in zip(data["label"], data["text"], data["x"], strict=True):
            for extension, raw in (("x", x.tobytes()), ("txt", text.encode()), ("cls", b"%d" % label)):
                member = tarfile.TarInfo(f"{label:05}.{extension}")
                member.size = len(raw)
                archive.addfile(member, io.BytesIO(raw))


class Items:
    """A map-style Dataset, or a stream of the same items."""

    def __init__(self, folder: Path) -> None:
        self.x, self.label = read_npy(folder)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        return self.x[index], {"number": self.label[index], "more": (index, [self.x[index][:2]])}


class Sized(Items):
    def __len__(self) -> int:
        return len(self.x)


class Stream(Items):
    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        return (self[i] for i in range(len(self.x)))

    __getitem__ = Items.__getitem__


def read_arrays(folder: Path) -> Any:
    x, label = read_npy(folder)
    return sources.arrays(x=x, label=label, text=[f"text {i}" for i in range(len(x))], ragged=list(x))


def read_windows(folder: Path) -> Any:
    x, _ = read_npy(folder)
    # As many windows as there are rows, each of a row's values and what follows: they have no step in common.
    steps = np.pad(x, ((0, 0), (0, 1)))
    table = sources.arrays(value=steps.reshape(-1), more=np.arange(steps.size))
    return sources.windows(table, x.shape[1], stride=steps.shape[1], inputs=["value"], target=["more", "value"])


def read_image_bytes(record: Rows) -> Any:
    return np.frombuffer(record["image"], np.float32)


CASES = {
    "arrays": Case(write_npy, read_arrays, ""),
    "arrays of np.memmap": Case(
        write_npy,
        lambda folder: sources.arrays(x=np.load(folder / "x.npy", mmap_mode="r"), label=read_npy(folder)[1]),
        "x.npy",
    ),
    "csv": Case(
        write_csv,
        lambda folder: sources.csv(str(folder / "*.csv")),
        "b.csv",
        lambda record: [record[name] for name in record if name[0] == "x"],
        has_groups=True,
    ),
    "dataset": Case(
        write_npy,
        lambda folder: sources.dataset(Sized(folder), id=_digest_files(folder)),
        "",
        operator.itemgetter("image"),
    ),
    "hdf5": Case(write_hdf5, lambda folder: read_hdf5(folder, "x", "label", "text"), "data.h5", has_groups=True),
    "hdf5, not chunked": Case(
        functools.partial(write_hdf5, chunks=False), lambda folder: read_hdf5(folder, "x", "label"), "data.h5"
    ),
    "huggingface": Case(write_huggingface, read_huggingface, "set/data-00000-of-00001.arrow"),
    "huggingface, in memory": Case(write_huggingface, functools.partial(read_huggingface, in_memory=True), ""),
    "image_folder, given labels": Case(write_flat, read_labelled, "images/00026.png", read_image_bytes),
    "image_folder": Case(
        write_images,
        lambda folder: sources.image_folder(folder / "images", names=True),
        "images/0/00026.png",
        read_image_bytes,
    ),
    "iterable": Case(
        write_npy,
        lambda folder: sources.iterable(Stream(folder), len(read_npy(folder)[0])),
        "",
        operator.itemgetter("image"),
        has_groups=True,
    ),
    "jsonl": Case(write_jsonl, lambda folder: sources.jsonl(str(folder / "*.jsonl")), "b.jsonl", has_groups=True),
    "memmap": Case(
        write_npy, lambda folder: sources.memmap(x=folder / "x.npy", label=folder / "label.npy"), "x.npy"
    ),
    "parquet": Case(
        write_parquet,
        lambda folder: sources.parquet(folder / "data.parquet", cache_bytes=1 << 20),
        "data.parquet",
        has_groups=True,
    ),
    "tar": Case(
        write_tar,
        lambda folder: sources.tar(folder / "data.tar"),
        "data.tar",
        lambda record: np.frombuffer(record["x"], np.float32),
        has_groups=True,
    ),
    "windows": Case(write_npy, read_windows, "", lambda record: record["x"][:, 0]),
}


def _digest_files(folder: Path) -> str:
    return hashlib.sha256(b"".join(path.read_bytes() for path in sorted(folder.glob("*.npy")))).hexdigest()


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


# Three members: one that resumes in the middle of an epoch, and one of two ranks.
JOBS = [
    {"batch_size": 8, "epochs": [0, 2]},
    {"batch_size": 8, "epochs": [0, 2], "start_step": 3},
    {"batch_size": 5, "epochs": [0, 2], "rank": 0, "world": 2},
    {"batch_size": 5, "epochs": [0, 2], "rank": 1, "world": 2},
]
MEMBERS = 3


def arguments(job: Rows) -> Rows:
    return {**job, "epochs": range(*job["epochs"])}


def read(loader: Any) -> list[Any]:
    from core_pipes import record

    return [record(batch) for batch in loader]


def read_shared(case: str, folder: str, address: str) -> Rows:
    from core_pipes import together

    pipe = make_pipeline(CASES[case].open(Path(folder)))
    loaders = [
        attach(address, pipe, name=f"member-{min(i, MEMBERS - 1)}", **arguments(job)) for i, job in enumerate(JOBS)
    ]
    found = together([functools.partial(read, loader) for loader in loaders])
    return {
        "fingerprint": pipe.fingerprint,
        "batches": found,
        "shared": [loader.stats()["shared_batches"] for loader in loaders],
    }


def main() -> None:
    for request in sys.stdin:
        print(json.dumps(read_shared(**json.loads(request))), flush=True)
