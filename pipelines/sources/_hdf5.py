"""Source of data sets of HDF5 files, by rows along their first axis.

A data set that lies in one piece, unfiltered, is mapped: all processes share its pages, and a row costs as much as
in memory. One in chunks is read chunk by chunk, which are decoded into a cache of each process. Each process opens
the files for itself; a handle is neither pickled nor used in a forked child.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pipelines.errors import PipelineError
from pipelines.fingerprint import known_as
from pipelines.sources._base import Groups
from pipelines.sources._file_records import CACHE_BYTES, GroupedRecords, Readers, format_error
from pipelines.sources._files import OPEN_FILES, File, Paths, check_names, find_files
from pipelines.sources._mapped import MappedArray
from pipelines.sources._recent import RecentlyUsed
from pipelines.sources._values import copy_element

# Rows of a data set that lies in one piece but cannot be mapped, such as texts, which are read together.
_ROWS = 256
#: Attributes by which netCDF says how numbers are stored.
_PACKED = ("scale_factor", "add_offset")


@dataclass
class _DataSet:
    """A data set of a file.

    Attributes:
        path: inside the file.
        shape: with the rows along the first axis.
        dtype: as a text that tells the types of variable length apart.
        mapped: its place in the file, if it can be mapped.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    encoding: str | None
    chunk_rows: int
    mapped: MappedArray | None

    def say_type(self) -> str:
        return f"{self.dtype}{list(self.shape[1:])}"

    def read_row(self, values: Any, row: int) -> Any:
        """A record's value of a row of what h5py has read."""
        value = values[row]
        if self.encoding is not None:
            if isinstance(value, bytes):
                return value.decode(self.encoding)
            texts = [bytes(text).decode(self.encoding) for text in value.ravel()]
            return np.array(texts, object).reshape(value.shape).tolist()
        if isinstance(value, np.ndarray | np.generic):
            if value.dtype.hasobject and value.dtype.names is None:
                return value.tolist()
            return copy_element(value)
        return value


@known_as("pipelines.sources.hdf5")
class Hdf5(GroupedRecords):
    """See `hdf5`."""

    kind = "hdf5"
    columns: dict[str, str]  # field -> path of the data set in each file

    def __init__(self, paths: Paths, columns: Sequence[str] | Mapping[str, str] | None, cache_bytes: int) -> None:
        files = find_files(self.kind, paths)
        chosen: Any = columns if isinstance(columns, Mapping) else check_names(self.kind, columns)
        self.columns = {}
        self._sets: list[dict[str, _DataSet]] = []  # of each file, by field
        counts, bounds = list[int](), [0]
        for file in files:
            try:
                with _open_hdf5(file) as handle:
                    if not isinstance(chosen, Mapping):
                        paths_inside = _list_sets(handle) if chosen is None else chosen
                        chosen = {path.strip("/"): path for path in paths_inside}
                    self.columns = dict(chosen)
                    sets = _describe_sets(file, handle, self.columns)
            except PipelineError:
                raise
            except Exception as error:  # h5py raises what it likes on a damaged file
                raise PipelineError(f"{file.path}: is damaged: {format_error(error)}") from error
            if self._sets and (difference := _find_difference(sets, self._sets[0])):
                raise PipelineError(f"{file.path}: {difference}, unlike in {files[0].path}")
            count = next(iter(sets.values())).shape[0]
            rows = max((data_set.chunk_rows for data_set in sets.values()), default=0)
            step = rows or (_ROWS if any(data_set.mapped is None for data_set in sets.values()) else max(count, 1))
            first = sum(counts)
            bounds += [first + min(count, end) for end in range(step, count + step, step)]
            counts.append(count)
            self._sets.append(sets)
        super().__init__(files, counts, sorted(set(bounds)), cache_bytes)
        self._is_mapped = all(part.mapped is not None for sets in self._sets for part in sets.values())
        # By process: a handle is not used in a forked child.
        self._handles = RecentlyUsed[tuple[int, int], Any](OPEN_FILES)

    def _decode(self, group: int) -> tuple[Readers, int]:
        number = self._find_file(self._bounds[group])
        start, stop = (bound - self._firsts[number] for bound in self._bounds[group : group + 2])
        readers, size = Readers(), 1
        for name, data_set in self._sets[number].items():
            if data_set.mapped is not None:
                readers.append((name, functools.partial(_copy_row, data_set.mapped.array, start)))
                continue
            handle = self._handles.get((os.getpid(), number), self._open_file)
            values = handle[data_set.path][start:stop]
            readers.append((name, functools.partial(data_set.read_row, values)))
            size += _measure(values)
        return readers, size

    def _open_file(self, key: tuple[int, int]) -> tuple[Any, int]:
        return _open_hdf5(self.files[key[1]]), 1

    def forget(self) -> None:
        super().forget()
        self._handles = RecentlyUsed(OPEN_FILES)  # without references, they are closed

    @property
    def groups(self) -> Groups | None:
        """Bounds of the chunks of rows, over all files; None if all data sets are mapped."""
        return None if self._is_mapped else super().groups

    def identity(self) -> Any:
        return {**super().identity(), "columns": list(self.columns.items())}


def hdf5(
    paths: Paths, columns: Sequence[str] | Mapping[str, str] | None = None, *, cache_bytes: int = CACHE_BYTES
) -> Hdf5:
    """Makes a source of the rows of data sets in HDF5 files. Needs h5py: `pip install 'ray-ensemble[data]'`.

    Args:
        paths: a path, a glob pattern (matches in sorted order), or several of either. The rows of several files
            follow each other.
        columns: field -> path of a data set inside the file, as in `{"image": "train/images"}`, or paths that are
            the fields' names as well. All data sets of the file unless given, which then must be equally long.
        cache_bytes: size of the decoded chunks that each process caches, the most recently used ones. At least one
            group of rows is cached.

    Returns:
        A source of records with a field for each column: an array [*shape] of the data set's dtype, a scalar,
        `str` for texts, an array [n] for rows of variable length, a dict for an element of a compound type.

    Raises:
        PipelineError: h5py is not installed; a file is missing, no HDF5 file or has other data sets than the
            first; a data set does not exist, has a type that cannot be read, or another length than the others.

    Examples:
        >>> source = hdf5("train-*.h5", columns={"image": "train/images", "label": "train/labels"})
    """
    return Hdf5(paths, columns, cache_bytes)


def _find_difference(here: dict[str, _DataSet], first: dict[str, _DataSet]) -> str:
    differences = [
        f"{data_set.path!r} is {data_set.say_type()}, not {first[name].say_type()}"
        for name, data_set in here.items()
        if (data_set.dtype, data_set.shape[1:]) != (first[name].dtype, first[name].shape[1:])
    ]
    return "; ".join(differences)


def _copy_row(mapped: Any, start: int, row: int) -> Any:
    return copy_element(mapped[start + row])


def _measure(values: Any) -> int:
    if values.dtype.hasobject:
        return sum(getattr(value, "nbytes", None) or len(value) + 50 for value in values.ravel())
    return int(values.nbytes)


def _open_hdf5(file: File) -> Any:
    """Opens an HDF5 file for reading."""
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
        raise PipelineError(f"{file.path}: is no HDF5 file, or is cut off: {format_error(error)}") from None


def _list_sets(handle: Any) -> list[str]:
    """Paths of all data sets in a file, without further links to them."""
    import h5py

    paths: list[str] = []
    handle.visititems(lambda path, item: paths.append(path) if isinstance(item, h5py.Dataset) else None)
    return paths


def _describe_sets(file: File, handle: Any, columns: Mapping[str, str]) -> dict[str, _DataSet]:
    """Describes the data sets of a file, by field."""
    import h5py

    sets = {}
    if not columns:
        raise PipelineError(f"{file.path}: columns must name a data set")
    for name, path in columns.items():
        item = handle.get(path)
        if not isinstance(item, h5py.Dataset):
            has = ", ".join(_list_sets(handle))
            raise PipelineError(f"{file.path}: has no data set {path!r} (it has: {has})")
        sets[name] = _describe_set(file, item, path)
    lengths = {
        data_set.path: data_set.shape[0] if data_set.shape else "is a single value" for data_set in sets.values()
    }
    if len(set(lengths.values())) > 1 or "is a single value" in lengths.values():
        text = ", ".join(f"{path} {length}" for path, length in lengths.items())
        raise PipelineError(
            f"{file.path}: the data sets differ in length: {text}; say which to read with columns="
        )
    return sets


def _describe_set(file: File, item: Any, path: str) -> _DataSet:
    import h5py

    # What lies elsewhere may change, or be lost, unnoticed: HDF5 reads fill values in place of a missing file.
    sources = item.virtual_sources() if item.is_virtual else []
    others = [origin.file_name for origin in sources if origin.file_name != "."]
    others += [name for name, *_ in item.external or ()]
    if not os.path.samefile(item.file.filename, file.path):
        others.append(item.file.filename)
    if others:
        raise PipelineError(
            f"{file.path}: the data set {path!r} is stored in other files ({others[0]} ...), whose changes or "
            "loss would not be noticed; give these files to hdf5(), or copy the data set into one"
        )
    if packed := [name for name in _PACKED if name in item.attrs]:
        raise PipelineError(
            f"{file.path}: the numbers of the data set {path!r} are packed, by its {', '.join(packed)}: let "
            f"xarray unpack them, sources.arrays(x=xarray.open_dataset(...)[{path!r}].to_numpy())"
        )
    dtype = item.dtype
    if h5py.check_ref_dtype(dtype) is not None:
        raise PipelineError(f"{file.path}: the data set {path!r} has references to others, which are no values")
    texts, element = h5py.check_string_dtype(dtype), h5py.check_vlen_dtype(dtype)
    if element is not None and np.dtype(element).hasobject:
        raise PipelineError(f"{file.path}: the data set {path!r} has rows of variable length of {element}")
    kind = (
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
    return _DataSet(path, shape, kind, encoding, int(item.chunks[0]) if item.chunks else 0, mapped)
