"""Source of a Hugging Face `datasets.Dataset`, read from its Arrow data without decoding anything else.

What identifies the records is where they lie: the files, and in them the place of each column; of what lies in
memory, its content. The Dataset's own `_fingerprint` is not used: it is random where `datasets` cannot hash a
function, and says nothing of files that were overwritten.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import os
from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from pipelines.errors import PipelineError, SampleError
from pipelines.fingerprint import known_as
from pipelines.sources._arrow_files import ArrowColumn
from pipelines.sources._base import Groups, Source
from pipelines.sources._classes import ClassNames
from pipelines.sources._columns import MissingValue, is_image, is_text, make_nested_reader, split_file
from pipelines.sources._compat import get_indices
from pipelines.sources._files import File, check_names
from pipelines.sources._labels import pack_values
from pipelines.sources._origin import Origin, digest_indices
from pipelines.sources._recent import OwnDict

# Formats in which a Dataset returns what is stored, in another container. The others change dtypes or run code.
_PLAIN_FORMATS = (None, "arrow", "pandas", "polars")


@known_as("pipelines.sources.huggingface")
class HuggingFace(Source):
    """See `huggingface`.

    Attributes:
        columns: fields of the records.
        class_names: field -> names of its classes, for features of type ClassLabel.
        classes: the names of the only such field; empty if there is none, or several.
    """

    kind = "huggingface"
    is_fork_safe = True

    def __init__(self, dataset: Any, columns: Sequence[str] | None, id: str | None) -> None:
        _check_kind(dataset)
        self.columns = _choose_columns(dataset, columns)
        self._id = id
        table = dataset.data.table
        self._columns = {name: ArrowColumn(table.column(name)) for name in self.columns}
        indices = get_indices(dataset)
        self._indices = None if indices is None else np.array(indices.to_numpy(), np.int64)
        self._count = len(dataset)
        if not self._count:
            raise PipelineError(f"huggingface(): holds no record: {', '.join(self.columns)}")
        features = dataset.features
        self.class_names = {
            name: tuple(features[name].names)
            for name in self.columns
            if type(features[name]).__name__ == "ClassLabel" and features[name].names
        }
        self.classes = next(iter(self.class_names.values())) if len(self.class_names) == 1 else ()
        self._name = " ".join(filter(None, (dataset.info.dataset_name, str(dataset.split or "")))) or "Dataset"
        self._outside = {
            name: _OutsideFiles(column, self._indices)
            for name, column in self._columns.items()
            if column.starts and is_image(column.chunk(0).type)
        }
        # Of chunks; views of mapped memory, so that they cost next to nothing.
        self._readers = OwnDict[tuple[str, int], Callable[[int], Any]]()

    def __len__(self) -> int:
        return self._count

    def _read(self, index: int) -> dict[str, Any]:
        row = index if self._indices is None else int(self._indices[index])
        return {name: self._read_value(index, row, name) for name in self._columns}

    def _read_value(self, index: int, row: int, name: str) -> Any:
        """The value of a column in a row of the data; `index` is what the user calls it."""
        column = self._columns[name]
        number = bisect_right(column.starts, row) - 1
        try:
            reader = self._readers.get((name, number))
            if reader is None:
                outside = self._outside.get(name)
                found = None if outside is None else functools.partial(outside.read, column.starts[number])
                reader = self._readers[name, number] = make_nested_reader(column.chunk(number), found)
            return reader(row - column.starts[number])
        except (MissingValue, PipelineError, OSError) as error:
            said = f"column {name!r} {error}" if isinstance(error, MissingValue) else str(error)
            raise SampleError(index, self.where(index), said) from None

    def column(self, field: str) -> npt.NDArray[Any]:
        if field not in self._columns:
            raise self._missing_field(field, self._columns)
        rows = range(self._count) if self._indices is None else self._indices.tolist()
        return pack_values([self._read_value(index, row, field) for index, row in enumerate(rows)])

    def find_class_names(self, field: str) -> ClassNames | None:
        names = self.class_names.get(field)
        return None if names is None else ClassNames((names,))

    def is_text(self, field: str) -> bool:
        column = self._columns.get(field)
        return column is not None and bool(column.starts) and is_text(column.chunk(0).type)

    def find_origin(self) -> Origin:
        if self._indices is None:
            return super().find_origin()
        whole = copy.copy(self)
        column = next(iter(self._columns.values()))
        whole._indices, whole._count = None, column.starts[-1] + len(column.chunk(len(column.starts) - 1))
        return Origin(whole, whole.describe_for_fingerprint, self._indices)

    @property
    def groups(self) -> Groups | None:
        """Bounds of the chunks of the data, which lie together in a file; None with an indices mapping."""
        starts = next(iter(self._columns.values())).starts
        if self._indices is not None or len(starts) < 2:
            return None
        return np.array([*starts, self._count], np.int64)

    def where(self, index: int) -> str:
        row = index if self._indices is None else int(self._indices[index])
        column = next(iter(self._columns.values()))
        number = bisect_right(column.starts, row) - 1
        file = column.file(number)
        return f"{self._name}[{index}]" + (f" in {file.path}" if file is not None else "")

    def identity(self) -> Any:
        if self._id is not None:
            return {"source": self._describe_class(), "id": self._id}
        columns = [[name, column.identity()] for name, column in self._columns.items()]
        outside = {name: files.digest for name, files in self._outside.items() if files.digest}
        whole = {"source": self._describe_class(), "columns": columns, "indices": digest_indices(self._indices)}
        return {**whole, "outside": outside} if outside else whole


def huggingface(dataset: Any, columns: Sequence[str] | None = None, id: str | None = None) -> HuggingFace:
    """Makes a source of a Hugging Face `datasets.Dataset`, also one that was selected, filtered or shuffled.

    Memory-mapped data stay in their files: every process maps them, and nothing is copied. Data in memory
    (`Dataset.from_dict`) are shared as those of `arrays` are.

    Args:
        dataset: the Dataset. With a format that changes values (`set_format("torch")`, `set_transform`) it is
            refused: records are what is stored, and a transform belongs into a stage, where its randomness is
                seeded.
        columns: names of the columns to read; unless given, all, or those of the Dataset's format.
        id: identifies the records in fingerprints. Without it, files are identified by what they hold and where in
            them the data lie, and data in memory by their content, which is read once for that. Image files that
            the Dataset only names (`load_dataset("imagefolder")`) are identified by path, size and time of change.

    Returns:
        A source of records with a field for each column. Numbers are numpy scalars of the stored dtype, also
        ClassLabels, whose names are in `classes`. Texts are `str`, images (audio, video) their encoded bytes,
        lists of numbers and Array2D to Array5D are arrays, lists of other things lists, and structs dicts.

    Raises:
        PipelineError: it is not a Dataset (a DatasetDict needs one of its splits, an IterableDataset
            `iterable()`), has no record or no such column, or a format or transform that changes its values.

    Examples:
        >>> source = huggingface(datasets.load_dataset("cifar10", split="train"))
    """
    return HuggingFace(dataset, columns, id)


def _check_kind(dataset: Any) -> None:
    names = {cls.__name__ for cls in type(dataset).__mro__ if cls.__module__.partition(".")[0] == "datasets"}
    if "DatasetDict" in names:
        splits = ", ".join(map(repr, dataset))
        raise PipelineError(
            f"huggingface(): is a DatasetDict; give one of its splits ({splits}), as in dataset['train']"
        )
    if names & {"IterableDataset", "IterableDatasetDict"}:
        raise PipelineError(
            "huggingface(): a datasets.IterableDataset has no random access; give it to iterable(..., length=...)"
        )
    if "Dataset" not in names:
        raise PipelineError(f"huggingface(): needs a datasets.Dataset, got {type(dataset).__name__}")
    format = dataset.format
    if format["type"] not in _PLAIN_FORMATS:
        what = (
            "a transform" if format["type"] == "custom" else f"the format {format['type']!r}, which changes dtypes"
        )
        kept = ", ".join(map(repr, format["columns"]))
        raise PipelineError(
            f"huggingface(): the Dataset has {what}; records are what is stored. Give "
            f"huggingface(dataset.with_format(None), columns=[{kept}]) and map() the rest as a stage"
        )


def _choose_columns(dataset: Any, columns: Sequence[str] | None) -> tuple[str, ...]:
    chosen = check_names("huggingface", dataset.format["columns"] if columns is None else columns) or ()
    if unknown := [name for name in chosen if name not in dataset.column_names]:
        has = ", ".join(dataset.column_names)
        raise PipelineError(f"huggingface(): there is no column {unknown[0]!r} (there are: {has})")
    return chosen


class _OutsideFiles:
    """Image files that a column names instead of holding their bytes, as they are now.

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
