"""Base of the sources of text files: each file is converted once to an Arrow file, of which rows are read.

The Arrow file lies in the folder of `_kept_files`; all processes of a machine map it, and none parses the text
again. A record batch has the rows of some megabytes of text: the fields, what is wrong with the row, and its line.
"""

from __future__ import annotations

import codecs
import contextlib
import functools
import hashlib
import io
import json
import logging
import os
import zlib
from abc import abstractmethod
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from pipelines.errors import PipelineError, SampleError
from pipelines.sources._checked_arrow import CheckedTable, DamagedFile, write_batches
from pipelines.sources._columns import MissingValue, make_nested_reader
from pipelines.sources._file_records import GroupedRecords
from pipelines.sources._files import OPEN_FILES, File
from pipelines.sources._kept_files import find_folder
from pipelines.sources._labels import pack_values
from pipelines.sources._recent import RecentlyUsed

log = logging.getLogger(__name__)

#: Bytes of text that are converted at a time.
BLOCK_BYTES = 4 << 20
_LARGE_BYTES = 1 << 30  # that take a minute to convert
# What makes the Arrow files.
_MODULES = ("_checked_arrow", "_columns", "_csv", "_csv_types", "_json_types", "_jsonl", "_text_table")
_KEPT_BATCHES = 4096  # of which a process keeps the readers; their data are mapped
# First bytes of compressed files, of which no row can be read without all that come before it.
_COMPRESSED = (
    (b"\x1f\x8b", "gzip"),
    (b"BZh", "bzip2"),
    (b"\xfd7zXZ", "xz"),
    (b"\x28\xb5\x2f\xfd", "zstd"),
    (b"PK\x03\x04", "zip"),
)


class TextTable(GroupedRecords):
    """Rows of text files; a subclass converts them, and calls `_load` when it knows the types.

    Attributes:
        files: the files that are read.
        columns: fields of the records.
        types: field -> the name of the type of its values.
    """

    is_fork_safe = True
    columns: tuple[str, ...]
    types: dict[str, str]
    _form: Any  # beside the types, what the content of the Arrow files depends on

    def _load(self) -> None:
        """Converts the files that are not converted yet, and indexes the rows of all.

        Raises:
            PipelineError: a file cannot be converted, or there is no row.
        """
        files = self.files
        self._tables = RecentlyUsed[int, CheckedTable](OPEN_FILES)
        self._groups: list[tuple[int, int]] = []  # (number of the file, of the batch in it)
        bounds, counts, kept_bytes = [0], list[int](), 0
        for number in range(len(files)):
            table = self._tables.get(number, self._open_table)
            first, kept_bytes = bounds[-1], kept_bytes + table.size
            for batch, rows in enumerate(table.rows):
                self._groups.append((number, batch))
                bounds.append(bounds[-1] + rows)
            counts.append(bounds[-1] - first)
        if kept_bytes > (limit := find_folder().limit):
            log.warning(
                "%s and others: their Arrow files take %.1f MB, and %.1f MB may be kept, so that they are made "
                "again at each opening: allow more by ENSEMBLE_SOURCES_BYTES=, or convert the files to Parquet",
                files[0].path,
                kept_bytes / 1e6,
                limit / 1e6,
            )
        super().__init__(files, counts, bounds, _KEPT_BATCHES, "record")

    def _recall(self, options: Any, find: Callable[[], Any]) -> Any:
        """Returns what a function finds in all files, a JSON value, which is kept for the next time.

        Args:
            options: what it depends on beside the files.
            find: the function.
        """
        key = [_digest_code(), self._describe_class(), [file.content_key() for file in self.files], options]

        def write(path: str) -> None:
            text = json.dumps(find()).encode()  # which may take long: the file is opened afterwards
            Path(path).write_bytes(b"%08x%b" % (zlib.crc32(text), text))

        while True:
            with find_folder().open("types", f"{self.kind}.json", key, 0, write) as kept:
                checksum, text = kept.read(8), kept.read()
            if checksum == b"%08x" % zlib.crc32(text):
                return json.loads(text)
            _discard(kept.name)

    @abstractmethod
    def _parse(self, file: File) -> Iterator[tuple[int, int, Any]]:
        """Yields of each row its first line, the size of its text, and its values or what is wrong with it."""

    @abstractmethod
    def _make_columns(self, rows: list[Any], where: Callable[[int], str]) -> tuple[list[Any], dict[int, str]]:
        """An Arrow array of each field of some rows, and row -> what is wrong with it.

        Args:
            rows: as `_parse` yields them.
            where: says where a row is.
        """

    def _iterate_blocks(self, file: File) -> Iterator[tuple[list[int], list[Any]]]:
        """Parses a file, some megabytes at a time: the rows' lines, and their values or what is wrong."""
        lines, rows, block_size = list[int](), list[Any](), 0
        for line, size, values in self._parse(file):
            lines.append(line)
            rows.append(values)
            block_size += size
            if block_size >= BLOCK_BYTES:
                yield lines, rows
                lines, rows, block_size = [], [], 0
        if rows:
            yield lines, rows

    def _convert(self, file: File) -> Iterator[Any]:
        """Yields the record batches of a file."""
        import pyarrow

        for lines, rows in self._iterate_blocks(file):

            def where(row: int, lines: list[int] = lines) -> str:
                return f"{file.path}, line {lines[row]}"

            fields, problems = self._make_columns(rows, where)
            problems |= {row: values for row, values in enumerate(rows) if isinstance(values, str)}
            errors = pyarrow.array([problems.get(row) for row in range(len(rows))], pyarrow.string())
            columns = [*fields, errors, pyarrow.array(lines, pyarrow.int64())]
            yield pyarrow.record_batch(columns, [str(number) for number in range(len(columns))])

    def _open_table(self, number: int) -> tuple[CheckedTable, int]:
        """The Arrow file of a file, mapped into memory; it is made where it is not there, or damaged."""
        import pyarrow

        file = self.files[number]
        file.open().close()  # it is unchanged
        key = [_digest_code(), self._describe_class(), pyarrow.__version__, file.content_key(), self._form]
        key += [[name, self.types[name]] for name in self.columns]

        def write(path: str) -> None:
            if file.size > _LARGE_BYTES:
                log.warning("%s: %.1f GB are converted to Arrow, once", file.path, file.size / 1e9)
            write_batches(path, self._convert(file))
            file.open().close()  # it is unchanged still

        label = f"{os.path.basename(file.path)}.arrow"
        while True:
            with find_folder().open("table", label, key, file.size, write) as handle:
                try:
                    return CheckedTable(handle), 1
                except DamagedFile:
                    _discard(handle.name)

    def _get_batch(self, number: int, within: int) -> Any:
        """A record batch of a file; of an Arrow file that is damaged once that is made again."""
        while True:
            table = self._tables.get(number, self._open_table)
            try:
                return table.get_batch(within)
            except DamagedFile:
                self._tables.drop(number)
                _discard(table.path)

    def _decode(self, group: int) -> tuple[Any, int]:
        batch = self._get_batch(*self._groups[group])
        *fields, errors, lines = batch.columns
        readers = [
            (name, self._make_reader(name, values)) for name, values in zip(self.columns, fields, strict=True)
        ]
        return (readers, errors if errors.null_count < len(errors) else None, lines), 1

    def _make_reader(self, name: str, values: Any) -> Callable[[int], Any]:
        """A function row -> value of a field in a batch."""
        return make_nested_reader(values)

    def _read(self, index: int) -> dict[str, Any]:
        name = ""
        try:
            (readers, errors, _), row = self._find_group(index)
            if errors is not None and errors[row].is_valid:
                raise SampleError(index, self.where(index), errors[row].as_py())
            record = {}
            for name, read in readers:
                record[name] = read(row)
            return record
        except MissingValue as error:
            raise SampleError(index, self.where(index), f"field {name!r} {error}") from None
        except (PipelineError, OSError) as error:
            if isinstance(error, SampleError):
                raise
            raise SampleError(index, self.where(index), f"cannot be read: {error}") from error

    def column(self, field: str) -> npt.NDArray[Any]:
        if field not in self.columns:
            raise self._missing_field(field, self.columns)
        place, values = self.columns.index(field), list[Any]()
        for first, last in zip(self._bounds, self._bounds[1:], strict=False):
            (readers, errors, _), _ = self._find_group(first)
            if errors is not None:  # which reading says
                self._read(first + int(np.flatnonzero(np.asarray(errors.is_valid()))[0]))
            values += map(readers[place][1], range(last - first))
        return pack_values(values)

    def where(self, index: int) -> str:
        """The file, and the line as an editor counts it: from 1, headers and line breaks in quotes included."""
        try:
            (_, _, lines), row = self._find_group(index)
        except (PipelineError, OSError):  # the file is gone
            return super().where(index)
        return f"{self.files[self._find_file(index)].path}, line {lines[row]}"

    def is_text(self, field: str) -> bool:
        return self.types.get(field) in ("str", "text")

    def identity(self) -> Any:
        return {**super().identity(), "columns": [[name, self.types[name]] for name in self.columns]}


def _discard(path: str) -> None:
    """Removes a damaged file of the folder, which is made again."""
    log.warning("%s is damaged: it is removed, and made again", path)
    with contextlib.suppress(FileNotFoundError):  # another process has removed it
        os.unlink(path)


@functools.cache
def _digest_code() -> str:
    """Of what makes Arrow files: those that other code has made are not read."""
    code = b"".join((Path(__file__).parent / f"{name}.py").read_bytes() for name in _MODULES)
    return hashlib.sha256(code).hexdigest()


def open_text(file: File) -> io.TextIOWrapper:
    """Opens a text file after its byte order mark; a byte that is no UTF-8 is read as a surrogate.

    Raises:
        PipelineError: it is compressed, or cannot be opened.
    """
    handle = io.BufferedReader(cast(io.RawIOBase, file.open()), 1 << 20)
    begin = handle.peek(8)
    for magic, name in _COMPRESSED:
        if begin.startswith(magic):
            raise PipelineError(
                f"{file.path}: is compressed with {name}, so no row can be read without all before it; "
                "decompress it"
            )
    handle.seek(len(codecs.BOM_UTF8) if begin.startswith(codecs.BOM_UTF8) else 0)
    return io.TextIOWrapper(handle, "utf-8", errors="surrogateescape", newline="")


def is_utf8(text: str) -> bool:
    """Whether a text of `open_text` was read from UTF-8."""
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
