"""The folder in which sources keep files of their own: tables made of text files, and files fetched from servers.

All processes of a user share it. It has one limit: beyond it the files that were not opened for longest are
removed. Processes that have a removed file open go on reading it.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO

from pipelines.errors import PipelineError

FOLDER, BYTES = "ENSEMBLE_SOURCES_DIR", "ENSEMBLE_SOURCES_BYTES"
_NAME = re.compile(r"[0-9a-f]{32}-[A-Za-z0-9._-]{0,60}(\.part)?")  # of a file that a source has made
_ABANDONED_S = 3600  # an unfinished file that is not written to for so long is of a process that was killed


@dataclass(frozen=True)
class SourcesFolder:
    """The folder and its limit.

    Attributes:
        path: of the folder.
        limit: bytes of all files in it.
    """

    path: str
    limit: int

    @classmethod
    def of_environment(cls) -> SourcesFolder:
        """As the environment says; else in the user's cache, with half of what is free there.

        Raises:
            PipelineError: the limit is no number, or the folder cannot be made or is not the user's alone.
        """
        cache = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
        path = os.path.abspath(os.environ.get(FOLDER) or os.path.join(cache, "ray-ensemble", "sources"))
        limit_text = os.environ.get(BYTES)
        try:
            os.makedirs(path, 0o700, exist_ok=True)
            status = os.stat(path)
            if status.st_uid != os.geteuid() or status.st_mode & 0o022:  # others could put files there
                raise PipelineError(f"{path}, where sources keep files, is not a folder that you alone write to")
            own_bytes = sum(size for _, size, _ in _list_files(path))
            limit = int(float(limit_text)) if limit_text else own_bytes // 2 + shutil.disk_usage(path).free // 2
        except (ValueError, OverflowError):
            raise PipelineError(f"{BYTES} must be a number of bytes, got {limit_text!r}") from None
        except OSError as error:
            raise PipelineError(
                f"{path}, where sources keep files, cannot be made: {error.strerror}; say with {FOLDER}= where "
                "it can be"
            ) from error
        return cls(path, limit)

    def open(self, kind: str, label: str, key: Any, size: int, make: Callable[[str], None]) -> BinaryIO:
        """Opens the file of a key, unbuffered; one process at a time makes it if it is not there.

        Args:
            kind: of the file: making one of a kind may open files of other kinds, but none of its own.
            label: the end of the file's name, for people.
            key: all that the content depends on; its `repr` is digested.
            size: of the file, or a guess, for which room is made.
            make: writes the file at a path.

        Raises:
            PipelineError: there is no room for it; and what `make` raises.
        """
        content = repr((kind, key)).encode("utf-8", "surrogateescape")
        digest = hashlib.blake2b(content, digest_size=16).hexdigest()
        path = os.path.join(self.path, f"{digest}-{re.sub('[^A-Za-z0-9._-]', '_', label)[-50:]}")
        while True:
            try:
                with self._lock(f"{kind}-{digest[:2]}"):
                    if not os.path.exists(path):
                        self._make_room(size)
                        self._make(path, make)
                        self._make_room(0, path)
                    with contextlib.suppress(FileNotFoundError):  # another process has just made room
                        os.utime(path)  # it was used last
                        return open(path, "rb", buffering=0)
            except OSError as error:
                raise PipelineError(
                    f"{self.path}: {label} cannot be kept: {error.strerror or error}; say with {FOLDER}= where "
                    "there is room"
                ) from error

    def _make(self, path: str, make: Callable[[str], None]) -> None:
        """Writes a file, which is there only when it is complete."""
        part = f"{path}.part"
        try:
            make(part)
            with open(part, "rb") as written:
                os.fsync(written.fileno())  # else it may be there without its content after a loss of power
            os.replace(part, path)
        finally:
            with contextlib.suppress(OSError):
                os.unlink(part)

    @contextlib.contextmanager
    def _lock(self, name: str) -> Iterator[None]:
        path = os.path.join(self.path, f".{name}.lock")
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    def _make_room(self, size: int, spared: str = "") -> None:
        """Remove the files that were used least lately, until there is room for another."""
        files = sorted(_list_files(self.path))
        excess = size - self.limit + sum(file_bytes for _, file_bytes, _ in files)
        for used_ns, file_bytes, path in files:
            is_part = path.endswith(".part")
            is_abandoned = is_part and time.time() - used_ns / 1e9 > _ABANDONED_S
            if is_abandoned or (excess > 0 and not is_part and path != spared):
                with contextlib.suppress(OSError):
                    os.unlink(path)
                    excess -= file_bytes


def find_folder() -> SourcesFolder:
    """The folder of this process's environment, on whatever machine it runs.

    Raises:
        PipelineError: see `SourcesFolder.of_environment`.
    """
    cache = _find(*(os.environ.get(name) for name in (FOLDER, BYTES, "XDG_CACHE_HOME", "HOME")))
    if not os.path.isdir(cache.path):  # it was removed meanwhile
        _find.cache_clear()
        return SourcesFolder.of_environment()
    return cache


@functools.lru_cache(maxsize=4)
def _find(*environment: str | None) -> SourcesFolder:
    return SourcesFolder.of_environment()


def _list_files(path: str) -> list[tuple[int, int, str]]:
    """When each file was used last, its bytes, and its path."""
    files = []
    with os.scandir(path) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):  # another process has just removed it
                if _NAME.fullmatch(entry.name):
                    status = entry.stat()
                    files.append((status.st_mtime_ns, status.st_size, entry.path))
    return files
