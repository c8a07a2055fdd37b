"""Opens the data that a model is to predict for."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ensemble.artifact.layout import ArtifactError
from pipelines import sources
from pipelines.errors import SampleError
from pipelines.sources import Source

FORMATS = ".parquet, .tar, .npz, .npy, .csv, a folder of one of the first two, or a folder of images"
_SHARDS = ("parquet", "tar")
_IMAGES = ("jpg", "jpeg", "png", "webp", "bmp", "tif", "tiff")

Array = npt.NDArray[Any]


class Columns(Source):
    """The rows of a file that is read into memory: .npy, .npz, .csv.

    Args:
        path: of the file, for messages.
        columns: field -> array with the records along the first axis, all of one length.
        missing: field -> bool [n]: the records that have no value of it.
    """

    kind = "columns"

    def __init__(
        self, path: Path, columns: Mapping[str, Array], missing: Mapping[str, Array] | None = None
    ) -> None:
        scalars = [name for name, values in columns.items() if values.ndim == 0]
        if scalars:
            raise ArtifactError(f"{path}: {scalars[0]!r} is a single number, not one value for each record")
        lengths = {name: len(values) for name, values in columns.items()}
        if len(set(lengths.values())) > 1:
            each = ", ".join(f"{name} {length}" for name, length in lengths.items())
            raise ArtifactError(f"{path}: its columns differ in length: {each}")
        self.path, self.columns, self.missing = path, dict(columns), dict(missing or {})
        self._count = max(lengths.values(), default=0)
        if not self._count:
            raise ArtifactError(f"{path} holds no record")

    def __len__(self) -> int:
        return self._count

    def _read(self, index: int) -> dict[str, Any]:
        for name, missing in self.missing.items():
            if missing[index]:
                raise SampleError(index, self.where(index), f"column {name!r} has no value")
        record = {name: values[index] for name, values in self.columns.items()}
        return {name: v.copy() if isinstance(v, np.ndarray) else v for name, v in record.items()}

    def is_text(self, field: str) -> bool:
        values = self.columns.get(field)
        return values is not None and values.dtype.kind in "OU" and isinstance(values[0], str)

    def where(self, index: int) -> str:
        return f"{self.path}:row {index}"

    def identity(self) -> Any:
        return None


def open_source(
    data: str | os.PathLike[str], field: str | None = None, fields: Collection[str] | None = None
) -> Source:
    """A source of the records in a file or folder.

    Args:
        data: a path; the ending of the file, or what is in the folder, says the format. In .npz each array is a
            field, and in .csv each column.
        field: what the array of a .npy file, or the image of an archive, is called.
        fields: those that are read of Parquet, .npz and .csv, as far as they are there; None: all.

    Raises:
        ArtifactError: there is no such file, or it is of no known format.
        PipelineError: it cannot be read.
    """
    path = Path(data).expanduser()
    if path.is_dir():
        return _open_folder(path, field, fields)
    if not path.exists() and not any(char in str(path) for char in "*?["):
        raise ArtifactError(f"there is no file or folder {str(path)!r} with data to predict for")
    suffix = path.suffix.lower()
    if suffix == ".parquet":
        return _open_parquet(path, fields)
    if suffix == ".tar":
        return _open_tar(path, field)
    if suffix in (".npy", ".npz"):
        return _open_arrays(path, field, fields)
    if suffix == ".csv":
        return _open_table(path, fields)
    raise ArtifactError(f"{path} is of no known format; data are {FORMATS}")


def _open_folder(path: Path, field: str | None, fields: Collection[str] | None) -> Source:
    for suffix in _SHARDS:
        if any(path.glob(f"*.{suffix}")):
            return open_source(path / f"*.{suffix}", field, fields)
    return sources.image_folder(path)


def _open_parquet(path: Path, fields: Collection[str] | None) -> Source:
    source = sources.parquet(str(path))
    wanted = [name for name in source.columns if fields is None or name in fields]
    if not wanted or len(wanted) == len(source.columns):
        return source
    return sources.parquet(str(path), columns=wanted)


def _open_tar(path: Path, field: str | None) -> Source:
    source = sources.tar(str(path))
    images = set(_IMAGES) & set(source.extensions)
    if field is None or field in source.extensions or not images:
        return source
    return sources.tar(str(path), rename=dict.fromkeys(_IMAGES, field))


def _open_arrays(path: Path, field: str | None, fields: Collection[str] | None) -> Source:
    try:
        found = np.load(path, mmap_mode="r" if path.suffix.lower() == ".npy" else None, allow_pickle=False)
        if isinstance(found, np.ndarray):
            return Columns(path, {field or "x": found})
        names = [name for name in found.files if fields is None or name in fields] or found.files
        columns = {name: found[name] for name in names}
    except (OSError, EOFError, ValueError) as error:
        raise ArtifactError(f"{path} cannot be read: {error}") from None
    return Columns(path, columns)


def _open_table(path: Path, fields: Collection[str] | None) -> Source:
    import pyarrow
    import pyarrow.csv

    options = pyarrow.csv.ConvertOptions()
    options.null_values = [word for word in options.null_values if word.strip("-").lower() != "nan"]  # a number
    try:
        table = pyarrow.csv.read_csv(path, convert_options=options)
    except (OSError, pyarrow.ArrowException) as error:
        raise ArtifactError(f"{path} cannot be read: {' '.join(str(error).split())}") from None
    names = [name for name in table.column_names if fields is None or name in fields] or table.column_names
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ArtifactError(f"{path} has two columns {twice!r}")
    columns = {name: table.column(name) for name in names}
    missing = {name: column.is_null().to_numpy() for name, column in columns.items() if column.null_count}
    return Columns(path, {name: _to_numpy(column) for name, column in columns.items()}, missing)


def _to_numpy(column: Any) -> Array:
    """A column as an array of its own type, which numbers would lose by what is missing among them."""
    import pyarrow

    if column.null_count and pyarrow.types.is_integer(column.type):
        column = column.fill_null(0)
    found: Array = column.to_numpy()
    return found
