"""Base of the sources of text files: where rows begin, found in one pass without parsing, and their values.

A line break inside a quoted field of CSV is part of the row (RFC 4180). A quote opens such a field only at its
beginning, and two of them inside it are one; anywhere else it is a character as any other, as Python's `csv` and
Arrow have it.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Iterator
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from pipelines.errors import PipelineError
from pipelines.sources._file_records import FileRecords
from pipelines.sources._files import File

_CHUNK = 8 << 20
_COUNTED = 2**16  # bytes whose line breaks are counted at a time: what is read again for each bad row
_MOST_COUNTED = 2**28  # bytes that are read to know the line of a row
_NEWLINE, _RETURN = ord("\n"), ord("\r")
_BOM = b"\xef\xbb\xbf"
# First bytes of compressed files, of which no row can be read without all that come before it.
_COMPRESSED = (
    (b"\x1f\x8b", "gzip"),
    (b"BZh", "bzip2"),
    (b"\xfd7zXZ", "xz"),
    (b"\x28\xb5\x2f\xfd", "zstd"),
    (b"PK\x03\x04", "zip"),
)

Bytes = npt.NDArray[np.uint8]


class RowScanner:
    """Finds the beginnings of rows in the consecutive chunks of a file. Empty lines are no rows.

    Args:
        delimiter, quote: each one byte; without a quote, every line is a row.

    Attributes:
        is_quoted: whether the last chunk ended within a quoted field.
    """

    def __init__(self, delimiter: bytes = b",", quote: bytes | None = None) -> None:
        self._is_before_field = np.zeros(256, bool)
        self._is_before_field[[delimiter[0], _NEWLINE, _RETURN]] = True
        self._quote = None if quote is None else quote[0]
        self._last = _NEWLINE  # the byte before the chunk
        self._is_closed = False  # whether that is the quote that closed a field
        self.is_quoted = False

    def scan(self, chunk: Bytes) -> npt.NDArray[np.int64]:
        """The places in the next chunk where rows begin."""
        is_break = (chunk == _NEWLINE) | (chunk == _RETURN)
        begins = np.empty(len(chunk), bool)
        begins[0] = self._last in (_NEWLINE, _RETURN) and not self.is_quoted
        begins[1:] = is_break[:-1]
        marks = self._find_marks(chunk)
        if len(marks) or self.is_quoted:
            breaks = np.flatnonzero(is_break[:-1])
            inside = (np.searchsorted(marks, breaks) + self.is_quoted) % 2 == 1
            begins[breaks[inside] + 1] = False
        self.is_quoted = (len(marks) + self.is_quoted) % 2 == 1
        self._is_closed = bool(len(marks)) and marks[-1] == len(chunk) - 1 and not self.is_quoted
        self._last = int(chunk[-1])
        return np.flatnonzero(begins & ~is_break)

    def _find_marks(self, chunk: Bytes) -> npt.NDArray[np.int64]:
        """The places of the quotes that open or close a field; any other quote is a character."""
        if self._quote is None:
            return np.empty(0, np.int64)
        quotes = np.flatnonzero(chunk == self._quote)
        previous = np.where(quotes > 0, chunk[quotes - 1], self._last)
        is_first = self._is_before_field[previous]
        closed = -1 if self._is_closed else -2  # the place of the quote that closed a field last
        # In most files every other quote opens a field, or follows the one that closed it.
        follows = np.diff(quotes, prepend=closed) == 1
        if (is_first | follows)[int(self.is_quoted) :: 2].all():
            return quotes
        is_quoted, marks = self.is_quoted, []
        for place, can_open in zip(quotes.tolist(), is_first.tolist(), strict=True):
            if is_quoted:
                closed = place
            elif not can_open and closed != place - 1:
                continue
            is_quoted = not is_quoted
            marks.append(place)
        return np.array(marks, np.int64)


class RowSplitter:
    """Splits a row, without its line break, into values, as Python's `csv` does."""

    def __init__(self, delimiter: str, quote: str | None) -> None:
        self._delimiter, self._quote = delimiter, quote or ""
        self._value: re.Pattern[str] | None = None
        if quote is not None:
            d, q = re.escape(delimiter), re.escape(quote)
            # A quoted value, and what follows its closing quote; or a plain one. Then a delimiter, or the end.
            value = rf"(?:{q}((?:[^{q}]|{q}{q})*){q}([^{d}]*)|([^{d}]*))({d}|\Z)"
            self._value = re.compile(value, re.DOTALL)

    def __call__(self, row: str) -> list[str]:
        quote = self._quote
        if self._value is None or quote not in row:
            return row.split(self._delimiter)
        values, place, more = [], 0, True
        while more:
            found = self._value.match(row, place)
            assert found is not None
            quoted, rest, plain, end = found.groups()
            values.append(plain if quoted is None else quoted.replace(quote + quote, quote) + rest)
            place, more = found.end(), bool(end)
        return values


def find_rows(file: File, delimiter: bytes = b",", quote: bytes | None = None) -> npt.NDArray[np.int64]:
    """Where the rows of a text file begin, and where the last one ends: int64 [rows + 1].

    Raises:
        PipelineError: the file is compressed, cannot be read, or ends within quotes.
    """
    scanner = RowScanner(delimiter, quote)
    found: list[npt.NDArray[np.int64]] = []
    with file.open() as handle:
        first = skip_mark(handle)
        offset = first
        while data := handle.read(_CHUNK):
            found.append(scanner.scan(np.frombuffer(data, np.uint8)) + offset)
            offset += len(data)
    rows = np.concatenate([*found, [offset]]).astype(np.int64)
    if scanner.is_quoted:
        raise PipelineError(
            f"{file.path}, line {1 + count_lines(file, int(rows[-2]), [0])}: opens a quoted field that is never "
            "closed; if quotes mean nothing in this file, give quote=None"
        )
    return rows


def count_lines(file: File, end: int, counted: list[int]) -> int:
    """The number of line breaks before a byte with which a row begins.

    Args:
        counted: the numbers before each part of the file, as far as they are counted, beginning with 0: goes on.
    """
    with file.open() as handle:
        for part in itertools.count(min(len(counted) - 1, end // _COUNTED)):
            start = part * _COUNTED
            handle.seek(start)
            data = handle.read(min(_COUNTED, end - start) + 1)  # a byte more: a "\r" may be half of a line break
            breaks = data.count(b"\n", 0, _COUNTED) + data.count(b"\r", 0, _COUNTED) - data.count(b"\r\n")
            if start + _COUNTED > end:
                break
            counted[part + 1 :] = [counted[part] + breaks]
    return counted[part] + breaks


def skip_mark(handle: BinaryIO) -> int:
    """Moves to the first byte after a byte order mark, and returns its offset.

    Raises:
        PipelineError: the file is compressed.
    """
    begin = handle.read(6)
    for magic, name in _COMPRESSED:
        if begin.startswith(magic):
            raise PipelineError(
                f"{handle.name}: is compressed with {name}, so no row can be read without all before it; "
                "decompress it"
            )
    first = len(_BOM) if begin.startswith(_BOM) else 0
    handle.seek(first)
    return first


class TextRows(FileRecords):
    """Records that are rows of text files; a subclass parses them, and finds out their types.

    Attributes:
        files: the files that are read.
        columns: fields of the records.
        types: field -> the name of the type of its values.
    """

    columns: tuple[str, ...]
    types: dict[str, str]

    def _iterate_blocks(self) -> Iterator[tuple[int, bytes, list[int]]]:
        """Reads all rows, many at once.

        Yields:
            The index of the first row, the bytes of the rows, and where in these each begins and the last ends.
        """
        for file, first, last, end in zip(self.files, self._firsts, self._firsts[1:], self._ends, strict=False):
            offsets = np.append(self._starts[first:last], end)
            start = 0
            with file.open() as handle:
                while start < last - first:
                    stop = int(np.searchsorted(offsets, offsets[start] + _CHUNK, side="right")) - 1
                    block = offsets[start : max(start + 1, stop) + 1]
                    handle.seek(int(block[0]))
                    data = handle.read(int(block[-1] - block[0]))
                    yield first + start, data, (block - block[0]).tolist()
                    start += len(block) - 1

    @functools.cached_property
    def _line_counts(self) -> dict[int, list[int]]:
        """By file, what `count_lines` has counted."""
        return {}

    def where(self, index: int) -> str:
        """The file, and the line as an editor counts it: from 1, headers and line breaks in quotes included."""
        number, start, _ = self._locate(index)
        counts = list(self._line_counts.get(number, (0,)))
        if start > len(counts) * _COUNTED + _MOST_COUNTED:  # not for the name of a row alone
            return super().where(index)
        try:
            line = 1 + count_lines(self.files[number], start, counts)
        except (OSError, PipelineError):  # the file is gone
            return super().where(index)
        self._line_counts[number] = counts
        return f"{self.files[number].path}, line {line}"

    def is_text(self, field: str) -> bool:
        return self.types.get(field) in ("str", "text")

    def identity(self) -> Any:
        return {**super().identity(), "columns": [[name, self.types[name]] for name in self.columns]}
