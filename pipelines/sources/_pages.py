"""Checks the size that a row group of a Parquet file claims, before it is decoded.

A run of one value takes a few bytes, however long the run, so a small file may claim more than the memory of a
machine. For a column of plain values the decoder is limited by the rows of the group. For lists it trusts the
header of each page, which is therefore read here (Thrift's compact protocol; `PageHeader` in parquet.thrift of
parquet-format).
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

from pipelines.environment.machine_limits import available_bytes
from pipelines.errors import PipelineError

_WIDTHS = {"BOOLEAN": 1 / 8, "INT32": 4, "FLOAT": 4, "INT64": 8, "DOUBLE": 8, "INT96": 12}
_OFFSET = 4  # bytes of a text, or of anything else, at least
_BEGINNING, _WHOLE = 4096, 1 << 20  # bytes of a page's header: it may hold the least and the greatest value
_STOP, _TRUE, _FALSE, _BYTE, _DOUBLE, _BINARY, _LIST, _SET, _STRUCT = 0, 1, 2, 3, 7, 8, 9, 10, 12
# Fields of a PageHeader, and of the header of a data page (in both versions) in it.
_COMPRESSED, _DATA, _DATA_V2, _VALUES = 3, 5, 8, 1


def check_row_group(descriptor: int, metadata: Any, group: int, leaves: Iterable[str]) -> None:
    """Raise a `PipelineError` where what is to be decoded of a row group cannot be, or would not fit into memory.

    Args:
        descriptor: of the open file.
        metadata: the file's.
        leaves: the names of what is decoded.
    """
    rows = metadata.row_group(group)
    wanted = tuple(leaves)
    claimed = 0.0
    for number in range(rows.num_columns):
        column = rows.column(number)
        path = column.path_in_schema
        if not any(path == leaf or path.startswith(f"{leaf}.") for leaf in wanted):
            continue
        here, values = f"row group {group}, column {path!r}", column.num_values
        if metadata.schema.column(number).max_repetition_level:
            _check_pages(descriptor, column, here)
        elif values != rows.num_rows:
            raise PipelineError(f"{here}: claims {values} values for {rows.num_rows} rows: the file is damaged")
        claimed += values * _WIDTHS.get(column.physical_type, _OFFSET)
    free = available_bytes()
    if claimed > free:
        raise PipelineError(
            f"row group {group} claims {rows.num_rows} rows, {claimed / 2**30:.3g} GiB once decoded, and "
            f"{free / 2**30:.3g} GiB of memory are free; write smaller row groups"
        )


def _check_pages(descriptor: int, column: Any, here: str) -> None:
    """Raise a `PipelineError` where the pages claim more values than their column does."""
    offset = column.dictionary_page_offset if column.has_dictionary_page else column.data_page_offset
    seen = 0
    while seen < column.num_values:
        header, length = _read_page_header(descriptor, offset)
        data = header.get(_DATA) or header.get(_DATA_V2) or {}
        values, size = data.get(_VALUES, 0), header[_COMPRESSED]
        if values < 0 or size < 0 or seen + values > column.num_values:
            raise PipelineError(
                f"{here}: a page at byte {offset} claims {values} values, but {column.num_values - seen} of the "
                f"column's {column.num_values} are left: the file is damaged"
            )
        seen += values
        offset += length + size


def _read_page_header(descriptor: int, offset: int) -> tuple[dict[int, Any], int]:
    """The header of the page at an offset, and its length in bytes."""
    for length in (_BEGINNING, _WHOLE):
        reader = _CompactReader(os.pread(descriptor, length, offset))
        try:
            return reader.read_struct(), reader.offset
        except (IndexError, RecursionError):
            continue
    raise PipelineError(f"no header of a page at byte {offset}: the file is damaged")


class _CompactReader:
    """Reads Thrift's compact protocol; raises IndexError at the data's end.

    Attributes:
        at: the next byte.
    """

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.offset = 0

    def read_struct(self) -> dict[int, Any]:
        """Field number -> value, of integers and structs; of others None."""
        fields: dict[int, Any] = {}
        number = 0
        while (head := self._read_byte()) != _STOP:
            number = number + (head >> 4) if head >> 4 else self._read_zigzag()
            fields[number] = self._read_value(head & 15)
        return fields

    def _read_value(self, kind: int) -> Any:
        if kind in (_TRUE, _FALSE):
            return None
        if kind == _STRUCT:
            return self.read_struct()
        if kind in (_BINARY, _DOUBLE, _BYTE):
            self._skip(self._read_varint() if kind == _BINARY else 8 if kind == _DOUBLE else 1)
            return None
        if kind in (_LIST, _SET):
            head = self._read_byte()
            for _ in range(self._read_varint() if head >> 4 == 15 else head >> 4):
                self._read_value(head & 15) if head & 15 > _FALSE else self._skip(1)
            return None
        return self._read_zigzag()

    def _skip(self, count: int) -> None:
        self.offset += count
        if self.offset > len(self._data):
            raise IndexError

    def _read_byte(self) -> int:
        self.offset += 1
        return self._data[self.offset - 1]

    def _read_varint(self) -> int:
        value = shift = 0
        while (byte := self._read_byte()) & 0x80:
            value |= (byte & 0x7F) << shift
            shift += 7
            if shift > 63:
                raise IndexError
        return value | byte << shift

    def _read_zigzag(self) -> int:
        value = self._read_varint()
        return value >> 1 ^ -(value & 1)
