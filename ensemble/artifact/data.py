"""Opens the data that a model is to predict for."""

from __future__ import annotations

import csv
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from ensemble.artifact.layout import ArtifactError
from pipelines import sources
from pipelines.errors import PipelineError
from pipelines.sources import Source
from pipelines.sources._arrays import Arrays

FORMATS = ".parquet, .tar, .npz, .npy, .csv, a folder of one of the first two, or a folder of images"
_SHARDS = ("parquet", "tar")
_IMAGES = ("jpg", "jpeg", "png", "webp", "bmp", "tif", "tiff")

Array = npt.NDArray[Any]


class Columns(Arrays):
    """The rows of a file that is read into memory: .npy, .npz."""

    def __init__(self, path: Path, columns: Mapping[str, Array]) -> None:
        super().__init__(dict(columns), id=str(path))
        self.path = path

    def where(self, index: int) -> str:
        return f"{self.path}:row {index}"


def open_source(
    data: str | os.PathLike[str],
    field: str | None = None,
    fields: Collection[str] | None = None,
    *,
    keeps_missing: bool = False,
    texts: Collection[str] = (),
) -> Source:
    """A source of the records in a file or folder.

    Args:
        data: a path; the ending of the file, or what is in the folder, says the format. In .npz each array is a
            field, and in .csv each column.
        field: what the array of a .npy file, or the image of an archive, is called.
        fields: those that are read of Parquet, .npz and .csv, as far as they are there; None: all.
        keeps_missing: whether a number that is missing in .csv or .parquet is NaN, for a stage that imputes it.
        texts: fields of .csv that are texts, whatever they look like.

    Raises:
        ArtifactError: there is no such file, or it is of no known format.
        PipelineError: it cannot be read.
    """
    path = Path(data).expanduser()
    if path.is_dir():
        return _open_folder(path, field, fields, keeps_missing=keeps_missing)
    if not path.exists() and not any(char in str(path) for char in "*?["):
        raise ArtifactError(f"there is no file or folder {str(path)!r} with data to predict for")
    suffix = path.suffix.lower()
    if suffix == ".parquet":
        return _open_parquet(path, fields, keeps_missing=keeps_missing)
    if suffix == ".tar":
        return _open_tar(path, field)
    if suffix in (".npy", ".npz"):
        return _open_arrays(path, field, fields)
    if suffix == ".csv":
        return _open_table(path, fields, texts, keeps_missing=keeps_missing)
    raise ArtifactError(f"{path} is of no known format; data are {FORMATS}")


def _open_folder(path: Path, field: str | None, fields: Collection[str] | None, *, keeps_missing: bool) -> Source:
    for suffix in _SHARDS:
        if any(path.glob(f"*.{suffix}")):
            return open_source(path / f"*.{suffix}", field, fields, keeps_missing=keeps_missing)
    return sources.image_folder(path)


def _open_parquet(path: Path, fields: Collection[str] | None, *, keeps_missing: bool) -> Source:
    missing: Literal["nan", "error"] = "nan" if keeps_missing else "error"
    source = sources.parquet(str(path), missing=missing)
    wanted = [name for name in source.columns if fields is None or name in fields]
    if not wanted or len(wanted) == len(source.columns):
        return source
    return sources.parquet(str(path), columns=wanted, missing=missing)


def _open_tar(path: Path, field: str | None) -> Source:
    source = sources.tar(str(path))
    images = set(_IMAGES) & set(source.extensions)
    if field is None or field in source.extensions or not images:
        return source
    return sources.tar(str(path), rename=dict.fromkeys(_IMAGES, field))


def _open_arrays(path: Path, field: str | None, fields: Collection[str] | None) -> Source:
    try:
        content = np.load(path, mmap_mode="r" if path.suffix.lower() == ".npy" else None, allow_pickle=False)
        if isinstance(content, np.ndarray):
            return Columns(path, {field or "x": content})
        names = [name for name in content.files if fields is None or name in fields] or content.files
        return Columns(path, {name: content[name] for name in names})
    except (OSError, EOFError, ValueError, PipelineError) as error:
        raise ArtifactError(f"{path} cannot be read: {error}") from None


def _open_table(
    path: Path, fields: Collection[str] | None, texts: Collection[str], *, keeps_missing: bool
) -> Source:
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            header = [name.strip() for name in next(csv.reader(file), [])]
    except (OSError, UnicodeDecodeError) as error:
        raise ArtifactError(f"{path} cannot be read: {error}") from None
    wanted = [name for name in header if fields is None or name in fields] or None
    missing: Literal["nan", "error"] = "nan" if keeps_missing else "error"
    source = sources.csv(str(path), wanted, missing=missing)
    if not set(texts) & set(source.types):
        return source
    types = {name: "str" if name in texts else kind for name, kind in source.types.items()}
    return sources.csv(str(path), types, missing=missing)
