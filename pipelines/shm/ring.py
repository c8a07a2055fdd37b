"""Stores samples as columns in anonymous shared memory.

One column per field, [capacity, ...], each at the start of a page. The memory is a memfd: it has no name, so
nothing is left when its processes die. Its size is sealed (`fcntl(2)`).

Writers map it shared. A reader has a read-only descriptor and maps it *private*: it sees what the writers write,
and a page to which the reader itself writes becomes a private copy. Such copies have to be dropped before the
writers reuse the slots, or the reader would see stale data: `RingView.restore` asks the kernel which pages are no
longer the file's and drops just those.

A batch may begin at the ring's end and go on at its start. A column of whole pages is mapped twice in a row
by a reader of the ring, so that such a batch is one piece, a view like any other.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import stat
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from pipelines.environment.machine_limits import available_bytes
from pipelines.samples.fields import INDEX, OK, Columns, Field
from pipelines.shm.private_mapping import PAGE, PrivateMapping, PrivatePages

if TYPE_CHECKING:
    import torch

ALIGNMENT = 64
_MAX_COPIED_BYTES = 4096  # bytes that are copied faster than their pages are looked up


class Layout:
    """The offset of each column: a pure function of the fields and the capacity.

    Attributes:
        fields: name -> field, `index` and `_ok` included.
        offsets: name -> first byte, a multiple of the page size.
        words_offset: of the page after the columns (`pipelines.shm.words`).
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
            offset += self.column_bytes(name)
        self.words_offset = offset
        self.nbytes = offset + PAGE

    def column_bytes(self, name: str) -> int:
        """Bytes from a column's start to the next one's: whole pages."""
        return -(-self.row_bytes[name] * self.capacity // PAGE) * PAGE

    def columns(self, memory: Any) -> Columns:
        """The columns as arrays over a mapping of the memory."""
        columns = {}
        for name, (shape, dtype) in self.fields.items():
            count = int(np.prod(shape, dtype=np.int64)) * self.capacity
            flat: npt.NDArray[Any] = np.frombuffer(memory, dtype, count=count, offset=self.offsets[name])
            columns[name] = flat.reshape(self.capacity, *shape)
        return columns


def sample_bytes(fields: dict[str, Field]) -> int:
    return sum(Layout(fields, 1).row_bytes.values())


def create(layout: Layout, name: str) -> int:
    """Create memory for a layout; returns its descriptor.

    Raises:
        MemoryError: this process cannot have that much memory (`pipelines.environment.machine_limits`).
    """
    free = available_bytes()
    if layout.nbytes > free:
        raise MemoryError(
            f"{name} needs {layout.nbytes / 2**20:.0f} MiB of memory for {layout.capacity} samples, "
            f"{free / 2**20:.0f} MiB are free"
        )
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, layout.nbytes)
        # A process that reads mapped memory which was truncated dies of SIGBUS.
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        os.fchmod(fd, stat.S_IRUSR)  # a reader cannot reopen it for writing
    except BaseException:
        os.close(fd)
        raise
    return fd


def reopen_read_only(fd: int) -> int:
    """A read-only descriptor of the same memory, which can be mapped privately."""
    return os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)


def map_writable(fd: int, layout: Layout) -> Columns:
    return layout.columns(mmap.mmap(fd, layout.nbytes, flags=mmap.MAP_SHARED))


def copy_slots(source: int, target: int, layout: Layout, start: int, stop: int) -> None:
    while start < stop:
        slot = start % layout.capacity
        count = min(stop - start, layout.capacity - slot)
        for name, row in layout.row_bytes.items():
            at, remaining = layout.offsets[name] + slot * row, count * row
            while remaining:
                copied = os.copy_file_range(source, target, remaining, at, at)
                at, remaining = at + copied, remaining - copied
        start += count


class RingView:
    """Columns for a reader, whose own writes nobody else sees.

    Attributes:
        columns: name -> [capacity, ...], or twice that where a column is mapped twice.

    Args:
        fd: descriptor of the memory.
        wraps: map columns of whole pages twice in a row, so that rows which wrap around the end are contiguous. If
            the address space does not suffice they are mapped once.
    """

    def __init__(self, fd: int, layout: Layout, *, wraps: bool = False) -> None:
        self.layout = layout
        self.columns: Columns = {}
        self._starts: dict[str, int] = {}
        self._tensor_columns: list[tuple[str, int, int, torch.Tensor]] = []
        try:
            self._map(fd, twice=wraps)
        except OSError:
            if not wraps:
                raise
            self._map(fd, twice=False)
        self._ok = memoryview(self.columns[OK])  # type: ignore[arg-type]  # numpy says so from 3.12 on
        self._pages = PrivatePages()

    def _map(self, fd: int, *, twice: bool) -> None:
        parts, places = [], []
        end = 0
        for name, offset in self.layout.offsets.items():
            size = self.layout.column_bytes(name)
            laps = 2 if twice and size == self.layout.row_bytes[name] * self.layout.capacity else 1
            parts += [(offset, size)] * laps
            places.append((name, end, laps * self.layout.capacity))
            end += laps * size
        mapping = PrivateMapping(fd, parts)
        self._discard, memory = mapping.discard, np.asarray(mapping)
        self._bytes, self._address = memory, mapping.address
        for name, place, rows in places:
            shape, dtype = self.layout.fields[name]
            flat = memory[place : place + rows * self.layout.row_bytes[name]].view(dtype)
            self.columns[name] = flat.reshape(rows, *shape)
            self._starts[name] = mapping.address + place

    def read_status(self, first: int, last: int) -> bytes:
        """The status byte of each slot in [first, last): 1 for a sample, 0 for one that could not be prepared."""
        end = self.layout.capacity
        if last <= end:
            return bytes(self._ok[first:last])
        return bytes(self._ok[first:end]) + bytes(self._ok[: last - end])

    def read_batch(
        self, first: int, last: int, *, copy: bool = False
    ) -> tuple[dict[str, torch.Tensor], list[str]]:
        """Read the slots [first, last); slots past the capacity continue at slot 0.

        Small fields are copied, as are those that are not contiguous or not aligned to 64 bytes, for which kernels
        may compute other bits.

        Returns:
            Name -> tensor, and the names of those that are views, to be passed to `restore`.
        """
        import torch

        if not self._tensor_columns:
            self._tensor_columns = [
                (name, self.layout.row_bytes[name], len(column), torch.from_numpy(column))
                for name, column in sorted(self.columns.items())
                if name != OK
            ]
        rows = last - first
        tensors, views = {}, []
        for name, row, end, column in self._tensor_columns:
            if last > end:
                tensors[name] = torch.cat([column[first:], column[: last - end]])
            elif copy or rows * row <= _MAX_COPIED_BYTES or first * row % ALIGNMENT:
                tensors[name] = torch.narrow_copy(column, 0, first, rows)
            else:
                # The cheapest way to make a view: code that is not in the cache dominates the cost.
                tensors[name] = torch.from_numpy(self.columns[name][first:last])
                views.append(name)
        return tensors, views

    def restore(self, first: int, last: int, names: Iterable[str] | None = None) -> int:
        """Drop the reader's private copies of pages in the slots [first, last); returns how many.

        Args:
            names: fields to look at; None for all.
        """
        dropped = 0
        for name in self.layout.row_bytes if names is None else names:
            row, begin = self.layout.row_bytes[name], self._starts[name]
            start, stop = begin + first * row, begin + last * row
            for own, end in self._pages.find(start - start % PAGE, stop + -stop % PAGE):
                self._discard(own, end)
                dropped += (end - own) // PAGE
        return dropped

    def copy_pages(self, first: int, last: int, names: Iterable[str]) -> None:
        """Make the pages of these fields' slots [first, last) private copies, which no writer changes.

        No writer may change them before this returns.
        """
        for name in names:
            row, begin = self.layout.row_bytes[name], self._starts[name] - self._address
            start, stop = begin + first * row, begin + last * row
            one_of_each_page = self._bytes[start - start % PAGE : stop : PAGE]
            one_of_each_page[...] = one_of_each_page.copy()  # numpy leaves out what is assigned to itself

    def close(self) -> None:
        """Close the page map; the memory stays mapped while an array refers to it."""
        self._pages.close()
