"""Arrow files with checksums: a damaged one gives no other values than those that were written.

    a file of Arrow's format | JSON: [end, CRC-32, rows] of each part | 8 bytes: the size of the JSON

A part is a record batch; the last one is Arrow's footer.
"""

from __future__ import annotations

import json
import mmap
import zlib
from collections.abc import Iterable
from typing import Any, BinaryIO

from pipelines.errors import PipelineError

_SIZE_BYTES = 8


class DamagedFile(PipelineError):
    """A part of a file is not what was written."""


def write_batches(path: str, batches: Iterable[Any]) -> None:
    """Writes record batches of one schema to a file."""
    import pyarrow

    writer, ends, rows = None, list[int](), list[int]()
    with pyarrow.OSFile(path, "wb") as sink:
        for batch in batches:
            writer = writer or pyarrow.ipc.new_file(sink, batch.schema)
            writer.write_batch(batch)
            ends.append(sink.tell())
            rows.append(batch.num_rows)
        (writer or pyarrow.ipc.new_file(sink, pyarrow.schema([]))).close()
        ends.append(sink.tell())
    with open(path, "r+b") as file:
        sums = [zlib.crc32(file.read(end - begin)) for begin, end in zip([0, *ends], ends, strict=False)]
        parts = json.dumps(list(zip(ends, sums, [*rows, 0], strict=True))).encode()
        file.write(parts + len(parts).to_bytes(_SIZE_BYTES, "little"))


class CheckedTable:
    """A file of `write_batches`, mapped into memory.

    Attributes:
        path: of the file.
        size: of the file in bytes.
        rows: of each record batch.

    Raises:
        DamagedFile: it is damaged.
    """

    def __init__(self, handle: BinaryIO) -> None:
        import pyarrow

        self.path, self._checked = handle.name, set[int]()
        try:
            self._bytes = memoryview(mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ))
            self.size = len(self._bytes)
            size = int.from_bytes(self._bytes[-_SIZE_BYTES:], "little")
            self._parts = json.loads(bytes(self._bytes[-_SIZE_BYTES - size : -_SIZE_BYTES]))
            self.rows = [rows for _, _, rows in self._parts[:-1]]
            self._check(len(self.rows))
            self._file = pyarrow.ipc.open_file(pyarrow.py_buffer(self._bytes[: self._parts[-1][0]]))
        except (ValueError, TypeError, IndexError) as error:  # ArrowInvalid is a ValueError
            raise DamagedFile(f"{self.path} is damaged ({error})") from None

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
            raise DamagedFile(f"{self.path} is damaged: bytes {begin} to {end} are not those that were written")
        self._checked.add(number)
