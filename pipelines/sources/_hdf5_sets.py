"""Data sets of an HDF5 file: which there are, of what type, and whether they can be mapped."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from pipelines.errors import PipelineError
from pipelines.sources._files import File
from pipelines.sources._mapped import MappedArray
from pipelines.sources._values import copy_element


@dataclass
class DataSet:
    """A data set of a file.

    Attributes:
        path: inside the file.
        shape: with the rows along the first axis.
        dtype: as a text that tells the types of variable length apart.
        encoding: of texts; None for what is none.
        chunk_rows: rows in a chunk; 0 if it lies in one piece.
        mapped: its place in the file, if it can be mapped.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    encoding: str | None
    chunk_rows: int
    mapped: MappedArray | None

    def say_type(self) -> str:
        """Says what a row is."""
        return f"{self.dtype}{list(self.shape[1:])}"

    def to_value(self, value: Any) -> Any:
        """A record's value of a row as h5py reads it.

        Raises:
            UnicodeDecodeError: a text is not of its encoding.
        """
        if self.encoding is not None:
            if isinstance(value, bytes):
                return value.decode(self.encoding)
            texts = [bytes(each).decode(self.encoding) for each in value.ravel()]
            return np.array(texts, object).reshape(value.shape).tolist()
        if isinstance(value, np.ndarray | np.generic):
            if value.dtype.hasobject and value.dtype.names is None:
                return value.tolist()
            return copy_element(value)
        return value


def open_file(file: File) -> Any:
    """Opens an HDF5 file for reading.

    Raises:
        PipelineError: h5py is not installed, or the file was changed since it was indexed or is no HDF5 file.
    """
    try:
        import h5py
    except ImportError as error:
        raise PipelineError(f"hdf5() needs h5py ({error}): pip install 'ray-ensemble[data]'") from None
    file.open().close()  # it is unchanged
    try:
        # No lock on the file: many processes read it, and some file systems have none.
        try:
            return h5py.File(file.path, "r", locking=False)
        except OSError as error:
            if "locking flag" not in str(error):
                raise
            return h5py.File(file.path, "r")  # as the caller has it open already
    except OSError as error:
        raise PipelineError(
            f"{file.path}: is no HDF5 file, or is cut off: {' '.join(str(error).split())}"
        ) from None


def list_sets(handle: Any) -> list[str]:
    """Paths of all data sets in a file, without further links to them."""
    import h5py

    found: list[str] = []
    handle.visititems(lambda path, item: found.append(path) if isinstance(item, h5py.Dataset) else None)
    return found


def describe_sets(file: File, handle: Any, columns: Mapping[str, str]) -> dict[str, DataSet]:
    """Describes the data sets of a file, by field.

    Raises:
        PipelineError: one does not exist, has values that cannot be read, is stored in another file, or has
            another length than the others.
    """
    import h5py

    sets = {}
    for name, path in columns.items():
        item = handle.get(path)
        if not isinstance(item, h5py.Dataset):
            has = ", ".join(list_sets(handle))
            raise PipelineError(f"{file.path}: has no data set {path!r} (it has: {has})")
        sets[name] = _describe(file, item, path)
    lengths = {each.path: each.shape[0] if each.shape else "is a single value" for each in sets.values()}
    if len(set(lengths.values())) > 1 or "is a single value" in lengths.values():
        said = ", ".join(f"{path} {length}" for path, length in lengths.items())
        raise PipelineError(
            f"{file.path}: the data sets differ in length: {said}; say which to read with columns="
        )
    return sets


def _describe(file: File, item: Any, path: str) -> DataSet:
    import h5py

    # What lies elsewhere may change, or be lost, unnoticed: HDF5 reads fill values in place of a missing file.
    sources = item.virtual_sources() if item.is_virtual else []
    others = [each.file_name for each in sources if each.file_name != "."]
    others += [name for name, *_ in item.external or ()]
    if not os.path.samefile(item.file.filename, file.path):
        others.append(item.file.filename)
    if others:
        raise PipelineError(
            f"{file.path}: the data set {path!r} is stored in other files ({others[0]} ...), whose changes or "
            "loss would not be noticed; give these files to hdf5(), or copy the data set into one"
        )
    dtype = item.dtype
    if h5py.check_ref_dtype(dtype) is not None:
        raise PipelineError(f"{file.path}: the data set {path!r} has references to others, which are no values")
    texts, element = h5py.check_string_dtype(dtype), h5py.check_vlen_dtype(dtype)
    if element is not None and np.dtype(element).hasobject:
        raise PipelineError(f"{file.path}: the data set {path!r} has rows of variable length of {element}")
    said = (
        f"text ({texts.encoding})" if texts else f"{np.dtype(element)}[?]" if element is not None else str(dtype)
    )
    shape = tuple(item.shape or ())
    mapped = None
    offset = item.id.get_offset()  # from the beginning of the file, with a user block
    is_plain = not item.chunks and not item.is_virtual and texts is None and not dtype.hasobject
    if is_plain and shape and offset is not None:
        strides = tuple(dtype.itemsize * math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
        mapped = MappedArray(file, int(offset), dtype, shape, strides)
    encoding = None if texts is None else texts.encoding
    return DataSet(path, shape, said, encoding, int(item.chunks[0]) if item.chunks else 0, mapped)
