"""Writes tables of predictions piece by piece: Parquet, CSV or JSON lines, chosen by the file's ending."""

from __future__ import annotations

import csv
import io
import json
from typing import Any, BinaryIO

import numpy as np

#: In the metadata of a Parquet file of predictions: only such a file is replaced by another one.
MARK = b"ray-ensemble predictions"
#: Endings of files that are no Parquet; other ones promise what is not written.
LINES = (".csv", ".jsonl")
OTHER_FORMATS = (".tsv", ".json", ".npz", ".npy", ".arrow", ".feather", ".txt", ".xlsx")


class _Lines:
    """A row in each line of a text file: JSON objects, or CSV in which a list has a column for each of its values
    where all lists have as many, and is JSON else. Probabilities are by class name where names are known. What is
    NaN or missing is null, or empty.
    """

    def __init__(self, file: BinaryIO, suffix: str, classes: list[str]) -> None:
        self._file = io.TextIOWrapper(file, newline="", encoding="utf-8", errors="backslashreplace")
        self._csv = csv.writer(self._file) if suffix == ".csv" else None
        self._classes = classes
        self._has_header = False

    def write_table(self, table: Any) -> None:
        import pyarrow

        if self._csv is None:
            for row in table.to_pylist():
                probabilities = row.get("probabilities")
                if self._classes and np.shape(probabilities) == (len(self._classes),):
                    row["probabilities"] = dict(zip(self._classes, probabilities, strict=True))
                self._file.write(json.dumps(_to_json(row), ensure_ascii=False) + "\n")
            return
        columns: dict[str, list[Any]] = {}
        for name, column in zip(table.column_names, table.columns, strict=True):
            values, kind = _to_json(column.to_pylist()), column.type
            if pyarrow.types.is_fixed_size_list(kind) and not pyarrow.types.is_nested(kind.value_type):
                is_named = name == "probabilities" and len(self._classes) == kind.list_size
                parts = self._classes if is_named else list(range(kind.list_size))
                columns |= {f"{name}.{part}": [row and row[i] for row in values] for i, part in enumerate(parts)}
            elif pyarrow.types.is_nested(kind):
                columns[name] = [row if row is None else json.dumps(row, ensure_ascii=False) for row in values]
            else:
                columns[name] = values
        if not self._has_header:
            self._csv.writerow(columns)
            self._has_header = True
        self._csv.writerows(zip(*columns.values(), strict=True))

    def close(self) -> None:
        self._file.close()


def open_writer(file: BinaryIO, suffix: str, schema: Any, classes: list[str]) -> Any:
    """What writes tables to an open file: `write_table(table)`, `close()`."""
    import pyarrow.parquet

    if suffix in LINES:
        return _Lines(file, suffix, classes if len(set(classes)) == len(classes) else [])
    return pyarrow.parquet.ParquetWriter(file, schema.with_metadata({MARK: b"1", b"classes": json.dumps(classes)}))


def _to_json(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _to_json(part) for name, part in value.items()}
    if isinstance(value, list):
        return [_to_json(part) for part in value]
    if isinstance(value, str | int | float | None):
        return None if value != value else value
    return value.decode("utf-8", "backslashreplace") if isinstance(value, bytes) else str(value)
