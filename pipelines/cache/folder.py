"""The folder of the caches on disk: which caches it has, which are in use, and which are removed to make room.

    FOLDER/lock-UID        locked by a process of this user while it counts bytes, reserves them or removes a cache
    FOLDER/KEY/used        locked, shared, by each feeder of the cache; its time of change is the cache's last use
    FOLDER/KEY/samples     the cache (`pipelines.cache.file`), whose header repeats the key
    FOLDER/KEY/new-*       a cache that is being created

The locks are those of flock(2): they end with the process, however it ends. A cache is removed under the
exclusive lock of its `used`, and `samples` first, so that after a kill it is either whole or gone. Times of access
are not used: most file systems do not record them (noatime, relatime).
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pipelines.cache import file
from pipelines.errors import PipelineError

#: The limit of all caches of a folder, such as 200G, where `cache_dir_bytes=` does not give one.
LIMIT = "ENSEMBLE_CACHE_DIR_BYTES"
_KEY = re.compile(r"[0-9a-f]{32}")
_SIZE = re.compile(r"(\d+)\s*([KMGT]?)(?:i?B)?", re.IGNORECASE)
_OPEN = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW


@dataclass(frozen=True)
class DiskCache:
    """One cache of a folder.

    Attributes:
        path: of its directory.
        size_bytes: of its files; of one in use with the bytes that are reserved for more samples.
        last_use: when a feeder last opened or closed it, in seconds since 1970.
        in_use: whether a living process has it open.
    """

    path: str
    size_bytes: int
    last_use: float
    in_use: bool


class CacheFolder:
    """The caches of this user in a folder, and the limit of the size of all of them.

    Args:
        path: of the folder.
        limit: in bytes. None takes the environment variable `ENSEMBLE_CACHE_DIR_BYTES`, or else half of the bytes
            that are free or are used by the caches.

    Attributes:
        path, limit: as given, or found.

    Raises:
        PipelineError: the environment variable is not a size.
    """

    def __init__(self, path: str, limit: int | None = None) -> None:
        self.path = path
        if limit is None and (given := os.environ.get(LIMIT)):
            limit = parse_size(given)
            if limit is None:
                raise PipelineError(f"{LIMIT} must be a size, such as 50G or 512MiB, got {given!r}")
        if limit is None:
            disk = os.statvfs(path)
            limit = (disk.f_bavail * disk.f_frsize + sum(each.size_bytes for each in self.list_caches())) // 2
        self.limit = limit

    def list_caches(self) -> list[DiskCache]:
        """Returns the caches, the least recently used first; what is not certainly one is not in the list."""
        found = (_inspect(os.path.join(self.path, name)) for name in os.listdir(self.path) if _KEY.fullmatch(name))
        return sorted((each for each in found if each is not None), key=lambda each: (each.last_use, each.path))

    @contextlib.contextmanager
    def lock(self) -> Iterator[bool]:
        """Locks the folder against whoever else reserves or removes; yields whether it is locked.

        Raises:
            OSError: the file of the lock cannot be created or locked.
        """
        fd = os.open(os.path.join(self.path, f"lock-{os.geteuid()}"), _OPEN | os.O_CREAT, 0o600)
        try:
            yield _flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        finally:
            os.close(fd)

    def grant(self, size: int, extent: int, uncounted: int) -> int:
        """Grants bytes to a cache that grows, and removes other caches where that is needed. Call it under `lock`.

        Args:
            size: the least number of bytes that is of use.
            extent: the number of bytes that is wanted.
            uncounted: bytes of a growing cache that is not in the folder, because its file has no name.

        Returns:
            A number from `size` to `extent`; 0 where caches in use leave no room, and nothing was removed then.
        """
        caches = self.list_caches()
        free = self.limit - uncounted - sum(each.size_bytes for each in caches)
        if free + sum(each.size_bytes for each in caches if not each.in_use) < size:
            return 0
        for each in caches:
            if free < extent and _remove(each):
                free += each.size_bytes
        return min(extent, free) if free >= size else 0

    def remove_oldest(self) -> bool:
        """Removes the least recently used cache that is not in use; returns False where there is none."""
        with self.lock() as is_locked:
            return is_locked and any(_remove(each) for each in self.list_caches())


def parse_size(text: str) -> int | None:
    """Bytes of a text such as 4096, 64KiB, 16M or 2T; None if it is not a positive size."""
    found = _SIZE.fullmatch(text.strip())
    return int(found[1]) * 1024 ** " KMGT".index(found[2].upper() or " ") or None if found else None


def open_directory(own: str) -> int:
    """Creates the directory of a cache where it is missing, and marks it as used now.

    Returns:
        A descriptor: the cache is in use, and is not removed, until its last copy is closed.

    Raises:
        PipelineError: the directory belongs to somebody else.
        OSError: it cannot be created, or its file system has no locks.
    """
    while True:
        with contextlib.suppress(FileExistsError):
            os.mkdir(own, 0o700)
        try:
            if not _is_own(os.lstat(own), stat.S_ISDIR):
                raise PipelineError(f"{own} is not a directory of yours alone (mode 0700); remove it")
            used = os.open(os.path.join(own, "used"), _OPEN | os.O_CREAT, 0o600)
        except FileNotFoundError:  # another process removes the cache at this moment
            continue
        try:
            _flock(used, fcntl.LOCK_SH)
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(used), os.lstat(os.path.join(own, "used"))):
                    os.utime(used)
                    return used
        except BaseException:
            os.close(used)
            raise
        os.close(used)  # it was removed before the lock was there


def _flock(fd: int, how: int) -> bool:
    """Locks a file; returns False if another process has the lock."""
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


class _NotOursError(Exception):
    """A directory holds something that no cache has."""


def _inspect(own: str) -> DiskCache | None:
    """What a directory with the name of a cache holds; None if it is not certainly a cache of this user."""
    try:
        size, reserved, last_use = _measure(own)
        with _lock_unused(own) as is_unused:
            return DiskCache(own, size if is_unused else max(size, reserved), last_use, not is_unused)
    except (OSError, _NotOursError):  # the first where it is removed at this moment
        return None


def _measure(own: str) -> tuple[int, int, float]:
    """Bytes, bytes with those that writers have reserved, and last use of a cache, or of what a kill has left.

    Raises:
        _NotOursError: something in the directory is not certainly of a cache.
    """
    status = os.lstat(own)
    if not _is_own(status, stat.S_ISDIR):
        raise _NotOursError
    size, reserved, changed = 0, 0, {"": status.st_mtime}
    for name in os.listdir(own):
        status = os.lstat(os.path.join(own, name))
        changed[name] = status.st_mtime
        is_part = name in ("used", "samples") or name.startswith("new-")
        if not is_part or not _is_own(status, stat.S_ISREG) or (name == "used" and status.st_size):
            raise _NotOursError
        if name == "samples" or status.st_size:  # a new one may lack even the header, after a kill
            fd = os.open(os.path.join(own, name), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                found, end = file.read_header(fd), file.count_used_bytes(fd)
            finally:
                os.close(fd)
            if found.get("key") != os.path.basename(own):
                raise _NotOursError
            size += status.st_size
            # What is reserved ends at most some extents behind the end of the file: a larger number is damage.
            reserved += end if end < status.st_size + 2**32 else 0
    return size, reserved, changed.get("used", changed.get("samples", changed[""]))


@contextlib.contextmanager
def _lock_unused(own: str) -> Iterator[bool]:
    """Locks a cache against use; yields False where a living process uses it."""
    try:
        used = os.open(os.path.join(own, "used"), _OPEN)
    except FileNotFoundError:  # a process was killed before it made one, or removes it
        yield True
        return
    try:
        yield _flock(used, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        os.close(used)


def _remove(cache: DiskCache) -> bool:
    """Removes a cache unless it is in use, or was used since it was listed; returns whether it is gone."""
    with contextlib.suppress(OSError, _NotOursError), _lock_unused(cache.path) as is_unused:
        if is_unused and _measure(cache.path)[2] == cache.last_use:
            # `samples` first, `used` last: what a kill leaves is no whole cache, and is recognized.
            for name in sorted(os.listdir(cache.path), key=lambda name: (name != "samples", name == "used")):
                os.unlink(os.path.join(cache.path, name))
            os.rmdir(cache.path)
            return True
    return False
