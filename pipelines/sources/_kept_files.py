"""The folder in which sources keep files: tables made of text files, records of streams, fetched files.

All processes of a user share it. It has one limit: beyond it the files that were not opened for longest are
removed. Processes that have a removed file open go on reading it. Locks, unfinished files and records of streams
are of the processes that hold locks on them; without one they are removed, whatever the limit.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import os
import re
import shutil
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO

from pipelines.errors import PipelineError
from pipelines.sources._files import OpenFile

FOLDER, BYTES = "ENSEMBLE_SOURCES_DIR", "ENSEMBLE_SOURCES_BYTES"
_NAME = re.compile(r"[0-9a-f]{32}-[A-Za-z0-9._-]{0,60}(~[0-9a-f]*)?")  # of a file that a source has made
_OWNED = "~"  # in the names of files that are locked by processes that need them, and are removed after these


@dataclass(frozen=True)
class SourcesFolder:
    """The folder and its limit.

    Attributes:
        limit: bytes of all files in it.
    """

    path: str
    limit: int

    @classmethod
    def of_environment(cls) -> SourcesFolder:
        """As the environment says; else in the user's cache, with half of what is free there."""
        cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
        if (named := os.environ.get(FOLDER) or cache).startswith("~"):  # a user without a home
            raise PipelineError(f"there is no home directory to keep files of sources in: set HOME or {FOLDER}")
        named = os.path.abspath(named)
        path = os.path.join(named, "ray-ensemble", "sources")  # of our own: files in it may be removed
        limit_text = os.environ.get(BYTES)
        try:
            os.makedirs(path, 0o700, exist_ok=True)
            for folder in (path, named) if os.environ.get(FOLDER) else (path,):
                status = os.stat(folder)
                if status.st_uid != os.geteuid() or status.st_mode & 0o022:  # others could put files there
                    raise PipelineError(
                        f"{folder}, where sources keep files, must be a folder that only you can write to"
                    )
            own_bytes = sum(size for *_, size, _ in _list_files(path))
            limit = int(float(limit_text)) if limit_text else own_bytes // 2 + shutil.disk_usage(path).free // 2
        except (ValueError, OverflowError):
            raise PipelineError(f"{BYTES} must be a number of bytes, got {limit_text!r}") from None
        except OSError as error:
            raise PipelineError(
                f"{path}, where sources keep files, cannot be made: {error.strerror}; set {FOLDER} to another "
                "folder"
            ) from error
        return cls(path, limit)

    def open(
        self, kind: str, label: str, key: Any, size: int, make: Callable[[str], None], *, is_owned: bool = False
    ) -> BinaryIO:
        """Opens the file of a key, unbuffered; one process at a time makes it if it is not there.

        Args:
            kind: of the file.
            label: the end of the file's name, for people.
            key: all that the content depends on; its `repr` is digested.
            size: of the file, or a guess, for which room is made.
            make: writes the file at a path.
            is_owned: whether it is removed as soon as no process has it open.
        """
        content = repr((kind, key)).encode("utf-8", "surrogateescape")
        digest = hashlib.blake2b(content, digest_size=16).hexdigest()
        name = f"{digest}-{re.sub('[^A-Za-z0-9._-]', '_', label)[-50:]}"
        path = os.path.join(self.path, name + _OWNED * is_owned)
        while True:
            try:
                with self._hold(f"{digest}-lock{_OWNED}", fcntl.LOCK_EX):
                    with contextlib.suppress(FileNotFoundError):
                        return _open(path, is_owned)
                    self._make_room(size)
                    # Of its own, as two processes may hold the lock where a file system has no true ones.
                    with self._hold(f"{name}{_OWNED}{uuid.uuid4().hex}", fcntl.LOCK_SH) as part:
                        make(part)
                        with open(part, "rb") as written:
                            os.fsync(written.fileno())  # else it may lack its content after a loss of power
                        os.replace(part, path)  # which is there only when it is complete
                        self._make_room(0, path)
                        with contextlib.suppress(FileNotFoundError):  # another process has just made room
                            return _open(path, is_owned)
            except OSError as error:
                raise PipelineError(
                    f"{self.path}: cannot write {label}: {error.strerror or error}; set {FOLDER} to a folder with "
                    "room"
                ) from error

    @contextlib.contextmanager
    def _hold(self, name: str, lock: int) -> Iterator[str]:
        """Makes a file and locks it (flock(2)); removes it at the end, as others do if this process is killed."""
        path = os.path.join(self.path, name)
        while True:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(descriptor, lock)
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.stat(path), os.fstat(descriptor)):
                    break
            os.close(descriptor)  # another process has removed it
        try:
            yield path
        finally:
            with contextlib.suppress(FileNotFoundError):  # it has another name now, or the folder was removed
                os.unlink(path)
            os.close(descriptor)

    def _make_room(self, size: int, spared: str = "") -> None:
        """Removes what killed processes have left, and what was used least lately, until there is room."""
        files = sorted(_list_files(self.path))
        excess = size - self.limit + sum(file_bytes for *_, file_bytes, _ in files)
        for is_shared, _, file_bytes, path in files:
            with contextlib.suppress(OSError):
                if not is_shared:
                    with open(path, "r+b") as file:
                        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # else somebody has it
                        if not os.path.samestat(os.stat(path), os.fstat(file.fileno())):
                            continue
                        os.unlink(path)
                elif excess > 0 and path != spared:
                    os.unlink(path)
                else:
                    continue
                excess -= file_bytes


def find_folder() -> SourcesFolder:
    """The folder of this process's environment, on whatever machine it runs."""
    cache = _find(*(os.environ.get(name) for name in (FOLDER, BYTES, "XDG_CACHE_HOME", "HOME")))
    if not os.path.isdir(cache.path):  # it was removed meanwhile
        _find.cache_clear()
        return SourcesFolder.of_environment()
    return cache


@functools.lru_cache(maxsize=4)
def _find(*environment: str | None) -> SourcesFolder:
    return SourcesFolder.of_environment()


def _open(path: str, is_owned: bool) -> BinaryIO:
    os.utime(path)  # it was used last
    file = OpenFile(path, "rb")
    if is_owned:
        fcntl.flock(file, fcntl.LOCK_SH)
    return file


def _list_files(path: str) -> list[tuple[bool, int, int, str]]:
    """Of each file whether it is of no process, when it was used last, its bytes, and its path."""
    files = []
    with os.scandir(path) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):  # another process has just removed it
                if _NAME.fullmatch(entry.name):
                    status = entry.stat()
                    is_shared = _OWNED not in entry.name
                    files.append((is_shared, status.st_mtime_ns, status.st_size, entry.path))
    return files
