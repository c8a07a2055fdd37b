"""Source of records in memory."""

from __future__ import annotations

import hashlib
import itertools
import os
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from pipelines.errors import PipelineError, SampleError
from pipelines.fingerprint import known_as
from pipelines.sources._base import Source
from pipelines.sources._labels import pack_values
from pipelines.sources._mapped import MappedArray, locate
from pipelines.sources._strings import Strings
from pipelines.sources._values import copy_element, tensor_to_array

_COPIED = (np.ndarray, np.void, np.character)  # elements of columns that are no values of their own
Column = np.ndarray[Any, Any] | MappedArray | Strings[Any] | list[Any]


@known_as("pipelines.sources.arrays")
class Arrays(Source):
    """See `arrays`.

    Args:
        columns: field -> a sequence with the records along the first axis.
    """

    kind = "arrays"
    is_fork_safe = True
    columns: dict[str, Column]

    def __init__(self, columns: dict[str, Any], id: str | None) -> None:
        if not columns:
            raise PipelineError(f"{self.kind}(): no column was given")
        self.columns = columns
        lengths = {name: len(values) for name, values in columns.items()}
        sizes = ", ".join(f"{name} {length}" for name, length in lengths.items())
        self._count, *others = set(lengths.values())
        if others:
            raise PipelineError(f"{self.kind}(): the columns differ in length: {sizes}")
        if self._count == 0:
            raise PipelineError(f"{self.kind}(): holds no record: {sizes}")
        self._id = id
        self._digest: str | None = None
        self._content: str | None = None
        located = {name: locate(values) for name, values in columns.items() if isinstance(values, np.ndarray)}
        self._mapped = {name: mapped for name, mapped in located.items() if mapped is not None}
        self._is_copy = False

    def __len__(self) -> int:
        return self._count

    def __getstate__(self) -> dict[str, Any]:
        if self._digest is not None:
            self._update_digest()
        # What lies in a file is mapped again by whoever unpickles this, not copied.
        mapped = {name: place for name, place in self._mapped.items() if os.path.exists(place.file.path)}
        return {**self.__dict__, "columns": {**self.columns, **mapped}, "_mapped": {}, "_is_copy": True}

    def _read(self, index: int) -> dict[str, Any]:
        # Copies: a stage that writes into its sample must not change the data for the next epoch.
        record = {}
        try:
            for name, values in self.columns.items():
                value = values[index]
                record[name] = copy_element(value) if isinstance(value, _COPIED) else value
        except PipelineError as error:  # of a file that is mapped
            raise SampleError(index, self.where(index), str(error)) from error
        return record

    def copy_records(self, indices: npt.NDArray[np.int64], into: Mapping[str, npt.NDArray[Any]]) -> bool:
        is_plain = type(self)._read is Arrays._read and type(self).__getitem__ is Source.__getitem__
        if not is_plain or into.keys() != self.columns.keys():
            return False
        for name, target in into.items():
            values: Column | None = self.columns[name]
            if isinstance(values, MappedArray):
                values = values.find_whole()
            if name in self._mapped or not isinstance(values, np.ndarray):
                return False
            if (values.dtype, values.shape[1:]) != (target.dtype, target.shape[1:]):
                return False
            if values.flags.c_contiguous and values.flags.aligned:
                np.take(values, indices, axis=0, out=target, mode="clip")
            else:  # `take` would copy all of it first
                target[...] = values[indices]
        return True

    def column(self, field: str) -> npt.NDArray[Any]:
        if field not in self.columns:
            raise self._missing_field(field, self.columns)
        values = self.columns[field]
        if isinstance(values, MappedArray):
            values = values.array
        if not isinstance(values, np.ndarray):
            return pack_values(list(values))
        if values.dtype.kind in "SU":
            return super().column(field)
        return np.array(values, values.dtype.newbyteorder("="))

    def list_arrays(self) -> list[tuple[str, npt.NDArray[Any]]]:
        """The arrays in the memory of this process that hold the columns, each after the name of its column."""
        arrays: list[tuple[str, Any]] = []
        for name, values in self.columns.items():
            parts = (
                values if isinstance(values, list) else values.parts if isinstance(values, Strings) else [values]
            )
            arrays += [(name, part) for part in parts if not isinstance(part, MappedArray)]
        for name, part in arrays:
            if not isinstance(part, np.ndarray):
                raise PipelineError(f"arrays(): column {name!r} holds objects ({type(part).__name__}), no array")
        return arrays

    def is_text(self, field: str) -> bool:
        values = self.columns.get(field)
        return isinstance(values, Strings) and isinstance(values[0], str)

    def where(self, index: int) -> str:
        return f"arrays({', '.join(self.columns)}):row {index}"

    def identity(self) -> Any:
        if self._id is not None:
            return {"source": self._describe_class(), "id": self._id}
        return {"source": self._describe_class(), "sha256": self._update_digest()}

    def _update_digest(self) -> str:
        """Returns the digest of all columns, computed anew where one was changed in place since the last call.

        Only the arrays that were given can be: whoever unpickles this has copies. A change is found by XXH3, which
        reads several times as fast as SHA-256.
        """
        if not self._is_copy:
            import xxhash

            originals = {
                name: values
                for name, values in self.columns.items()
                if isinstance(values, np.ndarray | list) and name not in self._mapped
            }
            content = _digest_columns(xxhash.xxh3_128(), originals)
            if content != self._content:
                self._content, self._digest = content, None
        if self._digest is None:
            self._digest = _digest_columns(hashlib.sha256(), self.columns)
        return self._digest


def arrays(id: str | None = None, **columns: Any) -> Arrays:
    """Makes a source from arrays in memory: record i holds row i of each column.

    Other processes map what is an `np.memmap` of a file, instead of a copy; the file is not to change then.

    Args:
        id: identifies the records in fingerprints, instead of a digest that reads all of their content once.
        columns: field -> array, tensor or sequence with the records along the first axis. Texts and bytes stay as
            they are; rows of different lengths become one array each. Tensors of dtypes that numpy has not, such
            as bfloat16, become float32.

    Returns:
        A source of records with a field for each column: an array [*shape] of the column's dtype in native byte
        order, a scalar, a text, bytes, or a dict for an element of a structured dtype.

    Raises:
        PipelineError: there is no column or no record, the columns differ in length or, by their pandas indexes,
            in the order of their rows, or values are masked.

    Examples:
        >>> source = arrays(image=np.zeros((10, 3, 8, 8), np.uint8), label=np.arange(10))
        >>> source[3]["label"]
        np.int64(3)
    """
    if id is not None and not isinstance(id, str):
        raise PipelineError("arrays() takes columns by name, as in arrays(x=..., label=...)")
    _check_order(columns)
    return Arrays({name: _convert_column(name, values) for name, values in columns.items()}, id)


def _check_order(columns: Mapping[str, Any]) -> None:
    """Raise PipelineError where columns of pandas have their rows in different orders: only places count here."""
    indexed = [(name, values.index) for name, values in columns.items() if hasattr(values, "iloc")]
    for (first, index), (name, other) in itertools.pairwise(indexed):
        if len(index) == len(other) and not index.equals(other):
            raise PipelineError(
                f"arrays(): the rows of {name!r} are in another order than those of {first!r}, by their pandas "
                f"indexes: {name}.loc[{first}.index] orders them alike; {name}.to_numpy() takes them as they are"
            )


def _convert_column(name: str, values: Any) -> Column:
    if isinstance(values, str | bytes) or not hasattr(values, "__len__"):
        raise PipelineError(f"arrays(): column {name!r} must be an array or a sequence, got {values!r:.60}")
    if isinstance(values, list | tuple) and any(isinstance(value, str | bytes) for value in values):
        return _pack_texts(list(values))
    try:
        array = tensor_to_array(values) if hasattr(values, "detach") else np.asarray(values)
    except ValueError:
        return _convert_rows(values)
    except TypeError as error:
        try:  # a list of tensors of a dtype that numpy has not
            rows = _convert_rows(values)
        except (TypeError, ValueError, RuntimeError):
            raise PipelineError(f"arrays(): column {name!r} cannot be an array: {error}") from None
        if len({row.shape for row in rows}) > 1:
            return rows
        array = np.stack(rows)
    if np.ma.is_masked(values):
        raise PipelineError(f"arrays(): column {name!r} has masked values; fill them, or leave their records out")
    if array.ndim == 0:
        raise PipelineError(f"arrays(): column {name!r} must have its records along the first axis, got a scalar")
    return _pack_texts(array.tolist()) if array.dtype.kind in "OSU" else array


def _pack_texts(values: list[Any]) -> Column:
    """Packs texts, or bytes, into arrays that processes share; a list with other values stays a list."""
    kinds = set(map(type, values))
    return Strings(values) if kinds in ({str}, {bytes}) else values


def _convert_rows(values: Any) -> list[np.ndarray[Any, Any]]:
    rows = [tensor_to_array(value) if hasattr(value, "detach") else np.asarray(value) for value in values]
    lists = {i for i, value in enumerate(values) if isinstance(value, list | tuple)}
    kinds = {rows[i].dtype for i in lists if rows[i].size}
    if kinds and all(kind.kind in "biuf" for kind in kinds):
        common = np.result_type(*kinds)
        rows = [row.astype(common, copy=False) if i in lists else row for i, row in enumerate(rows)]
    return rows


def _digest_columns(digest: Any, columns: Mapping[str, Column]) -> str:
    for name, values in columns.items():
        _update_digest(digest, name, values)
    return str(digest.hexdigest())


def _update_digest(digest: Any, name: str, values: Column) -> None:
    if isinstance(values, MappedArray):
        values = values.array
    if isinstance(values, np.ndarray):
        digest.update(repr((name, values.dtype.str, values.shape)).encode())
        step = max(1, (1 << 24) // max(1, values[:1].nbytes))
        for start in range(0, len(values), step):
            digest.update(np.ascontiguousarray(values[start : start + step]).data.cast("B"))
        return
    digest.update(repr((name, len(values))).encode())
    for value in values:
        if isinstance(value, np.ndarray):
            _update_digest(digest, "", value)
        else:
            data = value.encode("utf-8", "surrogatepass") if isinstance(value, str) else value
            data = data if isinstance(data, bytes) else repr(data).encode()
            digest.update(repr((type(value).__name__, len(data))).encode() + data)
