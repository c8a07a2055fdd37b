"""Data with something wrong in it, for the tests of bad records: each fault in each kind of source that has it.

A `Case` is made in an empty folder: 23 good-looking records, of which some, from index 1 on, cannot be had.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import tarfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from source_cases import CASES, rows, summarize

from pipelines import Pipeline, PipelineError, sources, stages

N = 23
BAD = 7


@dataclass(frozen=True)
class Case:
    """A source with a fault, and what is known of it.

    Attributes:
        source: is made when called, from files that may be changed right after.
        bad: indices that cannot be prepared.
        file: what an error names beside the index.
        reason: a pattern for what it says.
        pipeline: the stages after the source.
    """

    source: Callable[[], Any]
    bad: frozenset[int]
    file: str
    reason: str
    pipeline: Callable[[Pipeline], Pipeline]


def jpeg(seed: int, size: int = 16) -> bytes:
    import simplejpeg

    noise = np.random.default_rng(seed).integers(0, 255, (size, size, 3), np.uint8)
    data: bytes = simplejpeg.encode_jpeg(noise, 95)
    return data


def decoded(pipeline: Pipeline) -> Pipeline:
    return pipeline.map(stages.decode_jpeg("image"))


def as_it_is(pipeline: Pipeline) -> Pipeline:
    return pipeline


BAD_BYTES: dict[str, tuple[bytes, str]] = {
    "corrupt jpeg": (jpeg(1)[:150] + b"\xff\xd9", "decode_jpeg|DecodeJpeg"),
    "cut off jpeg": (jpeg(1)[:-200], "cannot decode JPEG"),
    "no jpeg": (b"what is this?", "the bytes are of another format"),
    "no bytes": (b"", "the file is empty|there are no bytes"),
    "wrong shape": (jpeg(1, size=24), r"uint8\[3, 24, 24\], the pipeline's fields say uint8\[3, 16, 16\]"),
}

# --- image_folder ----------------------------------------------------------------------------------------


def folder(path: Path, bad: bytes | None = None) -> list[Path]:
    made = []
    for i in range(N):
        file = path / f"class-{i % 2}" / f"{i:02}.jpg"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(bad if bad is not None and i == BAD else jpeg(i))
        made.append(file)
    return sorted(made)


def in_folder(path: Path, fault: str) -> Case:
    """Classes come one after the other: file 7 is not record 7."""
    files = folder(path, BAD_BYTES[fault][0] if fault in BAD_BYTES else None)
    victim = path / "class-1" / "07.jpg"
    index = files.index(victim)

    def source() -> Any:
        made = sources.image_folder(path)
        if fault == "missing file":
            victim.unlink()
        elif fault == "shrinks":
            os.truncate(victim, victim.stat().st_size // 2)
        return made

    reasons = {"missing file": "No such file", "shrinks": "was changed"}
    reason = reasons.get(fault) or BAD_BYTES[fault][1]
    return Case(source, frozenset({index}), str(victim), reason, decoded)


# --- tar -------------------------------------------------------------------------------------------------


def shard(path: Path, indices: range, bad: bytes | None = None, without: str = "") -> None:
    with tarfile.open(path, "w") as archive:
        for i in indices:
            members = {"jpg": bad if bad is not None and i == BAD else jpeg(i), "cls": str(i).encode()}
            for extension, data in members.items():
                if i == BAD and extension == without:
                    continue
                info = tarfile.TarInfo(f"{i:02}.{extension}")
                info.size = len(data)
                archive.addfile(info, io.BytesIO(data))


def in_tar(path: Path, fault: str) -> Case:
    """Two shards; the second one goes, shrinks or is cut off."""
    first, second = path / "0.tar", path / "1.tar"
    bad, file, reason = frozenset({BAD}), f"{first}:07.jpg", BAD_BYTES.get(fault, (b"", ""))[1]
    shard(
        first, range(12), BAD_BYTES[fault][0] if fault in BAD_BYTES else None, "jpg" if fault == "no field" else ""
    )
    shard(second, range(12, N))
    if fault == "no field":
        file, reason = f"{first}:07.cls", "no field 'image'"
    if fault == "truncated":
        with tarfile.open(second) as archive:
            last = archive.getmember("22.jpg").offset_data
        os.truncate(second, last + 100)
        bad, file, reason = frozenset({22}), f"{second}:22.jpg", "cut off"

    def source() -> Any:
        made = sources.tar([first, second], rename={"jpg": "image"})
        if fault == "missing file":
            second.unlink()
        elif fault == "shrinks":
            os.truncate(second, 5000)
        return made

    if fault in ("missing file", "shrinks"):
        bad, file = frozenset(range(12, N)), str(second)
        reason = "No such file" if fault == "missing file" else "was changed"

    def pipeline(begun: Pipeline) -> Pipeline:
        return begun.map(stages.drop("cls")).map(stages.drop("key")).map(stages.decode_jpeg("image"))

    return Case(source, bad, file, reason, pipeline)


# --- parquet ---------------------------------------------------------------------------------------------


def in_parquet(path: Path, fault: str) -> Case:
    """Two files of row groups of 4."""
    import pyarrow
    import pyarrow.parquet

    def write(file: Path, indices: range) -> None:
        images: list[Any] = []
        for i in indices:
            wrong = BAD_BYTES[fault][0] if fault in BAD_BYTES else None if fault == "null" else jpeg(i)
            images.append({"bytes": wrong if i == BAD else jpeg(i), "path": None})
        numbers = [[float(i)] * (3 if fault == "wrong length" and i == BAD else 2) for i in indices]
        columns = {"image": images, "label": list(indices), "x": numbers}
        kinds = {"image": pyarrow.struct([("bytes", pyarrow.binary()), ("path", pyarrow.string())])}
        table = pyarrow.table({name: pyarrow.array(column, kinds.get(name)) for name, column in columns.items()})
        pyarrow.parquet.write_table(table, file, row_group_size=4)

    first, second = path / "0.parquet", path / "1.parquet"
    write(first, range(12))
    write(second, range(12, N))
    bad, file = frozenset({BAD}), f"{first}:row 7"
    reason = {"null": "'image' has no bytes|'image' is null", "wrong length": r"'x' is \w+\[3\]"}.get(fault, "")
    reason = reason or BAD_BYTES.get(fault, (b"", "was changed|No such file"))[1]
    if fault in ("missing file", "shrinks"):
        bad, file = frozenset(range(12, N)), str(second)

    def source() -> Any:
        made = sources.parquet([first, second])
        if fault == "missing file":
            second.unlink()
        elif fault == "shrinks":
            os.truncate(second, second.stat().st_size // 2)
        return made

    return Case(source, bad, file, reason, decoded)


# --- memory ----------------------------------------------------------------------------------------------


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


def turn_to_list(sample: dict[str, Any]) -> Any:
    return [1] if sample["label"] == BAD else sample


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
    "a stage returns a list": (turn_to_list, "returned list, not a dict"),
    "a stage forgets a field": (forget, "the field 'x' is missing"),
    "a stage adds a field": (add, r"'more' is not one of the pipeline's \(label, x\)|\(x, label\)"),
}


class Items:
    """A map-style Dataset; `shrunk` as a file, so that all processes see it."""

    def __init__(self, fault: str, shrunk: Path) -> None:
        self.fault, self.shrunk = fault, shrunk

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> Any:
        if index >= 20 and self.shrunk.exists():
            raise IndexError("list index out of range")
        image = np.full((3, 4, 4), index, np.uint8)
        if index != BAD:
            return image, index
        if self.fault == "raises":
            raise OSError("the disk is on fire")
        if self.fault == "another count":
            return image, index, 0
        if self.fault == "wrong dtype":
            return image.astype(np.int16), index
        if self.fault == "wrong shape":
            return image[:, :2], index
        return image, index


def in_dataset(path: Path, fault: str) -> Case:
    reasons = {
        "raises": "OSError: the disk is on fire",
        "another count": "an item of 3 values",
        "wrong dtype": r"int16\[3, 4, 4\]",
        "wrong shape": r"uint8\[3, 2, 4\]",
        "shrinks": "IndexError: list index out of range",
    }

    def source() -> Any:
        made = sources.dataset(Items(fault, path / "shrunk"), id=f"items {fault}")
        if fault == "shrinks":
            (path / "shrunk").touch()
        return made

    bad = frozenset({20, 21, 22} if fault == "shrinks" else {BAD})
    return Case(source, bad, f"Items[{20 if fault == 'shrinks' else BAD}]", reasons[fault], as_it_is)


MAKERS: dict[str, tuple[Callable[[Path, str], Case], tuple[str, ...]]] = {
    "image_folder": (in_folder, ("corrupt jpeg", "no bytes", "wrong shape", "missing file", "shrinks")),
    "tar": (in_tar, ("cut off jpeg", "no field", "truncated", "missing file", "shrinks")),
    "parquet": (in_parquet, ("no jpeg", "null", "wrong length", "missing file", "shrinks")),
    "arrays": (in_arrays, ("wrong shape", *STAGES)),
    "dataset": (in_dataset, ("raises", "another count", "wrong dtype", "wrong shape", "shrinks")),
}


class OwnSource(sources.Source):
    """A user's own source: a file with a line of JSON for each record."""

    kind = "own"

    def __init__(self, path: Path) -> None:
        self.path, self.lines = str(path), path.read_bytes().splitlines()

    def __len__(self) -> int:
        return len(self.lines)

    def _read(self, index: int) -> dict[str, Any]:
        row = json.loads(self.lines[index])
        return {"label": np.int64(row["label"]), "x": np.array(row["x"], np.float32)}

    def where(self, index: int) -> str:
        return f"{self.path}:{index + 1}"

    def identity(self) -> Any:
        return [self.path, hashlib.sha256(b"\n".join(self.lines)).hexdigest()]


def write_photos(folder: Path, data: dict[str, Any]) -> None:
    (folder / "images" / "0").mkdir(parents=True)
    for number in data["label"][:6]:
        (folder / "images" / "0" / f"{number}.jpg").write_bytes(jpeg(int(number), 24))


#: Kind -> what writes its files, and what reads them.
DAMAGED: dict[str, tuple[Callable[[Path, dict[str, Any]], None], Callable[[Path], Pipeline]]] = {
    **{
        kind: (
            CASES[kind].write,
            lambda folder, kind=kind: Pipeline(CASES[kind].open(folder), seed=0).map(summarize),
        )
        for kind in ("tar", "jsonl", "hdf5", "memmap", "parquet")
    },
    "jpeg": (
        write_photos,
        lambda folder: decoded(Pipeline(sources.image_folder(folder / "images"), seed=0)),
    ),
    "own": (CASES["jsonl"].write, lambda folder: Pipeline(OwnSource(folder / "a.jsonl"), seed=0)),
}


def read_damaged(kind: str, folder: Path, count: int) -> None:
    """Reads so many damaged versions of the files of a kind; prints for each, as JSON, what came of it."""
    write, read = DAMAGED[kind]
    (folder / "whole").mkdir()
    write(folder / "whole", rows())
    for number in range(count):
        chosen = np.random.default_rng([number, *kind.encode()])
        damaged = Path(shutil.copytree(folder / "whole", folder / str(number)))
        files = sorted(
            path for path in damaged.rglob("*") if path.is_file() and (kind != "own" or path.name[0] == "a")
        )
        file = files[chosen.integers(len(files))]
        content = bytearray(file.read_bytes())
        for _ in range(chosen.integers(1, 9)):
            content[chosen.integers(len(content))] ^= 1 << int(chosen.integers(8))
        cut = chosen.integers(len(content)) if chosen.random() < 0.3 else len(content)
        file.write_bytes(content[:cut])
        print(json.dumps({"file": file.name, "begins": number}), flush=True)
        found: dict[str, Any] = {"error": None}
        try:
            for batch in read(damaged).loader(8, epochs=1):
                assert len(batch["index"])
        except Exception as error:
            found = {"error": type(error).__name__, "message": str(error), "index": getattr(error, "index", None)}
            found["is_ours"] = isinstance(error, PipelineError)
        print(json.dumps({"file": file.name, **found}), flush=True)
        shutil.rmtree(damaged)
