"""Objects handed from a parent to the child processes it starts, through anonymous memory.

The child inherits a file descriptor; large arrays inside the object are mapped by every child, not copied
(pickle protocol 5, out-of-band buffers), until the child writes into one. This is the one place of the package
that unpickles, and it reads from a memory file that this process's own parent made, never from a socket or a
path.
"""

from __future__ import annotations

import mmap
import os
import pickle
import struct
from typing import Any

import cloudpickle

_ALIGN = 64


def dump(value: Any) -> int:
    """Write `value` to a new memory file and return its descriptor, which the caller closes."""
    buffers: list[pickle.PickleBuffer] = []
    body = cloudpickle.dumps(value, protocol=5, buffer_callback=buffers.append)
    parts = [memoryview(body), *(buffer.raw() for buffer in buffers)]
    header = struct.pack(f"<Q{len(parts)}Q", len(parts), *(part.nbytes for part in parts))
    fd = os.memfd_create("payload", os.MFD_CLOEXEC)
    offset = 0
    for part in (memoryview(header), *parts):
        written = 0
        while written < part.nbytes:
            written += os.pwrite(fd, part[written:], offset + written)
        offset = _aligned(offset + part.nbytes)
    os.ftruncate(fd, max(offset, 1))
    return fd


def load(fd: int) -> Any:
    """The object in the memory file `fd`; its large arrays are views of it, copied where written to."""
    memory = memoryview(mmap.mmap(fd, os.fstat(fd).st_size, flags=mmap.MAP_PRIVATE))
    (count,) = struct.unpack_from("<Q", memory)
    sizes = struct.unpack_from(f"<{count}Q", memory, 8)
    parts = []
    offset = _aligned(8 + 8 * count)
    for size in sizes:
        parts.append(memory[offset : offset + size])
        offset = _aligned(offset + size)
    return pickle.loads(parts[0], buffers=parts[1:])


def _aligned(offset: int) -> int:
    return -(-offset // _ALIGN) * _ALIGN
