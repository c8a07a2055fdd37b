"""Finds where the rows of text files begin, in one pass and without parsing them.

A line break inside a quoted field of CSV is part of the row (RFC 4180). A quote opens such a field only at its
beginning, and two of them inside it are one; anywhere else it is a character as any other, as Python's `csv` and
Arrow have it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from pipelines.errors import PipelineError
from pipelines.sources._files import File

_CHUNK = 8 << 20
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
        self._delimiter = delimiter[0]
        self._quote = None if quote is None else quote[0]
        self._last = _NEWLINE  # the byte before the chunk
        self._is_closed = False  # whether that is the quote that closed a field
        self.is_quoted = False

    def scan(self, chunk: Bytes) -> npt.NDArray[np.int64]:
        """The places in the next chunk where rows begin."""
        is_break = (chunk == _NEWLINE) | (chunk == _RETURN)
        if self._quote is not None:
            quotes = np.flatnonzero(chunk == self._quote)
            if len(quotes) or self.is_quoted:
                return self._scan_quoted(chunk, is_break, quotes)
        return self._find_starts(chunk, is_break)

    def _find_starts(self, chunk: Bytes, is_break: npt.NDArray[np.bool_]) -> npt.NDArray[np.int64]:
        before = np.empty(len(chunk), bool)
        before[1:] = is_break[:-1]
        before[:1] = self._last in (_NEWLINE, _RETURN) and not self.is_quoted
        starts = np.flatnonzero(before & (chunk != _NEWLINE) & (chunk != _RETURN))
        self._last = int(chunk[-1])
        self._is_closed = False
        return starts

    def _scan_quoted(
        self, chunk: Bytes, is_break: npt.NDArray[np.bool_], quotes: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.int64]:
        """As long as quotes open only at the beginning of a field, a break is in quotes after an odd number."""
        opening = quotes[int(self.is_quoted) :: 2]
        previous = np.where(opening > 0, chunk[opening - 1], self._last)
        ends = [self._delimiter, self._quote or 0, _NEWLINE, _RETURN]
        is_stray = self._last == self._quote and not (self._is_closed or self.is_quoted)
        if is_stray or not np.isin(previous, ends).all():
            return self._walk(chunk)
        breaks = np.flatnonzero(is_break)
        inside = (np.searchsorted(quotes, breaks) + self.is_quoted) % 2 == 1
        is_break[breaks[inside]] = False
        starts = self._find_starts(chunk, is_break)
        self.is_quoted = (len(quotes) + self.is_quoted) % 2 == 1
        self._is_closed = not self.is_quoted and self._last == self._quote
        return starts

    def _walk(self, chunk: Bytes) -> npt.NDArray[np.int64]:
        """The same, byte by byte, for quotes at any place."""
        quote, delimiter, is_quoted, last = self._quote, self._delimiter, self.is_quoted, self._last
        starts = []
        is_closed = self._is_closed
        for place, byte in enumerate(chunk.tolist()):
            if is_quoted:
                if byte == quote:
                    is_quoted, is_closed = False, True
            else:
                is_break = byte in (_NEWLINE, _RETURN)
                if last in (_NEWLINE, _RETURN) and not is_break:
                    starts.append(place)
                if byte == quote and (is_closed or last in (delimiter, _NEWLINE, _RETURN)):
                    is_quoted = True
                is_closed = False
            last = byte
        self.is_quoted, self._last, self._is_closed = is_quoted, last, is_closed
        return np.array(starts, np.int64)


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
        while data := _read_chunk(handle):
            found.append(scanner.scan(np.frombuffer(data, np.uint8)) + offset)
            offset += len(data)
    rows = np.concatenate([*found, [offset]]).astype(np.int64)
    if scanner.is_quoted:
        raise PipelineError(
            f"{file.path}: row {len(rows) - 2} (byte {rows[-2]}) opens a quoted field that is never closed; if "
            "quotes mean nothing in this file, give quote=None"
        )
    return rows


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


def _read_chunk(handle: BinaryIO) -> bytes:
    return os.read(handle.fileno(), _CHUNK)


def iterate_blocks(offsets: npt.NDArray[np.int64], nbytes: int) -> Iterator[tuple[int, int]]:
    """Divides rows into ranges [start, stop) of about so many bytes."""
    start, rows = 0, len(offsets) - 1
    while start < rows:
        stop = int(np.searchsorted(offsets, offsets[start] + nbytes))
        stop = min(rows, max(start + 1, stop))
        yield start, stop
        start = stop
