"""Source of image files in folders."""

from __future__ import annotations

import hashlib
import math
import os
import time
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt

from pipelines.errors import PipelineError, SampleError, as_utf8
from pipelines.fingerprint import describe_array, known_as
from pipelines.sources._base import Source
from pipelines.sources._classes import ClassNames
from pipelines.sources._files import File
from pipelines.sources._origin import Indices
from pipelines.sources._strings import Strings

EXTENSIONS = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".tif", ".tiff", ".ppm", ".pgm")
_THREADS, _RUN = 16, 1000  # of the files whose status is read at once, and one after the other in a thread
_QUICK_S = 50e-6  # a status in memory takes 3 microseconds, from a file server hundreds
#: Extensions of other images, which are left out: it is said how many.
_OTHERS = frozenset((
    ".jfif", ".jpe", ".jp2", ".jxl", ".heic", ".heif", ".avif", ".gif", ".pbm", ".pfm", ".ras", ".hdr", ".exr",
    ".tga", ".ico", ".svg", ".psd", ".dng", ".raw", ".cr2", ".cr3", ".nef", ".arw", ".orf", ".rw2",
))  # fmt: skip


@known_as("pipelines.sources.image_folder")
class ImageFolder(Source):
    """See `image_folder`.

    Attributes:
        classes: names of the sub-folders, or of the `labels` that are texts, in the order of their numbers; empty
            if there are none.
    """

    kind = "image_folder"
    is_fork_safe = True

    def __init__(self, path: str | os.PathLike[str], names: bool, labels: Mapping[str, Any] | None) -> None:
        self.path = os.path.abspath(os.path.expanduser(path))
        if not os.path.isdir(self.path):
            what = "is not a folder" if os.path.exists(self.path) else "no such folder"
            raise PipelineError(f"image_folder({os.fspath(path)!r}): {what}")
        try:
            images, classes = _scan_folder(self.path)
            self.classes = tuple(map(as_utf8, classes))
            names_found = [name for name, _ in images]
            status = _read_status(self.path, names_found)
        except OSError as error:
            raise PipelineError(f"image_folder({self.path!r}): {error.filename}: {error.strerror}") from None
        self._made_by = (names, labels)
        self._names = Strings(names_found)
        self._labels = np.array([label for _, label in images], np.int32)
        self._as_indexed = np.array(status, np.int64)
        rows = ((*file, *stamp) for file, stamp in zip(images, status, strict=True))
        self._stamps = np.fromiter(map(_stamp, rows), np.uint64, len(images))
        self._has_names, self._given = names, labels is not None
        if labels is not None:
            if self.classes:
                raise PipelineError(
                    f"image_folder({self.path!r}): its sub-folders ({self.classes[0]} ...) are labels already; "
                    "labels= is for a flat folder"
                )
            self._labels, self.classes = _read_labels(labels, names_found)

    def __len__(self) -> int:
        return len(self._names)

    def _read(self, index: int) -> dict[str, Any]:
        path = self.where(index)
        try:
            with File(path, *self._as_indexed[index].tolist()).open() as file:
                data = file.read()
        except PipelineError as error:
            raise SampleError(index, path, str(error).removeprefix(f"{path}: ")) from error
        except OSError as error:
            raise SampleError(index, path, f"cannot be read: {error.strerror}") from error
        if not data:
            raise SampleError(index, path, "the file is empty")
        record: dict[str, Any] = {"image": data}
        if self.classes or self._given:
            record["label"] = self._labels[index].item()
        if self._has_names:
            record["key"] = self._names[index]
        return record

    def column(self, field: str) -> npt.NDArray[Any]:
        if field == "label" and (self.classes or self._given):
            return self._labels.astype(np.int64) if self._labels.dtype.kind == "i" else self._labels.copy()
        return super().column(field)

    def find_class_names(self, field: str) -> ClassNames | None:
        return ClassNames((self.classes,)) if field == "label" and self.classes else None

    def renew(self, renewed: dict[int, Source]) -> Source:
        new = ImageFolder(self.path, *self._made_by)
        return self if np.array_equal(new._stamps, self._stamps) else new

    def where(self, index: int) -> str:
        return os.path.join(self.path, self._names[index])

    def identity(self) -> Any:
        return self.identify_records(slice(None))

    def identify_records(self, indices: Indices | slice) -> Any:
        digest = hashlib.sha256(self._stamps[indices].astype("<u8").tobytes()).hexdigest()
        identity = {"source": self._describe_class(), "files": digest}
        if self._given:
            identity["labels"] = [describe_array(self._labels[indices]), list(self.classes)]
        return {**identity, "names": True} if self._has_names else identity


def image_folder(
    path: str | os.PathLike[str], names: bool = False, labels: Mapping[str, Any] | None = None
) -> ImageFolder:
    """Makes a source of the image files in a folder, in sorted order.

    If sub-folders hold the images (at any depth), each is a class; where all images lie deeper, a warning says so.
    Hidden files and files without the extension of an image are ignored; a warning counts those with that of an
    image of another kind (.heic, .avif, .jfif, ...).

    Args:
        path: the folder.
        names: whether records have the name of their file as the field `key`: its path inside the folder.
        labels: for a flat folder, a mapping file name -> label. Names may be without extension. Labels are
            integers, finite floats (for a regression), or texts, which are numbered in sorted order.

    Returns:
        A source of records with `image` (the bytes of the file) and, if there are classes or labels, `label` (int,
        the position of the sub-folder in sorted order; or what `labels` says). Its attribute `classes` has the
        names of the sub-folders, or the texts.

    Raises:
        PipelineError: the folder is missing, it or a sub-folder holds no image, images are both beside and inside
            sub-folders, a file cannot be found, or a file has no label, or labels are of several kinds.

    Examples:
        >>> pipe = Pipeline(image_folder("photos")).map(stages.decode_image("image"))
    """
    return ImageFolder(path, names, labels)


def _read_status(root: str, names: list[str]) -> list[tuple[int, int]]:
    """(size, mtime_ns) of each file in a folder.

    They are read in threads where each takes long, as a file server answers many at once; what the system has in
    memory is read four times as fast without.
    """

    def read(start: int) -> list[tuple[int, int]]:
        statuses = (os.stat(os.path.join(root, name)) for name in names[start : start + _RUN])
        return [(status.st_size, status.st_mtime_ns) for status in statuses]

    began, first = time.perf_counter(), read(0)
    starts = range(_RUN, len(names), _RUN)
    if time.perf_counter() - began < _RUN * _QUICK_S:
        return list(chain(first, *map(read, starts)))
    with ThreadPoolExecutor(_THREADS) as threads:
        return list(chain(first, *threads.map(read, starts)))


def _stamp(row: tuple[str, int, int, int]) -> int:
    """64 bits of the name of a file, its label, its size and the time of its last change."""
    text = repr(row).encode("utf-8", "surrogateescape")
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def _scan_folder(root: str) -> tuple[list[tuple[str, int]], tuple[str, ...]]:
    """(path in the folder, label) of each image, and the classes."""
    left_out: Counter[str] = Counter()
    flat = _list_images(root, "", left_out, deep=False)
    classes = tuple(sorted(e.name for e in os.scandir(root) if e.is_dir() and not e.name.startswith(".")))
    images = [(name, -1) for name in flat]
    for label, folder in enumerate(classes):
        inside = _list_images(root, folder, left_out, deep=True)
        if not inside and not flat:
            others = _describe_left_out(left_out) + "; if it is no class, remove it"
            raise PipelineError(f"image_folder({root!r}): class folder {folder!r} holds no image{others}")
        if inside and flat:
            raise PipelineError(
                f"image_folder({root!r}): images both beside and inside sub-folders "
                f"({flat[0]}, {inside[0]}); move the former into a class folder"
            )
        images += [(name, label) for name in inside]
    if not images:
        others = _describe_left_out(left_out)
        raise PipelineError(f"image_folder({root!r}): holds no image ({', '.join(EXTENSIONS)}){others}")
    if left_out:
        warnings.warn(f"image_folder({root!r}){_describe_left_out(left_out)}", stacklevel=4)
    if not flat and all(os.sep in name.partition(os.sep)[2] for name, _ in images):
        inner = images[0][0].split(os.sep)
        warnings.warn(
            f"image_folder({root!r}): the class folders {', '.join(classes)[:60]} have images only in their "
            f"sub-folders; if {inner[1]!r} is a class, give the folder {os.path.join(root, inner[0])!r}",
            stacklevel=4,
        )
    return images, () if flat else classes


def _describe_left_out(left_out: Counter[str]) -> str:
    """How many images of other kinds there are, and what to do, as the end of a message; empty without any."""
    if not left_out:
        return ""
    counted = ", ".join(f"{number:,} {extension}" for extension, number in sorted(left_out.items()))
    advice = "; .jfif and .jpe are JPEG: rename them to .jpg" if {".jfif", ".jpe"} & left_out.keys() else ""
    return f": images of other kinds are left out ({counted}): convert them to PNG or JPEG{advice}"


def _list_images(root: str, folder: str, left_out: Counter[str], *, deep: bool) -> list[str]:
    images: list[str] = []
    before = os.path.join(folder, "")
    for entry in sorted(os.scandir(os.path.join(root, folder)), key=lambda entry: entry.name):
        if entry.name.startswith("."):
            continue
        name = before + entry.name  # as `os.path.join` has it, in a tenth of its time
        if entry.is_dir():
            images += _list_images(root, name, left_out, deep=True) if deep else []
        elif entry.name.lower().endswith(EXTENSIONS):
            images.append(name)
        elif (extension := os.path.splitext(name)[1].lower()) in _OTHERS:
            left_out[extension] += 1
    return images


def _read_labels(labels: Any, names: Sequence[str]) -> tuple[np.ndarray[Any, Any], tuple[str, ...]]:
    """The label of each file, int32, int64 or float64 [n], and the names of the classes where labels are texts."""
    if not isinstance(labels, Mapping):
        raise PipelineError(
            "image_folder(): labels must be a mapping file name -> label (of pandas, series.to_dict()), got "
            f"{type(labels).__name__}"
        )
    stems = Counter(os.path.splitext(name)[0] for name in names)
    stem_of = {name: os.path.splitext(name)[0] for name in names}
    keys = [name if name in labels or stems[stem_of[name]] > 1 else stem_of[name] for name in names]
    if unused := [key for key in labels if key not in set(keys)]:
        warnings.warn(
            f"image_folder(): labels of {len(unused)} files that are not there: {unused[0]!r} ...", stacklevel=4
        )
    values: list[Any] = [labels.get(key) for key in keys]
    values = [value.item() if isinstance(value, np.generic) else value for value in values]
    is_missing = [value is None or (isinstance(value, float) and math.isnan(value)) for value in values]
    missing = [name for name, lacks in zip(names, is_missing, strict=True) if lacks]
    if missing:
        more = f", nor for {len(missing) - 1} more of the {len(names)} files" if len(missing) > 1 else ""
        raise PipelineError(f"image_folder(): labels: no label for {missing[0]!r}{more}")
    if all(isinstance(value, str) for value in values):
        classes = tuple(sorted(set(values)))
        numbers = {name: number for number, name in enumerate(classes)}
        return np.array([numbers[value] for value in values], np.int32), classes
    are_integers = all(isinstance(value, int) for value in values)
    for name, value in zip(names, values, strict=True):
        if not isinstance(value, int | float):
            raise PipelineError(
                f"image_folder(): labels must be all integers, all numbers, or all texts; {name!r} has "
                f"{value!r:.60}"
            )
        if abs(value) == math.inf or (are_integers and abs(value) >= 2**63):
            raise PipelineError(f"image_folder(): labels: the label of {name!r} is {value!r:.60}")
    return np.array(values, np.int64 if are_integers else np.float64), ()
