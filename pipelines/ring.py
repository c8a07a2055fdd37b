"""The memory in which samples lie: columns in an anonymous file, shared by all who hold its descriptor.

One column per field, [capacity, ...], each at the start of a page. The memory is a memfd: it has no name,
so nothing is left behind when its processes die, however they die.

Writers map it shared. A reader maps it *private*: it sees what the writers write, and a page that the
reader itself writes to becomes a copy of its own, which nobody else sees. Such pages have to be given back
before the writer's next lap, or the reader would see its own stale copy: `PrivateMemory.restore` asks the
kernel which pages were written (/proc/self/pagemap, bit 61: the page is a file's) and drops just those.
"""

from __future__ import annotations

import mmap
import os
from typing import Any

import numpy as np
import numpy.typing as npt

from pipelines.fields import Field
from pipelines.prepare import INDEX, OK, Columns

_PAGE = mmap.PAGESIZE
_PRESENT, _SWAPPED, _FILE = np.uint64(1 << 63), np.uint64(1 << 62), np.uint64(1 << 61)
_HERE = _PRESENT | _SWAPPED
ALIGNMENT = 64


class Layout:
    """Where each column lies: a pure function of the fields and the capacity.

    Attributes:
        fields: name -> field, `index` and `_ok` included.
        offsets: name -> first byte, a multiple of the page size.
        nbytes: of the whole memory.
    """

    def __init__(self, fields: dict[str, Field], capacity: int) -> None:
        self.capacity = capacity
        self.fields = {**fields, INDEX: Field((), "int64"), OK: Field((), "uint8")}
        self.offsets: dict[str, int] = {}
        self.row_bytes: dict[str, int] = {}
        offset = 0
        for name, (shape, dtype) in self.fields.items():
            self.offsets[name] = offset
            self.row_bytes[name] = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
            offset += -(-self.row_bytes[name] * capacity // _PAGE) * _PAGE
        self.nbytes = max(offset, _PAGE)

    def columns(self, memory: Any) -> Columns:
        """The columns as arrays over a mapping of the memory."""
        columns = {}
        for name, (shape, dtype) in self.fields.items():
            count = int(np.prod(shape, dtype=np.int64)) * self.capacity
            flat: npt.NDArray[Any] = np.frombuffer(memory, dtype, count=count, offset=self.offsets[name])
            columns[name] = flat.reshape(self.capacity, *shape)
        return columns


def sample_bytes(fields: dict[str, Field]) -> int:
    """Bytes of one sample in a ring."""
    return sum(Layout(fields, 1).row_bytes.values())


def create(layout: Layout, name: str) -> int:
    """New memory for a layout; returns its descriptor.

    Raises:
        MemoryError: the machine has not that much memory to give.
    """
    free = _available_bytes()
    if layout.nbytes > free:
        raise MemoryError(
            f"{name} needs {layout.nbytes / 2**20:.0f} MiB of memory for {layout.capacity} samples, "
            f"{free / 2**20:.0f} MiB are free"
        )
    fd = os.memfd_create(name, os.MFD_CLOEXEC)
    os.ftruncate(fd, layout.nbytes)
    return fd


def _available_bytes() -> int:
    """MemAvailable of proc(5): what can be had without swapping."""
    with open("/proc/meminfo") as lines:
        for line in lines:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * _PAGE


def map_shared(fd: int, layout: Layout) -> Columns:
    """Columns for a writer."""
    return layout.columns(mmap.mmap(fd, layout.nbytes, flags=mmap.MAP_SHARED))


class PrivateMemory:
    """Columns for a reader, who may write into what it was given without anybody else seeing it."""

    def __init__(self, fd: int, layout: Layout) -> None:
        self.layout = layout
        self._map = mmap.mmap(fd, layout.nbytes, flags=mmap.MAP_PRIVATE)
        self.columns = layout.columns(self._map)
        first = next(iter(self.columns))
        self._address = self.columns[first].ctypes.data - layout.offsets[first]
        self._pagemap = os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC)

    def restore(self, first: int, last: int) -> int:
        """Give back the reader's own copies of pages under the slots [first, last); returns how many."""
        dropped = 0
        for name, row in self.layout.row_bytes.items():
            if name == OK:
                continue
            offset = self.layout.offsets[name]
            start = (offset + first * row) // _PAGE
            stop = -(-(offset + last * row) // _PAGE)
            raw = os.pread(self._pagemap, (stop - start) * 8, (self._address // _PAGE + start) * 8)
            entries = np.frombuffer(raw, np.uint64)
            # A page that is here and is no file's page is a copy of ours.
            if not np.bitwise_or.reduce((entries & _HERE != 0) & (entries & _FILE == 0), initial=False):
                continue
            for page in np.flatnonzero((entries & _HERE != 0) & (entries & _FILE == 0)).tolist():
                self._map.madvise(mmap.MADV_DONTNEED, (start + page) * _PAGE, _PAGE)
                dropped += 1
        return dropped

    def close(self) -> None:
        """Let go of the descriptor; the mapping lives as long as an array of it does."""
        if self._pagemap >= 0:
            os.close(self._pagemap)
            self._pagemap = -1
