"""Source of arrays in files: `.npy`, and raw files behind an `np.memmap`."""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from pipelines.errors import PipelineError
from pipelines.fingerprint import known_as
from pipelines.sources._arrays import Arrays
from pipelines.sources._files import File
from pipelines.sources._mapped import MappedArray, locate


@known_as("pipelines.sources.memmap")
class Memmap(Arrays):
    """See `memmap`."""

    kind = "memmap"

    def where(self, index: int) -> str:
        files = dict.fromkeys(
            values.file.path for values in self.columns.values() if isinstance(values, MappedArray)
        )
        return f"{', '.join(files)}:row {index}"

    def identity(self) -> Any:
        columns = {
            name: values.identity() for name, values in self.columns.items() if isinstance(values, MappedArray)
        }
        return {"source": self._describe_class(), "columns": columns}


def memmap(**columns: str | os.PathLike[str] | np.memmap[Any, Any]) -> Memmap:
    """Makes a source of arrays in files, which every process maps: record i holds row i of each.

    Processes share the pages of the files, and no data are pickled. A changed file is detected when a process maps
    it; while it is mapped nothing may be written to it, and it must not be cut.

    Args:
        columns: field -> path of an `.npy` file (`np.save`), or an `np.memmap` or a view of one, for raw files.

    Returns:
        A source of records with a field for each column: an array [*shape] of the column's dtype in native byte
        order, a scalar, a text, or a dict for an element of a structured dtype.

    Raises:
        PipelineError: a file is missing, of another format, cut off or has Python objects; an `np.memmap` is not
            in a file (mode "c", or the file was deleted); the columns differ in length or are empty.

    Examples:
        >>> source = memmap(image="images.npy", label="labels.npy")
    """
    return Memmap({name: _map_column(name, values) for name, values in columns.items()}, None)


def _map_column(name: str, values: Any) -> MappedArray:
    if isinstance(values, str | os.PathLike):
        column = _open_npy(os.path.expanduser(os.fspath(values)))
    else:
        if not isinstance(values, np.ndarray):
            raise PipelineError(
                f"memmap(): column {name!r} must be a path or an np.memmap, got {type(values).__name__}"
            )
        located = locate(values)
        if located is None:
            raise PipelineError(
                f"memmap(): column {name!r} is not in a file (mode 'c', an empty array, a result of "
                "arithmetic, or the file was deleted); data in memory are for arrays()"
            )
        column = located
    if not column.shape:
        raise PipelineError(f"memmap(): column {name!r} must have its records along the first axis, got a scalar")
    return column


def _open_npy(path: str) -> MappedArray:
    try:
        file = File.of(path).identify()
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except OSError as error:
        raise PipelineError(f"memmap({path!r}): {(error.strerror or str(error)).lower()}") from None
    except Exception as error:  # numpy lets pass what Python's tokenizer and parser say to a damaged header
        reason = str(error).partition(" when ")[0]
        if "pickle" in reason:  # numpy takes whatever has no header for a pickle
            reason = "no .npy header; give a raw file as np.memmap(path, dtype, 'r', shape=...)"
        raise PipelineError(f"memmap({path!r}): is no .npy file that can be mapped: {reason}") from None
    if not isinstance(array, np.memmap):
        array.close()
        raise PipelineError(f"memmap({path!r}): is an archive of arrays; save each with np.save, or use arrays()")
    return MappedArray(file, array.offset, array.dtype, array.shape, array.strides)
