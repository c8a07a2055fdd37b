"""Finds files, opens them, and detects whether they were changed since."""

from __future__ import annotations

import glob
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

from pipelines.errors import PipelineError

Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]

# Far below the usual limit of 1024 descriptors of a process, so that a thousand shards can be read.
OPEN_FILES = 64


@dataclass(frozen=True)
class File:
    """A file as it was when the source was made: absolute path, size in bytes, time of last change."""

    path: str
    size: int
    mtime_ns: int

    @classmethod
    def of(cls, path: str) -> File:
        status = os.stat(path)
        return cls(os.path.abspath(path), status.st_size, status.st_mtime_ns)

    def identity(self) -> list[str | int]:
        return [self.path, self.size, self.mtime_ns]

    def exists(self) -> bool:
        """Whether there is a file at the path, changed or not."""
        return os.path.exists(self.path)

    def open(self) -> BinaryIO:
        """Opens the file for reading, unbuffered.

        Raises:
            PipelineError: the file is missing, or was changed since it was indexed.
        """
        try:
            file = open(self.path, "rb", buffering=0)  # noqa: SIM115 - the caller keeps it open
        except OSError as error:
            raise PipelineError(f"{self.path}: cannot be opened: {error.strerror}") from error
        status = os.fstat(file.fileno())
        if (status.st_size, status.st_mtime_ns) != (self.size, self.mtime_ns):
            file.close()
            raise PipelineError(f"{self.path}: was changed after its records were indexed; make the source anew")
        return file


def find_files(kind: str, paths: Paths) -> list[File]:
    """Lists the files that a path, a glob pattern, or a sequence of both names.

    Matches of a pattern are sorted; the order of a sequence is kept.

    Raises:
        PipelineError: a file is missing or given twice, a pattern matches nothing, or something is no path.
    """
    given = [paths] if isinstance(paths, str | os.PathLike) else _list_paths(kind, paths)
    if not given:
        raise PipelineError(f"{kind}(): no path was given")
    found: dict[str, File] = {}
    for each in (os.path.expanduser(os.fspath(path)) for path in given):
        matches = [each]
        if glob.has_magic(each) and not os.path.exists(each):
            matches = sorted(glob.glob(each, recursive=True))
            if not matches:
                raise PipelineError(f"{kind}({each!r}): the pattern matches no file")
        for path in matches:
            if os.path.isdir(path):
                raise PipelineError(
                    f"{kind}({path!r}): is a folder; name its files, as in {path.rstrip('/')}/*.{kind}"
                )
            try:
                file = File.of(path)
            except OSError as error:
                raise PipelineError(f"{kind}({path!r}): {(error.strerror or str(error)).lower()}") from None
            if file.path in found:
                raise PipelineError(f"{kind}({path!r}): the file is given twice")
            found[file.path] = file
    return list(found.values())


def _list_paths(kind: str, paths: Any) -> list[str | os.PathLike[str]]:
    is_sequence = (
        isinstance(paths, Iterable) and not isinstance(paths, Mapping | bytes) and not hasattr(paths, "read")
    )
    given = list(paths) if is_sequence else [paths]
    if wrong := [each for each in given if not isinstance(each, str | os.PathLike)]:
        raise PipelineError(f"{kind}(): needs the path of a file, or several, got {type(wrong[0]).__name__}")
    return given


def check_columns(kind: str, columns: Any, what: str = "columns") -> tuple[str, ...] | None:
    """The names that a user gives, in order; None if he gives none.

    Raises:
        PipelineError: they are no texts, or not distinct, or there is none.
    """
    if columns is None:
        return None
    names = (columns,) if isinstance(columns, str) else tuple(columns)
    if not names or len(set(names)) < len(names) or not all(isinstance(name, str) for name in names):
        raise PipelineError(f"{kind}(): {what} must name each column once, got {columns!r}")
    return names


class ThreadLock:
    """A lock for the threads of a process. A forked child, which lacks the holding thread, finds it free."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pid = os.getpid()

    def __enter__(self) -> None:
        if self._pid != os.getpid():
            self._lock, self._pid = threading.Lock(), os.getpid()
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


class OpenFiles:
    """The open files of one process: at most `OPEN_FILES`; the least recently used is closed first.

    Pickles to an empty instance. A forked child can use the descriptors that it inherits: they are read at given
    positions (`os.pread`), which moves no shared file offset. Thread-safe: a reader holds the file object, so a
    file that another thread drops is closed after the read.
    """

    def __init__(self) -> None:
        self._files: OrderedDict[int, BinaryIO] = OrderedDict()
        self._lock = ThreadLock()

    def __reduce__(self) -> tuple[Callable[[], OpenFiles], tuple[()]]:
        return OpenFiles, ()

    def get(self, number: int, file: File) -> BinaryIO:
        """Returns the open file with that number, and opens it if necessary."""
        with self._lock:
            handle = self._files.get(number)
            if handle is None:
                handle = self._files[number] = file.open()
                if len(self._files) > OPEN_FILES:
                    self._files.popitem(last=False)
            else:
                self._files.move_to_end(number)
            return handle

    def forget(self, number: int) -> None:
        """Open the file anew when it is wanted next: a file server may not know the open one any more."""
        with self._lock:
            self._files.pop(number, None)


def read_exactly(descriptor: int, size: int, offset: int) -> bytes:
    """Reads so many bytes of an open file at an offset, without moving its position.

    Raises:
        PipelineError: the file ends before.
    """
    data = os.pread(descriptor, size, offset)
    if len(data) == size:
        return data
    parts = [data]
    while data and sum(map(len, parts)) < size:  # a read above 2 GiB comes in parts
        done = sum(map(len, parts))
        data = os.pread(descriptor, size - done, offset + done)
        parts.append(data)
    whole = b"".join(parts)
    if len(whole) < size:
        raise PipelineError(f"{len(whole)} of {size} bytes at {offset}: the file is cut off")
    return whole
