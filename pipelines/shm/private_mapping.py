"""Maps a file privately: no other process sees what this process writes into the mapping.

A private mapping (MAP_PRIVATE of mmap(2)) shows the file, and what others write to it, page by page, until this
process writes to a page: the page then becomes a private copy. `PrivateMapping` maps parts of a file one after the
other, the same part twice if requested, and `PrivatePages` finds the pages that have become private copies
(pagemap of proc(5): the PAGEMAP_SCAN request of Linux 6.7, or else bit 61 of each entry).
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import mmap
import os
import resource
import struct
import threading
import weakref
from collections.abc import Iterable
from typing import Any

import numpy as np

PAGE = mmap.PAGESIZE

# asm-generic/mman.h, which the mmap module does not name.
_PROT_NONE, _MAP_FIXED, _MAP_NORESERVE = 0, 0x10, 0x4000
_FAILED = ctypes.c_void_p(-1).value

# linux/fs.h: struct pm_scan_arg, struct page_region, and the categories of a page.
_SCAN_REQUEST = (3 << 30) | (96 << 16) | (ord("f") << 8) | 16
_SCAN, _WALK_END = struct.Struct("<12Q"), struct.Struct("<Q")
_IS_FILE, _IS_PRESENT, _IS_SWAPPED = 1 << 2, 1 << 3, 1 << 4
_OURS = _IS_PRESENT | _IS_SWAPPED
_REGIONS = 64


class PrivateMapping:
    """Parts of a file, one after the other in a new stretch of addresses.

    It has an array interface of bytes: arrays over it keep it alive, and it is unmapped with the last of them.

    Args:
        fd: the file; may be closed afterwards.
        parts: (offset, length) of each part in the file, in bytes; whole pages.

    Attributes:
        address: of the first byte.
        nbytes: of all parts together.

    Raises:
        OSError: the address space has no room for them.
    """

    def __init__(self, fd: int, parts: Iterable[tuple[int, int]]) -> None:
        placed = [(offset, length) for offset, length in parts if length]
        self.nbytes = sum(length for _, length in placed)
        # Reserve the whole address range first, so that no other mapping can be in it.
        aside = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        self.address = map_memory(None, self.nbytes, _PROT_NONE, aside, -1, 0)
        unmap = unmap_at_end(self, self.address, self.nbytes, _raise_data_limit(self.nbytes))
        here = self.address
        for offset, length in placed:
            over = mmap.MAP_PRIVATE | _MAP_NORESERVE | _MAP_FIXED
            try:
                map_memory(here, length, mmap.PROT_READ | mmap.PROT_WRITE, over, fd, offset)
            except OSError:
                unmap()
                raise
            here += length

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return {"version": 3, "shape": (self.nbytes,), "typestr": "|u1", "data": (self.address, False)}

    def discard(self, start: int, stop: int) -> None:
        """Show the file again at the addresses [start, stop), whole pages."""
        if _libc().madvise(start, stop - start, mmap.MADV_DONTNEED):
            raise OSError(ctypes.get_errno(), "madvise: " + os.strerror(ctypes.get_errno()))


_limit_lock = threading.RLock()  # a finalizer may run inside it


def _raise_data_limit(nbytes: int) -> int:
    """Let this process map so many bytes more; returns by how many its limit was changed.

    Where a process is held to an amount of memory (RLIMIT_DATA of setrlimit(2)) the kernel counts private mappings
    of a file by their size, as if each page were a copy. They are not memory of the process: the limit makes way.
    """
    with _limit_lock:
        soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
        if soft == resource.RLIM_INFINITY:
            return 0
        raised = soft + nbytes if hard == resource.RLIM_INFINITY else min(soft + nbytes, hard)
        resource.setrlimit(resource.RLIMIT_DATA, (max(0, raised), hard))
        return raised - soft


def _unmap(address: int, nbytes: int, raised: int) -> None:
    _libc().munmap(address, nbytes)
    if raised:
        _raise_data_limit(-raised)


@functools.cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    size, number = ctypes.c_size_t, ctypes.c_int
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, size, number, number, number, ctypes.c_int64]
    libc.munmap.argtypes = [ctypes.c_void_p, size]
    libc.madvise.argtypes = [ctypes.c_void_p, size, number]
    return libc


def unmap_at_end(
    owner: object, address: int, nbytes: int, raised: int = 0
) -> weakref.finalize[[int, int, int], object]:
    """Unmap memory with the last reference to `owner`, and take back by how much the limit was raised for it."""
    unmap = weakref.finalize(owner, _unmap, address, nbytes, raised)
    unmap.atexit = False  # a thread may still read then
    return unmap


def map_memory(address: int | None, length: int, protection: int, flags: int, fd: int, offset: int) -> int:
    """mmap(2); raises `OSError`."""
    address_found: int | None = _libc().mmap(address, length, protection, flags, fd, offset)
    if address_found is None or address_found == _FAILED:
        raise OSError(ctypes.get_errno(), "mmap: " + os.strerror(ctypes.get_errno()))
    return address_found


class PrivatePages:
    """Finds the pages of a private file mapping that have become private copies.

    If the system has no page map (some sandboxes), every page counts as one.
    """

    def __init__(self, path: str = "/proc/self/pagemap") -> None:
        self._path = path
        self._open_pagemap()
        self._regions = np.empty((_REGIONS, 3), np.uint64)
        self._vector = self._regions.ctypes.data
        self._lock = threading.Lock()  # for `_regions`
        self._can_scan = True

    def _open_pagemap(self) -> None:
        self._pid = os.getpid()
        try:
            self._pagemap = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            self._pagemap = -1
        else:
            self._finalize = weakref.finalize(self, os.close, self._pagemap)

    def find(self, start: int, stop: int) -> list[tuple[int, int]]:
        if self._pid != os.getpid():  # forked since: the open page map is the parent's
            self.close()
            self._open_pagemap()
        if self._pagemap < 0:
            return [(start, stop)]
        if self._can_scan:
            try:
                return self._find_by_scan(start, stop)
            except OSError:
                self._can_scan = False  # a kernel before 6.7
        return self._find_by_entries(start, stop)

    def _find_by_scan(self, start: int, stop: int) -> list[tuple[int, int]]:
        ranges: list[tuple[int, int]] = []
        while start < stop:
            # Pages that are not the file's, and are here or swapped out: their ranges.
            question = bytearray(
                _SCAN.pack(96, 0, start, stop, 0, self._vector, _REGIONS, 0, _IS_FILE, _IS_FILE, _OURS, _OURS)
            )
            with self._lock:
                count = fcntl.ioctl(self._pagemap, _SCAN_REQUEST, question)
                if count:
                    ranges += [(begin, end) for begin, end, _ in self._regions[:count].tolist()]
            (start,) = _WALK_END.unpack_from(question, 32)  # before `stop` where the answer was full
        return ranges

    def _find_by_entries(self, start: int, stop: int) -> list[tuple[int, int]]:
        raw = os.pread(self._pagemap, (stop - start) // PAGE * 8, start // PAGE * 8)
        # Bits 61, 62, 63: the page is a file's, swapped, present. Ours are here and no file's.
        flags = np.frombuffer(raw, np.uint64) >> np.uint64(61)
        own = np.flatnonzero((flags > 1) & (flags & np.uint64(1) == 0))
        return [(start + page * PAGE, start + (page + 1) * PAGE) for page in own.tolist()]

    def close(self) -> None:
        """Close the page map."""
        if self._pagemap >= 0:
            self._pagemap = -1
            self._finalize()
