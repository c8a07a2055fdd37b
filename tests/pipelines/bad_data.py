"""Data with something wrong in it, for the tests of bad records: each fault in each kind of source that has it.

A `Case` is made in an empty folder: 23 good-looking records, of which some, from index 1 on, cannot be had.
"""

from __future__ import annotations

import io
import re
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import simplejpeg

from pipelines import Pipeline, sources, stages

N = 23
BAD = 7


class Case(NamedTuple):
    """A source, made when called from files that may be changed right after; the indices that cannot be prepared;
    the file that an error names beside the index; a pattern for what it says; the stages after the source."""

    source: Callable[[], Any]
    bad: frozenset[int]
    file: str
    reason: str
    pipeline: Callable[[Pipeline], Pipeline]

    @property
    def path(self) -> str:
        return re.split(r"[:\[(]", self.file)[0]


def jpeg(seed: int, size: int = 16) -> bytes:
    noise = np.random.default_rng(seed).integers(0, 255, (size, size, 3), np.uint8)
    data: bytes = simplejpeg.encode_jpeg(noise, 95)
    return data


def decoded(pipeline: Pipeline) -> Pipeline:
    return pipeline.map(stages.decode_jpeg("image"))


#: Fault -> the bytes of record 7, and what is said of them.
BYTES: dict[str, tuple[bytes | None, str]] = {
    "corrupt jpeg": (jpeg(1)[:150] + b"\xff\xd9", "decode_jpeg|DecodeJpeg"),
    "cut off jpeg": (jpeg(1)[:-200], "cannot decode JPEG"),
    "no bytes": (b"", "the file is empty|there are no bytes"),
    "wrong shape": (jpeg(1, size=24), r"uint8\[3, 24, 24\], the pipeline's fields say uint8\[3, 16, 16\]"),
    "null": (None, "'image' has no bytes|'image' is null"),
    "missing file": (jpeg(BAD), "No such file"),
}


def photos(fault: str) -> list[bytes | None]:
    return [BYTES[fault][0] if number == BAD else jpeg(number) for number in range(N)]


def in_folder(path: Path, fault: str) -> Case:
    """Classes come one after the other: file 7 is record 15."""
    for number, data in enumerate(photos(fault)):
        file = path / f"class-{number % 2}" / f"{number:02}.jpg"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data or b"")
    victim = path / "class-1" / "07.jpg"

    def source() -> Any:
        made = sources.image_folder(path)
        if fault == "missing file":
            victim.unlink()
        return made

    return Case(source, frozenset({15}), str(victim), BYTES[fault][1], decoded)


def in_tar(path: Path, fault: str) -> Case:
    """Two shards, of which the second one may go; a record may have no photograph."""
    shards = [path / "0.tar", path / "1.tar"]
    data = photos(fault if fault in BYTES else "missing file")
    for shard, numbers in zip(shards, (range(12), range(12, N)), strict=True):
        with tarfile.open(shard, "w") as archive:
            for number in numbers:
                for extension, content in (("jpg", data[number] or b""), ("cls", b"%d" % number)):
                    if fault != "no field" or (number, extension) != (BAD, "jpg"):
                        info = tarfile.TarInfo(f"{number:02}.{extension}")
                        info.size = len(content)
                        archive.addfile(info, io.BytesIO(content))

    def source() -> Any:
        made = sources.tar(shards, rename={"jpg": "image"})
        if fault == "missing file":
            shards[1].unlink()
        return made

    bad, file, reason = [BAD], f"{shards[0]}:07.jpg", BYTES.get(fault, (b"", "no field 'image'"))[1]
    if fault == "missing file":
        bad, file = list(range(12, N)), str(shards[1])
    elif fault == "no field":
        file = f"{shards[0]}:07.cls"
    return Case(source, frozenset(bad), file, reason, lambda begun: decoded(begun.map(stages.drop("cls", "key"))))


def in_parquet(path: Path, fault: str) -> Case:
    import pyarrow
    import pyarrow.parquet

    images = [{"bytes": data, "path": None} for data in photos(fault if fault in BYTES else "missing file")]
    numbers = [[float(i)] * (3 if fault == "wrong length" and i == BAD else 2) for i in range(N)]
    kind = pyarrow.struct([("bytes", pyarrow.binary()), ("path", pyarrow.string())])
    table = pyarrow.table({"image": pyarrow.array(images, kind), "label": list(range(N)), "x": numbers})
    pyarrow.parquet.write_table(table, path / "0.parquet", row_group_size=4)
    reason = r"'x' is \w+\[3\]" if fault == "wrong length" else BYTES[fault][1]
    file = f"{path / '0.parquet'}:row 7"
    return Case(lambda: sources.parquet(path / "0.parquet"), frozenset({BAD}), file, reason, decoded)


def in_arrays(path: Path, fault: str) -> Case:
    rows: list[Any] = [np.full(3, i, np.float32) for i in range(N)]
    if fault == "wrong shape":
        rows[BAD] = np.zeros(4, np.float32)
    stage, reason = STAGES.get(fault, (None, r"float32\[4\]"))

    def source() -> Any:
        return sources.arrays(x=rows if stage is None else np.stack(rows), label=np.arange(N))

    def pipeline(begun: Pipeline) -> Pipeline:
        return begun if stage is None else begun.map(stage)

    return Case(source, frozenset({BAD}), "arrays(x, label):row 7", reason, pipeline)


def explode(sample: dict[str, Any]) -> dict[str, Any]:
    if sample["label"] == BAD:
        raise RuntimeError("boom")
    return sample


def nothing(sample: dict[str, Any]) -> Any:
    return None if sample["label"] == BAD else sample


def forget(sample: dict[str, Any]) -> dict[str, Any]:
    return {"label": sample["label"]} if sample["label"] == BAD else sample


def add(sample: dict[str, Any]) -> dict[str, Any]:
    return {**sample, "more": 1} if sample["label"] == BAD else sample


def halve(sample: dict[str, Any]) -> dict[str, Any]:
    return {**sample, "x": sample["x"].astype(np.float16)} if sample["label"] == BAD else sample


STAGES: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "wrong dtype": (halve, r"'x' is float16\[3\], the pipeline's fields say float32\[3\]"),
    "a stage raises": (explode, "explode: boom"),
    "a stage returns nothing": (nothing, "nothing: it returned None: let it return the sample"),
    "a stage forgets a field": (forget, "the field 'x' is missing"),
    "a stage adds a field": (add, r"'more' is not one of the pipeline's \(label, x\)|\(x, label\)"),
}


class Items(list[int]):
    """A map-style Dataset; `shrunk` as a file, so that all processes see it."""

    def __init__(self, fault: str, shrunk: Path) -> None:
        super().__init__(range(N))
        self.fault, self.shrunk = fault, shrunk

    def __getitem__(self, index: Any) -> Any:
        if index >= 20 and self.shrunk.exists():
            raise IndexError("list index out of range")
        image = np.full((3, 4, 4), index, np.uint8)
        if index != BAD:
            return image, index
        if self.fault == "raises":
            raise OSError("the disk is on fire")
        if self.fault == "another count":
            return image, index, 0
        return (image.astype(np.int16) if self.fault == "wrong dtype" else image), index


ITEMS = {"raises": "OSError: the disk is on fire", "another count": "an item of 3 values"}
ITEMS |= {"wrong dtype": r"int16\[3, 4, 4\]", "shrinks": "IndexError: list index out of range"}


def in_dataset(path: Path, fault: str) -> Case:
    def source() -> Any:
        made = sources.dataset(Items(fault, path / "shrunk"), id=f"items {fault}")
        if fault == "shrinks":
            (path / "shrunk").touch()
        return made

    bad = [20, 21, 22] if fault == "shrinks" else [BAD]
    return Case(source, frozenset(bad), f"Items[{bad[0]}]", ITEMS[fault], lambda begun: begun)


MAKERS: dict[str, tuple[Callable[[Path, str], Case], tuple[str, ...]]] = {
    "image_folder": (in_folder, ("corrupt jpeg", "no bytes", "wrong shape", "missing file")),
    "tar": (in_tar, ("cut off jpeg", "no field", "missing file")),
    "parquet": (in_parquet, ("null", "wrong length")),
    "arrays": (in_arrays, ("wrong shape", *STAGES)),
    "dataset": (in_dataset, tuple(ITEMS)),
}
