"""The memory in which samples lie: columns in an anonymous file, shared by all who hold its descriptor.

One column per field, [capacity, ...], each at the start of a page. The memory is a memfd: it has no name,
so nothing is left behind when its processes die, however they die.

Writers map it shared. A reader maps it *private*: it sees what the writers write, and a page that the
reader itself writes to becomes a copy of its own, which nobody else sees. Such pages have to be given back
before the writer's next lap, or the reader would see its own stale copy: `PrivateMemory.restore` asks the
kernel which pages are no longer the file's and drops just those (pagemap of proc(5): the PAGEMAP_SCAN
request of Linux 6.7, or else bit 61 of each entry).
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from pipelines.fields import Field
from pipelines.prepare import INDEX, OK, Columns

if TYPE_CHECKING:
    import torch

_PAGE = mmap.PAGESIZE
ALIGNMENT = 64
_SMALL = 4096  # bytes that are copied faster than their pages are looked up

# linux/fs.h: struct pm_scan_arg, struct page_region, and the categories of a page.
_SCAN_REQUEST = (3 << 30) | (96 << 16) | (ord("f") << 8) | 16
_SCAN = struct.Struct("<12Q")
_IS_FILE, _IS_PRESENT, _IS_SWAPPED = 1 << 2, 1 << 3, 1 << 4
_REGIONS = 64


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
        # By name: two processes may have declared the same fields in another order.
        for name, (shape, dtype) in sorted(self.fields.items()):
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


def copy_slots(source: int, target: int, layout: Layout, start: int, stop: int) -> None:
    """Copy the slots of the stream positions [start, stop) from one memory of a layout to another."""
    while start < stop:
        slot = start % layout.capacity
        count = min(stop - start, layout.capacity - slot)
        for name, row in layout.row_bytes.items():
            at, left = layout.offsets[name] + slot * row, count * row
            while left:
                copied = os.copy_file_range(source, target, left, at, at)
                at, left = at + copied, left - copied
        start += count


class PrivateMemory:
    """Columns for a reader, who may write into what it was given without anybody else seeing it."""

    def __init__(self, fd: int, layout: Layout) -> None:
        self.layout = layout
        self._map = mmap.mmap(fd, layout.nbytes, flags=mmap.MAP_PRIVATE)
        self.columns = layout.columns(self._map)
        self._address = np.frombuffer(self._map, np.uint8).ctypes.data
        self._pages = _Pages()
        self._tensors: dict[str, torch.Tensor] = {}

    def batch(self, first: int, last: int, *, copy: bool = False) -> tuple[dict[str, torch.Tensor], list[str]]:
        """The slots [first, last) as a tensor for each field, and the names of those that are views.

        Views are to be given to `restore`. What is small is copied, and so is what would not start on 64 bytes:
        kernels give other bits there.
        """
        if not self._tensors:
            import torch

            named = sorted(self.columns.items())
            self._tensors = {name: torch.from_numpy(column) for name, column in named if name != OK}
        rows = last - first
        tensors, views = {}, []
        for name, column in self._tensors.items():
            row = self.layout.row_bytes[name]
            view = column[first:last]
            if copy or rows * row <= _SMALL or first * row % ALIGNMENT:
                tensors[name] = view.clone()
            else:
                tensors[name] = view
                views.append(name)
        return tensors, views

    def restore(self, first: int, last: int, names: Iterable[str] | None = None) -> int:
        """Give back the reader's own copies of pages under the slots [first, last); returns how many.

        Args:
            names: fields to look at; None for all.
        """
        dropped = 0
        for name in self.layout.row_bytes if names is None else names:
            row = self.layout.row_bytes[name]
            offset = self.layout.offsets[name]
            start = self._address + (offset + first * row) // _PAGE * _PAGE
            stop = self._address + -(-(offset + last * row) // _PAGE) * _PAGE
            for begin, end in self._pages.written(start, stop):
                self._map.madvise(mmap.MADV_DONTNEED, begin - self._address, end - begin)
                dropped += (end - begin) // _PAGE
        return dropped

    def close(self) -> None:
        """Let go of the descriptor; the mapping lives as long as an array of it does."""
        self._pages.close()


class _Pages:
    """Which pages of this process are copies of its own, although their memory is a file's.

    Where the system does not let us look (some sandboxes have no page map), all of them may be.
    """

    def __init__(self, path: str = "/proc/self/pagemap") -> None:
        try:
            self._pagemap = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            self._pagemap = -1
        else:
            self._finalize = weakref.finalize(self, os.close, self._pagemap)
        self._regions = np.empty((_REGIONS, 3), np.uint64)
        self._can_scan = True

    def written(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Address ranges of such pages in [start, stop), whole pages."""
        if self._pagemap < 0:
            return [(start, stop)]
        if self._can_scan:
            try:
                return self._scan(start, stop)
            except OSError:
                self._can_scan = False  # a kernel before 6.7
        return self._read(start, stop)

    def _scan(self, start: int, stop: int) -> list[tuple[int, int]]:
        found: list[tuple[int, int]] = []
        vector, wanted = self._regions.ctypes.data, _IS_PRESENT | _IS_SWAPPED
        while start < stop:
            question = bytearray(
                _SCAN.pack(
                    96, 0, start, stop, 0, vector, _REGIONS, 0, _IS_FILE, _IS_FILE, wanted, _IS_FILE | wanted
                )
            )
            count = fcntl.ioctl(self._pagemap, _SCAN_REQUEST, question)
            found += [(begin, end) for begin, end, _ in self._regions[:count].tolist()]
            start = _SCAN.unpack(question)[4]
        return found

    def _read(self, start: int, stop: int) -> list[tuple[int, int]]:
        raw = os.pread(self._pagemap, (stop - start) // _PAGE * 8, start // _PAGE * 8)
        # Bits 61, 62, 63: the page is a file's, swapped, present. Ours are here and no file's.
        flags = np.frombuffer(raw, np.uint64) >> np.uint64(61)
        own = np.flatnonzero((flags > 1) & (flags & np.uint64(1) == 0))
        return [(start + page * _PAGE, start + (page + 1) * _PAGE) for page in own.tolist()]

    def close(self) -> None:
        """Close the page map."""
        if self._pagemap >= 0:
            self._pagemap = -1
            self._finalize()
