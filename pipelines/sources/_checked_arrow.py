"""Arrow files with checksums: a damaged one gives no other values than those that were written, and is removed.

    a file of Arrow's format | JSON: [end, CRC-32, rows] of each part | 8 bytes: the size of the JSON

A part is a record batch; the last one is Arrow's footer.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import zlib
from collections.abc import Iterable
from typing import Any, BinaryIO, NoReturn

from pipelines.errors import DataOutOfReach

_SIZE_BYTES = 8


class DamagedFile(DataOutOfReach):
    """A file was damaged, and is removed."""


def write_batches(path: str, schema: Any, batches: Iterable[Any]) -> None:
    """Writes those record batches to a file that have rows."""
    import pyarrow

    ends, rows = list[int](), list[int]()
    with pyarrow.OSFile(path, "wb") as sink:
        writer = pyarrow.ipc.new_file(sink, schema)
        for batch in batches:
            if batch.num_rows:
                writer.write_batch(batch)
                ends.append(sink.tell())
                rows.append(batch.num_rows)
        writer.close()
        ends.append(sink.tell())
    with open(path, "r+b") as file:
        sums = [zlib.crc32(file.read(end - begin)) for begin, end in zip([0, *ends], ends, strict=False)]
        parts = json.dumps(list(zip(ends, sums, [*rows, 0], strict=True))).encode()
        file.write(parts + len(parts).to_bytes(_SIZE_BYTES, "little"))


class CheckedTable:
    """A file of `write_batches`, mapped into memory.

    Attributes:
        rows: of each record batch.
        schema: of all of them.

    Raises:
        DamagedFile: it is damaged.
    """

    def __init__(self, handle: BinaryIO) -> None:
        import pyarrow

        self._path, self._checked = handle.name, set[int]()
        try:
            self._bytes = memoryview(mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ))
            size = int.from_bytes(self._bytes[-_SIZE_BYTES:], "little")
            self._parts = json.loads(bytes(self._bytes[-_SIZE_BYTES - size : -_SIZE_BYTES]))
            self.rows = [rows for _, _, rows in self._parts[:-1]]
            self._check(len(self.rows))
            self._file = pyarrow.ipc.open_file(pyarrow.py_buffer(self._bytes[: self._parts[-1][0]]))
        except (ValueError, TypeError, IndexError):  # ArrowInvalid is a ValueError
            self._remove()
        self.schema = self._file.schema

    def get_batch(self, number: int) -> Any:
        """A record batch; its bytes are checked when it is first read.

        Raises:
            DamagedFile: they are damaged.
        """
        self._check(number)
        return self._file.get_batch(number)

    def _check(self, number: int) -> None:
        if number in self._checked:
            return
        begin = self._parts[number - 1][0] if number else 0
        end, checksum, _ = self._parts[number]
        if zlib.crc32(self._bytes[begin:end]) != checksum:
            self._remove()
        self._checked.add(number)

    def _remove(self) -> NoReturn:
        with contextlib.suppress(OSError):  # another process has removed it
            os.unlink(self._path)
        raise DamagedFile(f"{self._path} is damaged: it is removed") from None
