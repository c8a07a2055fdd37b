"""Rows of Parquet files.

A Parquet file is cut into row groups, and a row group is the least that can be read and decoded. Reading rows in
shuffled order would decode a whole group for each, so decoded groups are kept, as Arrow arrays, in a cache of
each process, up to `CACHE_BYTES`. With every group in it a row costs microseconds. Of a data set that decodes to
more, `Pipeline(shuffle="blocks")` reads each group once an epoch (in each preparation process, as each has a cache
of its own); or it is better stored in small row groups (a few MB), or as tar files, which have no such unit.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from pipelines.environment.machine_limits import available_bytes
from pipelines.errors import PipelineError
from pipelines.fingerprint import known_as
from pipelines.sources._classes import ClassNames, Names, join_names
from pipelines.sources._columns import (
    check_missing,
    fill_missing,
    find_kept_type,
    find_storage,
    is_image,
    is_text,
    make_stored_reader,
)
from pipelines.sources._file_records import CACHE_BYTES, GroupedRecords, Readers, format_error
from pipelines.sources._files import OPEN_FILES, File, Paths, check_names, find_files
from pipelines.sources._recent import OwnDict

_LARGE_BYTES = 16 << 20
_WIDTHS = {"BOOLEAN": 1 / 8, "INT64": 8, "DOUBLE": 8, "INT96": 12}  # bytes of a decoded value, others at least 4
_IMAGE = "image"  # the type of a struct of bytes and path


@known_as("pipelines.sources.parquet")
class Parquet(GroupedRecords):
    """See `parquet`."""

    columns: tuple[str, ...]

    kind = "parquet"
    is_fork_safe = True

    def __init__(self, paths: Paths, columns: Sequence[str] | None, cache_bytes: int, missing: str) -> None:
        self.keeps_missing, self._filled = check_missing(self.kind, missing), set[str]()
        files = find_files(self.kind, paths)
        chosen = check_names(self.kind, columns)
        self._groups: list[tuple[int, int]] = []  # (number of the file, of the row group in it)
        bounds, counts, types = [0], list[int](), dict[str, str]()
        self._class_names: list[dict[str, Names]] = []  # of each file
        for number, file in enumerate(files):
            metadata = _read_metadata(file)
            schema = metadata.schema.to_arrow_schema()
            if not number:
                self.columns = chosen or tuple(schema.names)
            elif chosen is None and set(schema.names) != set(self.columns):
                raise PipelineError(
                    f"{file.path}: has the columns {', '.join(schema.names)}, but {files[0].path} has "
                    f"{', '.join(self.columns)}; say which to read with columns="
                )
            here = _find_types(file, schema, self.columns)
            types = types or here
            if here != types:
                differ = (
                    f"column {name!r} is {here[name]}, not {types[name]}"
                    for name in types
                    if here[name] != types[name]
                )
                raise PipelineError(f"{file.path}: {'; '.join(differ)}, unlike in {files[0].path}")
            self._class_names.append(_read_class_names(metadata.metadata))
            if self.keeps_missing:
                self._filled |= _find_nulls(metadata) & set(self.columns)
            for group in range(metadata.num_row_groups):
                rows = metadata.row_group(group).num_rows
                if rows:
                    self._groups.append((number, group))
                    bounds.append(bounds[-1] + rows)
            counts.append(bounds[-1] - sum(counts))
        super().__init__(files, counts, bounds, cache_bytes)
        stored = {name: find_storage(schema.field(name)) for name in self.columns}
        self._texts = frozenset(name for name, (kind, _) in stored.items() if is_text(kind))
        self._texts |= {name for name in self._filled if str(find_kept_type(stored[name][0])) == "string"}
        self._shapes = {name: shape for name, (_, shape) in stored.items() if shape is not None}
        # What is read for each column.
        self._leaves = [f"{name}.bytes" if kind == _IMAGE else name for name, kind in types.items()]
        self._metadata = OwnDict[int, Any]()  # of files that were decoded from

    def _decode(self, group: int) -> tuple[Readers, int]:
        import pyarrow.parquet

        number, within = self._groups[group]
        # No threads: the cores are shared out among processes. No buffering ahead: Arrow does it in a thread pool
        # that a fork may leave in any state.
        with self.files[number].open() as handle:
            # The file's metadata name all its row groups: they are parsed once, and not for each group anew.
            file = pyarrow.parquet.ParquetFile(handle, metadata=self._metadata.get(number), pre_buffer=False)
            if len(self._metadata) >= OPEN_FILES:
                self._metadata.clear()
            self._metadata[number] = file.metadata
            _check_size(file.metadata.row_group(within), self._leaves)
            table = file.read_row_group(within, columns=self._leaves, use_threads=False)
        if table.nbytes > _LARGE_BYTES:  # decoding took several times as much, which Arrow would keep
            pyarrow.default_memory_pool().release_unused()
        filled = {name: fill_missing(table.column(name)) for name in self._filled & set(self.columns)}
        return [
            (name, make_stored_reader(filled.get(name, table.column(name)), self._shapes.get(name)))
            for name in self.columns
        ], table.nbytes

    def column(self, field: str) -> npt.NDArray[Any]:
        if field not in self.columns:
            raise self._missing_field(field, self.columns)
        alone = copy.copy(self)
        alone.forget()  # it has a cache of its own
        alone.columns, alone._leaves = (field,), [self._leaves[self.columns.index(field)]]
        return super(Parquet, alone).column(field)

    def find_class_names(self, field: str) -> ClassNames | None:
        """Those of Hugging Face features of type ClassLabel, which each file has in its metadata."""
        named = self._class_names
        if field not in self.columns or not all(field in names for names in named):
            return None
        counts = np.diff(self._firsts).tolist()
        lists = [ClassNames((names[field],)) for names in named]
        return join_names(list(zip(lists, counts, strict=True)))

    def is_text(self, field: str) -> bool:
        return field in self._texts

    def load_for_forks(self) -> None:
        """Decodes all row groups, if the cache holds them: forked processes share their memory."""
        sizes = (_group_bytes(_read_metadata(file), self._leaves) for file in self.files)
        if sum(sizes) <= self._cache_bytes:
            for group in range(len(self._groups)):
                self._cache.get(group, self._decode)

    def identity(self) -> Any:
        tensors = {"tensors": self._shapes} if self._shapes else {}
        keeps = {"missing": "nan"} if self.keeps_missing else {}
        return {**super().identity(), "columns": list(self.columns), **tensors, **keeps}


def parquet(
    paths: Paths,
    columns: Sequence[str] | None = None,
    *,
    cache_bytes: int = CACHE_BYTES,
    missing: Literal["error", "nan"] = "error",
) -> Parquet:
    """Makes a source of the rows of Parquet files.

    Args:
        paths: a path, a glob pattern (matches in sorted order), or several of either.
        columns: names of the columns to read; all unless given.
        cache_bytes: size of the decoded row groups that each process caches, the most recently used ones. At least
            one row group is cached.
        missing: "error": reading a row with a null is an error. "nan": a null is NaN among numbers, which are
            float64 in such a column, and else an empty text, as in `csv`; for `stages.fit`.

    Returns:
        A source of records with a field for each column. Numbers are numpy scalars (decimals int64 or
        float64), texts `str`. A list of
        numbers is an array [n] of the file's dtype, a list of lists of equal lengths an array [n, m], as for a
        time series of several channels; other lists are lists. Tensors of Ray Data and of Arrow are arrays of
        their shape. Image columns of Hugging Face datasets, structs of `bytes` and `path`, are the bytes.

    Raises:
        PipelineError: a file is missing, not a Parquet file, or has other columns than the first; a pattern
            matches no file; a column does not exist, or has pickled objects or tensors of unequal shapes; there is
            no row.

    Examples:
        >>> source = parquet("train-*.parquet", columns=("image", "label"))
    """
    return Parquet(paths, columns, cache_bytes, missing)


def _read_metadata(file: File) -> Any:
    import pyarrow
    import pyarrow.parquet

    try:
        with file.open_in_parts() as handle:
            return pyarrow.parquet.read_metadata(handle)
    except (pyarrow.ArrowException, OSError) as error:
        raise PipelineError(f"{file.path}: is no Parquet file, or is cut off: {format_error(error)}") from None


def _read_class_names(metadata: Mapping[bytes, bytes] | None) -> dict[str, Names]:
    """Field -> names of its classes, of what Hugging Face's `datasets` notes in a file."""
    try:
        features = json.loads((metadata or {})[b"huggingface"])["info"]["features"]
        return {
            name: tuple(map(str, feature["names"])) for name, feature in features.items() if feature.get("names")
        }
    except (AttributeError, KeyError, TypeError, ValueError):
        return {}


def _find_nulls(metadata: Any) -> set[str]:
    """The columns of a file that may have nulls, by its statistics."""
    groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
    chunks = (group.column(number) for group in groups for number in range(group.num_columns))
    return {
        chunk.path_in_schema.partition(".")[0]
        for chunk in chunks
        if not (chunk.is_stats_set and chunk.statistics.has_null_count and not chunk.statistics.null_count)
    }


def _group_bytes(metadata: Any, leaves: list[str]) -> int:
    """Bytes of a file's columns, decompressed; `leaves` are what is read of it."""
    groups = map(metadata.row_group, range(metadata.num_row_groups))
    return sum(group.column(n).total_uncompressed_size for group in groups for n in _find_columns(group, leaves))


def _find_columns(group: Any, leaves: list[str]) -> list[int]:
    """The numbers of the columns that hold these leaves, in the metadata of a row group."""
    names = tuple(f"{leaf}." for leaf in leaves)
    return [n for n in range(group.num_columns) if f"{group.column(n).path_in_schema}.".startswith(names)]


def _check_size(group: Any, leaves: list[str]) -> None:
    """Refuses a row group that claims more than memory can hold, which a small or damaged file may."""
    columns = map(group.column, _find_columns(group, leaves))
    claimed_bytes = sum(column.num_values * _WIDTHS.get(column.physical_type, 4) for column in columns)
    if claimed_bytes > (free := available_bytes()):
        raise PipelineError(
            f"a row group claims {group.num_rows} rows, {claimed_bytes / 2**30:.3g} GiB once decoded, and "
            f"{free / 2**30:.3g} GiB of memory are free; write smaller row groups"
        )


def _find_types(file: File, schema: Any, columns: tuple[str, ...]) -> dict[str, str]:
    """Column -> the name of its type."""
    types = {}
    for name in columns:
        if schema.names.count(name) > 1:
            raise PipelineError(f"{file.path}: two columns are called {name!r}")
        if name not in schema.names:
            raise PipelineError(f"{file.path}: has no column {name!r} (it has: {', '.join(schema.names)})")
        try:
            kind, shape = find_storage(schema.field(name))
        except PipelineError as error:
            raise PipelineError(f"{file.path}: {error}") from None
        of_shape = "" if shape is None else f" as tensors of shape {list(shape)}"
        types[name] = _IMAGE if is_image(kind) else f"{kind}{of_shape}"
    return types
