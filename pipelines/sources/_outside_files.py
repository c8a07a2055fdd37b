"""Image files that a column of a Hugging Face Dataset names instead of holding their bytes."""

from __future__ import annotations

import hashlib
import os
from typing import Any

import numpy as np
import numpy.typing as npt

from pipelines.sources._arrow_files import ArrowColumn
from pipelines.sources._columns import MissingValue
from pipelines.sources._files import File


class OutsideFiles:
    """The files of a column, as they are now; none where all rows hold their bytes.

    Args:
        column: of structs of `bytes` and `path`.
        indices: the rows that are read, int64 [n]; None: all.

    Attributes:
        digest: of their paths, sizes and times of change; "" if there are none.
    """

    def __init__(self, column: ArrowColumn, indices: npt.NDArray[np.int64] | None) -> None:
        from pyarrow import compute

        self._folder = os.getcwd()  # paths may be relative to it
        rows: list[int] = []
        found: list[tuple[int, int]] = []
        digest = hashlib.sha256()
        for number, chunk in column.chunks():
            data, paths = split_file(chunk)
            if not data.null_count:
                continue
            outside = np.asarray(compute.and_(data.is_null(), paths.is_valid()))
            here = column.starts[number] + np.flatnonzero(outside)
            for row in here.tolist() if indices is None else here[np.isin(here, indices)].tolist():
                path = paths[row - column.starts[number]].as_py()
                try:
                    file = File.of(os.path.join(self._folder, path))
                    found.append((file.size, file.mtime_ns))
                except OSError:  # whoever reads it says so
                    found.append((-1, -1))
                rows.append(row)
                digest.update(repr((row, path, found[-1])).encode("utf-8", "surrogatepass"))
        self._rows, self._as_indexed = np.array(rows, np.int64), np.array(found, np.int64)
        self.digest = digest.hexdigest() if rows else ""

    def read(self, start: int, row: int, path: str) -> bytes:
        """Reads the file that row `start + row` of the column names.

        Raises:
            MissingValue: there was no such file when the source was made.
            PipelineError: it is missing now, or was changed since.
        """
        size, mtime_ns = self._as_indexed[np.searchsorted(self._rows, start + row)].tolist()
        if size < 0:
            raise MissingValue(
                f"is kept outside of the data, in {path}; there is no such file here: where it is, "
                "dataset.save_to_disk(...) takes it in"
            )
        with File(os.path.abspath(os.path.join(self._folder, path)), size, mtime_ns).open() as file:
            return file.read()


def split_file(chunk: Any) -> tuple[Any, Any]:
    """The arrays of bytes and of paths in an Arrow array of files."""
    parts = chunk.flatten()
    return tuple(parts[chunk.type.get_field_index(name)] for name in ("bytes", "path"))
