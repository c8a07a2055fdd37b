"""Words of shared memory between a feeder and its consumers, in place of a message for each batch.

A ring's memory ends with a page that only the feeder writes: the positions up to which samples are ready, and up
to which they can be prepared before consumers release more. Each consumer has a page of its own, which only it
writes and the feeder reads: what it has released, what it waits for, and since when. A word is aligned, so it is
stored and loaded whole; there is no lock, and whoever is killed leaves nothing that another waits for.

Consumers wait for the feeder's eventfd, which it writes after `READY` and nobody reads. Each registers it with an
epoll instance of its own, edge-triggered (EPOLLET of epoll(7)): a write between a look at `READY` and the wait is
kept there, so no wake-up is lost.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from typing import Any

import numpy as np

from pipelines.shm.private_mapping import PAGE, map_memory, unmap_at_end
from pipelines.shm.ring import Layout

READY, LIMIT = range(2)  # a ring's words: positions
# A consumer's words: positions, and a moment of the monotonic clock in nanoseconds.
RELEASED, WANT, SINCE = range(3)


class _Mapping:
    """A page of a file, mapped shared; without a copy of its descriptor, which `mmap.mmap` would keep open."""

    def __init__(self, fd: int, offset: int, protection: int) -> None:
        address = map_memory(None, PAGE, protection, mmap.MAP_SHARED, fd, offset)
        unmap_at_end(self, address, PAGE)
        is_read_only = not protection & mmap.PROT_WRITE
        self.__array_interface__: dict[str, Any] = {
            "version": 3,
            "shape": (PAGE // 8,),
            "typestr": "=i8",
            "data": (address, is_read_only),
        }


def map_words(fd: int, *, offset: int = 0, writable: bool) -> memoryview:
    """The words of a page, as integers; mapped as long as they are referred to.

    Raises:
        OSError: the page cannot be mapped.
    """
    protection = mmap.PROT_READ | mmap.PROT_WRITE * writable
    return memoryview(np.asarray(_Mapping(fd, offset, protection)))  # type: ignore[arg-type]


def map_ring_words(fd: int, layout: Layout, *, writable: bool) -> memoryview:
    return map_words(fd, offset=layout.words_offset, writable=writable)


def create_words() -> tuple[int, memoryview]:
    """A descriptor of new words, for the consumer that is to write them, and the words to be read here.

    Raises:
        OSError: this process has no descriptor left.
    """
    fd = os.memfd_create("words", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, PAGE)
        # A process that reads mapped memory which was truncated dies of SIGBUS.
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        return fd, map_words(fd, writable=False)
    except BaseException:
        os.close(fd)
        raise
