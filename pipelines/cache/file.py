"""Caches samples as they are before their first random stage, so that later epochs do not decode them again.

The cache is one file: anonymous memory that ends with the feeder, or a file on disk that outlives it. A worker
that has prepared a sample appends its record (`pipelines.cache.codec`) to the extent of the file that the worker
has reserved, and then writes the record's offset into the index with one store of eight bytes. So a process that
dies while writing leaves nothing that others read. Any other damage fails the digest of the record when it is
read, and the sample is prepared again. When the file has reached its limit, nothing is added and nothing is
evicted: with every sample read once per epoch, no other policy has more hits (Mohan et al. 2021, "Analyzing and
Mitigating Data Stalls in DNN Training").

    [header, one page] [index: 8 bytes a sample, 0 where there is none] [records ...]
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import struct
import threading
import warnings
from typing import Any

import numpy as np
import numpy.typing as npt

from pipelines.cache import codec

VERSION = 1
_PAGE = 4096
_USED_OFFSET = 2048  # in the header: where the file's next free stretch begins
_WORD = struct.Struct("<Q")
_EXTENT = 4 * 2**20
#: The disk, or the user's share of it, is full.
FULL = (errno.ENOSPC, errno.EDQUOT)
# A lock of the file is the process's: its threads are kept apart by this one. Nobody ever waits for either.
_RESERVE_LOCK = threading.Lock()


class Cache:
    """Access of one worker to a cache file. Not thread-safe.

    Args:
        fd: the file, which the caller keeps open.
        n: samples in the source.
        stages: the number of stages that were applied to the cached samples.
        limit: bytes to which the file may grow.

    Attributes:
        hits, added, wrong: number of samples read from the cache, added to it, and that failed their digest.
        added_bytes: of those that were added.
    """

    def __init__(self, fd: int, n: int, stages: int, limit: int) -> None:
        self.stages = stages
        self.hits = self.added = self.wrong = self.added_bytes = 0
        self._flushed = (0, 0, 0, 0)
        self._fd = fd
        self._n = n
        self._limit = limit
        self._next = self._end = 0  # the stretch that this worker writes to
        self._too_large = limit  # for what was refused so far there is no room

    def get(self, index: int) -> dict[str, Any] | None:
        """Read the sample after the cache's stages, into newly allocated memory; None if it is not cached."""
        offset = _read_word(self._fd, _index_offset(index))
        if not offset:
            return None
        try:
            sample = codec.read_record(self._fd, offset, index, self._limit)
        except codec.CorruptRecord:
            self.wrong += 1
            with contextlib.suppress(OSError):
                os.pwrite(self._fd, _WORD.pack(0), _index_offset(index))
            return None
        self.hits += 1
        return sample

    def put(self, index: int, sample: Any) -> None:
        """Add a sample, if there is room and it can be encoded."""
        buffers = codec.encode(index, sample)
        if isinstance(buffers, str) or _read_word(self._fd, _index_offset(index)):  # another worker was quicker
            return
        try:
            self._write(index, buffers)
        except OSError as error:
            self._too_large = 0
            self._next = self._end
            warnings.warn(f"no more samples are added to the cache: {error}", stacklevel=3)

    def _write(self, index: int, buffers: list[Any]) -> None:
        size = sum(memoryview(buffer).nbytes for buffer in buffers)
        if not self._reserve(size):
            return
        written = os.pwritev(self._fd, buffers, self._next)
        while written < size:  # the next call says why
            remaining = b"".join(bytes(buffer) for buffer in buffers)[written:]
            written += os.pwrite(self._fd, remaining, self._next + written)
        os.pwrite(self._fd, _WORD.pack(self._next), _index_offset(index))
        self._next += size
        self.added += 1
        self.added_bytes += size

    def flush_counts(self) -> tuple[int, ...] | None:
        """`hits`, `added`, `wrong` and `added_bytes` since the last call; None where there were none."""
        counts = self.hits, self.added, self.wrong, self.added_bytes
        before, self._flushed = self._flushed, counts
        return None if counts == before else tuple(n - b for n, b in zip(counts, before, strict=True))

    def find_missing(self, indices: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Those of these indices, int64 [n], whose samples are not cached."""
        if not len(indices):
            return indices
        low, high = int(indices.min()), int(indices.max()) + 1
        if high - low > 64 * len(indices):
            return np.array([i for i in indices.tolist() if not _read_word(self._fd, _index_offset(i))], np.int64)
        absent: npt.NDArray[np.int64] = indices[read_index(self._fd, low, high)[indices - low] == 0]
        return absent

    def _reserve(self, size: int) -> bool:
        """Take an extent of the file where this worker's has no room; False where that cannot be."""
        if self._end - self._next >= size:
            return True
        if size >= self._too_large or not _RESERVE_LOCK.acquire(blocking=False):
            return False
        try:
            # A lock of the file (lockf) ends as soon as this process closes any descriptor of it.
            fcntl.lockf(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            taken = count_used_bytes(self._fd)
            start = self._next if taken == self._end else taken
            extent = min(max(size, min(_EXTENT, self._limit // 16)), self._limit - start)
            if extent >= size:
                os.pwrite(self._fd, _WORD.pack(start + extent), _USED_OFFSET)
            fcntl.lockf(self._fd, fcntl.LOCK_UN)
        except BlockingIOError:  # another worker takes an extent: the sample has its chance in the next epoch
            return False
        finally:
            _RESERVE_LOCK.release()
        if extent < size:
            self._too_large = size
            return False
        self._next, self._end = start, start + extent
        return True


def initialize(fd: int, n: int, **what: Any) -> None:
    """Write the header of an empty cache for n samples to a new file; `what` identifies its content."""
    os.pwrite(fd, _encode_header(n, what), 0)  # first: a file that has a size says what it is
    os.ftruncate(fd, records_offset(n))
    os.pwrite(fd, _WORD.pack(records_offset(n)), _USED_OFFSET)


def is_cache_of(fd: int, n: int, **what: Any) -> bool:
    """Whether a file is a cache for n samples with these items in its header."""
    header = read_header(fd)
    if any(header.get(name) != value for name, value in {"v": VERSION, "n": n, **what}.items()):
        return False
    if os.fstat(fd).st_size < records_offset(n):
        return False
    return count_used_bytes(fd) >= records_offset(n)


def read_header(fd: int) -> dict[str, Any]:
    """Read the header of a cache file; {} if the file is not a cache."""
    line, _, _ = os.pread(fd, _USED_OFFSET, 0).partition(b"\n")
    try:
        header = json.loads(line)
    except ValueError:
        return {}
    return header if isinstance(header, dict) and header.get("pipelines") == "cache" else {}


def _encode_header(n: int, what: dict[str, Any]) -> bytes:
    header = json.dumps({"pipelines": "cache", "v": VERSION, "n": n, **what}, sort_keys=True).encode() + b"\n"
    if len(header) > _USED_OFFSET:
        raise ValueError(f"the header of a cache has {len(header)} bytes, more than {_USED_OFFSET}")
    return header


def records_offset(n: int) -> int:
    """Offset of the first record in a cache for n samples, in bytes."""
    return _PAGE + -(-8 * n // _PAGE) * _PAGE


def count_used_bytes(fd: int) -> int:
    """Bytes of a cache file that are reserved."""
    return _read_word(fd, _USED_OFFSET)


def count_samples(fd: int, n: int) -> int:
    """Count the samples in the index of a cache file."""
    step = 1 << 20
    return sum(int(np.count_nonzero(read_index(fd, i, min(n, i + step)))) for i in range(0, n, step))


def read_index(fd: int, low: int, high: int) -> npt.NDArray[np.uint64]:
    """Where the records of the samples [low, high) are, 0 where there is none."""
    raw = os.pread(fd, 8 * (high - low), _index_offset(low))
    return np.frombuffer(raw.ljust(8 * (high - low), b"\0"), np.uint64)


def _read_word(fd: int, offset: int) -> int:
    word: int = _WORD.unpack(os.pread(fd, 8, offset).ljust(8, b"\0"))[0]
    return word


def _index_offset(index: int) -> int:
    return _PAGE + 8 * index
