"""Source of a Hugging Face `datasets.Dataset`, read from its Arrow data without decoding anything else.

What identifies the records is where they lie: the files, and in them the place of each column; of what lies in
memory, its content. The Dataset's own `_fingerprint` is not used: it is random where `datasets` cannot hash a
function, and says nothing of files that were overwritten.
"""

from __future__ import annotations

import copy
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
from pipelines.sources._columns import is_text, make_nested_reader
from pipelines.sources._compat import get_indices
from pipelines.sources._file_records import MissingValue
from pipelines.sources._files import check_names
from pipelines.sources._labels import pack_values
from pipelines.sources._mapped import MappedFiles
from pipelines.sources._origin import Origin, digest_indices
from pipelines.sources._recent import OwnDict

# Formats in which a Dataset returns what is stored, in another container. The others change dtypes or run code.
_PLAIN_FORMATS = (None, "arrow", "pandas", "polars")


@known_as("pipelines.sources.huggingface", version=2)
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
        files = MappedFiles(file["filename"] for file in dataset.cache_files)
        self._columns = {name: ArrowColumn(table.column(name), files) for name in self.columns}
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
        # Of chunks; views of mapped memory, so that they cost next to nothing.
        self._readers = OwnDict[tuple[str, int], Callable[[int], Any]]()

    def __len__(self) -> int:
        return self._count

    def _read(self, index: int) -> dict[str, Any]:
        row = index if self._indices is None else int(self._indices[index])
        return {name: self._read_value(index, row, name) for name in self._columns}

    def _read_value(self, index: int, row: int, name: str) -> Any:
        column = self._columns[name]
        number = bisect_right(column.starts, row) - 1
        try:
            reader = self._readers.get((name, number))
            if reader is None:
                reader = self._readers[name, number] = make_nested_reader(column.chunk(number))
            return reader(row - column.starts[number])
        except (MissingValue, PipelineError, OSError) as error:
            reason = f"column {name!r} {error}" if isinstance(error, MissingValue) else str(error)
            raise SampleError(index, self.where(index), reason) from None

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
        file = column.find_file(number)
        return f"{self._name}[{index}]" + (f" in {file.path}" if file is not None else "")

    def identity(self) -> Any:
        if self._id is not None:
            return {"source": self._describe_class(), "id": self._id}
        columns = [[name, column.identity()] for name, column in self._columns.items()]
        return {"source": self._describe_class(), "columns": columns, "indices": digest_indices(self._indices)}


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
            them the data lie, and data in memory by their content, which is read once for that.

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
