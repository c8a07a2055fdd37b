"""The folder of the caches on disk: opening a cache, and removing others to make room.

    FOLDER/lock-UID        locked by a process of this user while it opens or removes caches
    FOLDER/KEY/samples     the cache (`pipelines.cache.file`): its header repeats the key; its feeders lock it
    FOLDER/KEY/new-*       a cache that is being created

The locks are those of flock(2): they end with the process, however it ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import stat
import tempfile
from collections.abc import Iterator
from typing import Any, NamedTuple

from pipelines.cache import file
from pipelines.errors import PipelineError

_KEY = re.compile(r"[0-9a-f]{32}")
_PART = re.compile(r"samples|new-.*|used")  # the last of an earlier version
_OPEN = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW


class DiskCache(NamedTuple):
    """One cache of a folder."""

    path: str  # of its directory
    size_bytes: int  # of its files
    last_use: float  # when a feeder last opened, wrote to or closed it, in seconds since 1970
    in_use: bool  # whether a living process has it open


class CacheFolder:
    """The caches of this user in a folder, and the limit of the size of all of them.

    Args:
        limit: in bytes; None for half of the bytes that are free or are used by the caches.
    """

    def __init__(self, path: str, limit: int | None = None) -> None:
        self.path = path
        if limit is None:
            disk = os.statvfs(path)
            limit = (disk.f_bavail * disk.f_frsize + sum(cache.size_bytes for cache in self.list_caches())) // 2
        self.limit = limit

    def list_caches(self) -> list[DiskCache]:
        """The caches, the least recently used first; what is not certainly one is not in the list."""
        names = filter(_KEY.fullmatch, os.listdir(self.path))
        caches = [cache for name in names if (cache := _inspect(os.path.join(self.path, name))) is not None]
        return sorted(caches, key=lambda cache: (cache.last_use, cache.path))

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Wait until no other process of this user opens or removes caches."""
        fd = os.open(os.path.join(self.path, f"lock-{os.geteuid()}"), _OPEN | os.O_CREAT, 0o600)
        try:
            _flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            os.close(fd)

    def open(self, key: str, n: int, scheme: int, *, is_new: bool, **about: Any) -> tuple[int, bool]:
        """Open the cache of a key for n samples, which is in use until its last descriptor is closed.

        Args:
            scheme: of the fingerprints that the key is made of.
            is_new: whether an earlier cache is replaced; who has it open goes on with it.
            about: more items of the header.

        Returns:
            The descriptor, and whether it is an earlier cache.
        """
        own = os.path.join(self.path, key)
        with self.lock():
            with contextlib.suppress(FileExistsError):
                os.mkdir(own, 0o700)
            if not _is_own(os.lstat(own), stat.S_ISDIR):
                raise PipelineError(f"{own} is not a directory of yours alone (mode 0700); remove it")
            path = os.path.join(own, "samples")
            if not is_new and os.path.lexists(path):
                fd = os.open(path, _OPEN)
                if file.is_cache_of(fd, n, key=key, scheme=scheme):
                    _flock(fd, fcntl.LOCK_SH)
                    os.utime(fd)
                    return fd, True
                os.close(fd)
            fd, new = tempfile.mkstemp(prefix="new-", dir=own)
            try:
                _flock(fd, fcntl.LOCK_SH)
                file.initialize(fd, n, key=key, scheme=scheme, **about)
                os.rename(new, path)
            except BaseException:
                os.close(fd)
                os.unlink(new)
                raise
            return fd, False

    def make_room(self, key: str) -> int:
        """Remove unused caches, the least recently used first, until those beside one take half of the limit.

        Returns:
            The bytes that this cache may have.
        """
        with self.lock():
            others = [cache for cache in self.list_caches() if os.path.basename(cache.path) != key]
            taken = sum(cache.size_bytes for cache in others)
            for cache in others:
                if taken > self.limit // 2 and not cache.in_use and remove(cache):
                    taken -= cache.size_bytes
        return self.limit - taken


def remove(cache: DiskCache) -> bool:
    """Remove a cache unless it is in use; returns whether it is gone. Call it under the folder's lock."""
    if (current := _inspect(cache.path)) is None or current.in_use:
        return False
    with contextlib.suppress(OSError):
        # `samples` first: what a kill leaves is no whole cache, and is recognized.
        for name in sorted(os.listdir(cache.path), key=lambda name: name != "samples"):
            os.unlink(os.path.join(cache.path, name))
        os.rmdir(cache.path)
        return True
    return False


def _flock(fd: int, how: int) -> bool:
    """Lock a file; returns False if another process has the lock."""
    try:
        fcntl.flock(fd, how)
    except BlockingIOError:
        return False
    except OSError as error:
        raise OSError(error.errno, f"its file system has no locks (flock): {error.strerror}") from None
    return True


def _is_own(status: os.stat_result, is_kind: Any) -> bool:
    """Whether a file is of this kind, belongs to this user, and nobody else may use it."""
    return bool(is_kind(status.st_mode)) and status.st_uid == os.geteuid() and not status.st_mode & 0o077


def _inspect(own: str) -> DiskCache | None:
    """What a directory with the name of a cache holds; None if it is not certainly a cache of this user."""
    try:
        status = os.lstat(own)
        if not _is_own(status, stat.S_ISDIR):
            return None
        size, last_use, in_use = 0, status.st_mtime, False
        for name in os.listdir(own):
            status = os.lstat(os.path.join(own, name))
            if not _PART.fullmatch(name) or not _is_own(status, stat.S_ISREG):
                return None
            fd = os.open(os.path.join(own, name), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                # A kill may leave a new file without its header.
                is_ours = file.read_header(fd).get("key") == os.path.basename(own)
                if not is_ours and (name == "samples" or status.st_size):
                    return None
                in_use |= not _flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            finally:
                os.close(fd)
            size += status.st_size
            last_use = status.st_mtime if name == "samples" else last_use
        return DiskCache(own, size, last_use, in_use)
    except FileNotFoundError:  # it is removed at this moment
        return None
