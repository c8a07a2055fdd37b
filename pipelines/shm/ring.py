"""The memory in which samples lie: columns in an anonymous file, shared by all who hold its descriptor.

One column per field, [capacity, ...], each at the start of a page. The memory is a memfd: it has no name,
so nothing is left behind when its processes die, however they die. Its size is sealed (`fcntl(2)`).

Writers map it shared. A reader has a descriptor that cannot be written to, and maps it *private*: it sees what
the writers write, and a page that the reader itself writes to becomes a copy of its own, which nobody else sees.
Such pages have to be given back before the writer's next lap, or the reader would see its own stale copy:
`PrivateMemory.restore` asks the kernel which pages are no longer the file's and drops just those.

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

from pipelines.prepare.fields import INDEX, OK, Columns, Field
from pipelines.shm.limits import available_bytes
from pipelines.shm.private_mapping import PAGE, OwnPages, PrivateMapping

if TYPE_CHECKING:
    import torch

ALIGNMENT = 64
_SMALL = 4096  # bytes that are copied faster than their pages are looked up


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
            offset += self.column_bytes(name)
        self.nbytes = max(offset, PAGE)

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
    """Bytes of one sample in a ring."""
    return sum(Layout(fields, 1).row_bytes.values())


def create(layout: Layout, name: str) -> int:
    """New memory for a layout; returns its descriptor.

    Raises:
        MemoryError: this process cannot have that much memory (`pipelines.shm.limits`).
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
        # Who maps memory that somebody has made smaller dies of SIGBUS where the memory was.
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        os.fchmod(fd, stat.S_IRUSR)  # who has it to read does not open it again to write
    except BaseException:
        os.close(fd)
        raise
    return fd


def read_only(fd: int) -> int:
    """Another descriptor of a memory: whoever has it can map it privately, and not write to it."""
    return os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)


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
    """Columns for a reader, who may write into what it was given without anybody else seeing it.

    Attributes:
        columns: name -> [capacity, ...], or twice that where a column is mapped twice.

    Args:
        wraps: map columns of whole pages twice in a row, so that rows that go on past the last one with the
            first are contiguous, too. Where there are not addresses enough for that, they are mapped once.
    """

    def __init__(self, fd: int, layout: Layout, *, wraps: bool = False) -> None:
        self.layout = layout
        self.columns: Columns = {}
        self._starts: dict[str, int] = {}
        self._tensors: list[tuple[str, int, int, torch.Tensor]] = []
        try:
            self._map(fd, twice=wraps)
        except OSError:
            if not wraps:
                raise
            self._map(fd, twice=False)
        self._ok = memoryview(self.columns[OK])  # type: ignore[arg-type]  # numpy says so from 3.12 on
        self._pages = OwnPages()

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
        self._drop, memory = mapping.drop, np.asarray(mapping)
        self._bytes, self._address = memory, mapping.address
        for name, place, rows in places:
            shape, dtype = self.layout.fields[name]
            flat = memory[place : place + rows * self.layout.row_bytes[name]].view(dtype)
            self.columns[name] = flat.reshape(rows, *shape)
            self._starts[name] = mapping.address + place

    def prepared(self, first: int, last: int) -> bytes:
        """For each slot of [first, last): 1 where there is a sample, 0 where it could not be prepared."""
        end = self.layout.capacity
        if last <= end:
            return bytes(self._ok[first:last])
        return bytes(self._ok[first:end]) + bytes(self._ok[: last - end])

    def batch(self, first: int, last: int, *, copy: bool = False) -> tuple[dict[str, torch.Tensor], list[str]]:
        """The slots [first, last) as a tensor for each field, and the names of those that are views.

        `last` may go past the capacity: on with slot 0. Views are to be given to `restore`. What is small is
        copied, and so is what is not contiguous or would not start on 64 bytes: kernels give other bits there.
        """
        import torch

        if not self._tensors:
            self._tensors = [
                (name, self.layout.row_bytes[name], len(column), torch.from_numpy(column))
                for name, column in sorted(self.columns.items())
                if name != OK
            ]
        rows = last - first
        tensors, views = {}, []
        for name, row, end, column in self._tensors:
            if last > end:
                tensors[name] = _joined(column, first, last)
            elif copy or rows * row <= _SMALL or first * row % ALIGNMENT:
                tensors[name] = torch.narrow_copy(column, 0, first, rows)
            else:
                # Of the ways to a view the one that does least: what is not in the cache costs most here.
                tensors[name] = torch.from_numpy(self.columns[name][first:last])
                views.append(name)
        return tensors, views

    def restore(self, first: int, last: int, names: Iterable[str] | None = None) -> int:
        """Give back the reader's own copies of pages under the slots [first, last); returns how many.

        Args:
            names: fields to look at; None for all.
        """
        dropped = 0
        for name in self.layout.row_bytes if names is None else names:
            row, begin = self.layout.row_bytes[name], self._starts[name]
            start, stop = begin + first * row, begin + last * row
            for own, end in self._pages.within(start - start % PAGE, stop + -stop % PAGE):
                self._drop(own, end)
                dropped += (end - own) // PAGE
        return dropped

    def keep(self, first: int, last: int, names: Iterable[str]) -> None:
        """Make the pages under these fields' slots [first, last) the reader's own: no writer changes them then.

        They are to be as they are until this returns.
        """
        for name in names:
            row, begin = self.layout.row_bytes[name], self._starts[name] - self._address
            start, stop = begin + first * row, begin + last * row
            one_of_each_page = self._bytes[start - start % PAGE : stop : PAGE]
            one_of_each_page[...] = one_of_each_page.copy()  # numpy leaves out what is assigned to itself

    def close(self) -> None:
        """Let go of the descriptor; the mapping lives as long as an array of it does."""
        self._pages.close()


def _joined(column: torch.Tensor, first: int, last: int) -> torch.Tensor:
    import torch

    return torch.cat([column[first:], column[: last - len(column)]])
