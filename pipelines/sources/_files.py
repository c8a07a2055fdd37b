"""Finds files, opens them, identifies what they hold, and detects whether they were changed since."""

from __future__ import annotations

import functools
import glob
import hashlib
import io
import os
import re
import stat
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, BinaryIO, NamedTuple

from pipelines.errors import PipelineError
from pipelines.sources import _remote

Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]

# Far below the usual limit of 1024 descriptors of a process, so that a thousand shards can be read.
OPEN_FILES = 64
# A source whose files are no larger in all is identified by all of its bytes: a quarter of a second to read.
WHOLE_BYTES = 256 << 20
# Of a larger one, that many blocks of each file are read, from its first to its last byte.
_BLOCKS, _BLOCK_BYTES = 16, 4096
_READ_BYTES = 1 << 20
_POINTER, _POINTER_BYTES = b"version https://git-lfs", 1024
_READERS = 16


class OpenFile(io.FileIO):
    """A file that is closed with its last reader, as several sources may read it."""

    def __del__(self) -> None:
        self.close()


@dataclass(frozen=True)
class File:
    """A file as it was when the source was made: absolute path, size in bytes, time of last change.

    Attributes:
        digest: of the bytes that identify it (BLAKE2b, 128 bits); "" where it is identified by its path.
        is_whole: whether these are all of its bytes.
    """

    path: str
    size: int
    mtime_ns: int
    digest: str = ""
    is_whole: bool = False

    @classmethod
    def of(cls, path: str) -> File:
        status = os.stat(path)
        if status.st_size < _POINTER_BYTES and stat.S_ISREG(status.st_mode):
            with open(path, "rb") as file:
                if file.read(len(_POINTER)) == _POINTER:
                    raise PipelineError(
                        f"{path}: is a pointer of Git LFS, and no data: `git lfs pull` fetches them"
                    )
        return cls(os.path.abspath(path), status.st_size, status.st_mtime_ns)

    def identity(self) -> list[str | int]:
        """What the file holds, as a JSON value: independent of its folder, if any of its bytes are known."""
        if self.is_whole:
            return [self.size, self.digest]
        if self.digest:
            return [os.path.basename(self.path), self.size, self.mtime_ns, self.digest]
        return [self.path, self.size, self.mtime_ns]

    def was_changed(self) -> bool:
        """Whether it is gone, or has another size or time of change than when it was indexed."""
        try:
            return File.of(self.path) != replace(self, digest="", is_whole=False)
        except OSError:
            return True

    def open(self) -> BinaryIO:
        """Opens the file for reading, unbuffered.

        A file of another time is read: it is unchanged if it holds the same bytes, and all of them are known.
        """
        try:
            file = OpenFile(self.path, "rb")  # the caller keeps it open
        except OSError as error:
            raise PipelineError(f"{self.path}: cannot be opened: {error.strerror}") from error
        status = os.fstat(file.fileno())
        if (status.st_size, status.st_mtime_ns) != (self.size, self.mtime_ns):
            is_proven = self.is_whole and status.st_size == self.size
            if not is_proven or _digest(self.path, _Stamp.of(status), is_whole=True) != self.digest:
                file.close()
                raise PipelineError(
                    f"{self.path}: was changed after its records were indexed; make the source again"
                )
        return file

    def content_key(self) -> list[str | int]:
        """A JSON value that is another one whenever the content is: the digest of all bytes, or path and times.

        The kernel sets the time of an inode's change at each change; no program can set it back.
        """
        if self.is_whole:
            return self.identity()
        with self.open() as handle:
            return [self.path, *_Stamp.of(os.fstat(handle.fileno()))]

    def open_in_parts(self) -> BinaryIO:
        return self.open()

    def identify(self, is_whole: bool | None = None) -> File:
        """Returns the file with a digest of its bytes.

        Args:
            is_whole: of all bytes, or of some blocks; None: of all where there are at most `WHOLE_BYTES`.
        """
        whole = self.size <= WHOLE_BYTES if is_whole is None else is_whole
        with self.open() as file:
            status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            return self
        return replace(self, digest=_digest(self.path, _Stamp.of(status), is_whole=whole), is_whole=whole)


@dataclass(frozen=True)
class RemoteFile(File):
    """A file elsewhere, by its address: `pipelines.sources._remote`.

    Attributes:
        tag: what its server says of its content, an ETag or the time of its last change; "" for nothing.
    """

    tag: str = ""

    def identity(self) -> list[str | int]:
        """Address, size and tag."""
        return [self.path, self.size, self.tag]

    def content_key(self) -> list[str | int]:
        """What its server says of it."""
        return self.identity()

    def open(self) -> BinaryIO:
        """Opens the file here, where it is fetched first if it is not kept."""
        from pipelines.sources._kept_files import find_folder

        copy = functools.partial(_remote.fetch, self.path, self.size, self.tag)
        return find_folder().open("fetched", os.path.basename(self.path), self.identity(), self.size, copy)

    def open_in_parts(self) -> BinaryIO:
        return _remote.open_in_parts(self.path) or self.open()

    def identify(self, is_whole: bool | None = None) -> File:
        """Itself: its server says what it is."""
        return self


class _Stamp(NamedTuple):
    """Changes whenever a file is written to."""

    device: int
    inode: int
    size: int
    mtime_ns: int
    ctime_ns: int

    @classmethod
    def of(cls, status: os.stat_result) -> _Stamp:
        return cls(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


@functools.lru_cache(maxsize=1 << 16)
def _digest(path: str, stamp: _Stamp, *, is_whole: bool) -> str:
    """Reads a file for its digest, once in a process for as long as it is not written to."""
    digest = hashlib.blake2b(digest_size=16)
    try:
        with open(path, "rb", buffering=0) as file:
            before = _Stamp.of(os.fstat(file.fileno()))
            if is_whole:
                while data := file.read(_READ_BYTES):
                    digest.update(data)
            else:
                last = max(stamp.size - _BLOCK_BYTES, 0)
                for offset in sorted({last * number // (_BLOCKS - 1) for number in range(_BLOCKS)}):
                    digest.update(os.pread(file.fileno(), _BLOCK_BYTES, offset))
            after = _Stamp.of(os.fstat(file.fileno()))
    except OSError as error:
        raise PipelineError(f"{path}: cannot be read: {error.strerror}") from error
    if not before == after == stamp:
        raise PipelineError(f"{path}: was changed while it was read; make the source again")
    return digest.hexdigest()


def find_files(kind: str, paths: Paths) -> list[File]:
    """Lists the files that a path, a glob pattern, an address (`s3://...`), or a sequence of these names.

    Braces stand for several, as in `shard-{00..09}.tar` or `{train,more}.parquet`.

    Matches of a pattern are sorted; the order of a sequence is kept. The bytes of the files are read for their
    identities, as far as `WHOLE_BYTES` says.
    """
    names = [paths] if isinstance(paths, str | os.PathLike) else _list_paths(kind, paths)
    if not names:
        raise PipelineError(f"{kind}(): no path was given")
    files: dict[str, File] = {}
    for name in (os.path.expanduser(one) for path in names for one in _expand_braces(os.fspath(path))):
        if _remote.is_url(name):
            from pipelines.sources._kept_files import find_folder

            find_folder()  # it can be used
            for url, size, tag in _remote.list_urls(kind, name):
                if url in files:
                    raise PipelineError(f"{kind}({url!r}): the file is given twice")
                files[url] = RemoteFile(url, size, 0, "", False, tag)
            continue
        matches = [name]
        if glob.has_magic(name) and not os.path.exists(name):
            matches = sorted(glob.glob(name, recursive=True))
            if not matches:
                raise PipelineError(f"{kind}({name!r}): the pattern matches no file")
        for path in matches:
            if os.path.isdir(path):
                raise PipelineError(
                    f"{kind}({path!r}): is a folder; name its files, as in {path.rstrip('/')}/*.{kind}"
                )
            try:
                file = File.of(path)
            except OSError as error:
                raise PipelineError(f"{kind}({path!r}): {(error.strerror or str(error)).lower()}") from None
            if file.path in files:
                raise PipelineError(f"{kind}({path!r}): the file is given twice")
            files[file.path] = file
    is_whole = sum(file.size for file in files.values() if not isinstance(file, RemoteFile)) <= WHOLE_BYTES
    with ThreadPoolExecutor(_READERS) as readers:
        return list(readers.map(lambda file: file.identify(is_whole), files.values()))


def _expand_braces(path: str) -> list[str]:
    """A path for each text that braces stand for; itself where there is a file of that name, or no such braces."""
    match = re.search(r"\{(\d+)\.\.(\d+)\}|\{([^{}]*,[^{}]*)\}", path)
    if match is None or os.path.exists(path):
        return [path]
    first, last, words = match.groups()
    if first is not None and int(first) > int(last):
        raise PipelineError(f"{path!r}: {match[0]} names nothing")
    parts = words.split(",") if words else [f"{n:0{len(first)}d}" for n in range(int(first), int(last) + 1)]
    return [
        expanded
        for part in parts
        for expanded in _expand_braces(path[: match.start()] + part + path[match.end() :])
    ]


def _list_paths(kind: str, paths: Any) -> list[str | os.PathLike[str]]:
    is_sequence = (
        isinstance(paths, Iterable) and not isinstance(paths, Mapping | bytes) and not hasattr(paths, "read")
    )
    listed = list(paths) if is_sequence else [paths]
    if wrong := [path for path in listed if not isinstance(path, str | os.PathLike)]:
        raise PipelineError(f"{kind}(): needs the path of a file, or several, got {type(wrong[0]).__name__}")
    return listed


def check_names(kind: str, value: Any, what: str = "columns must name each column") -> tuple[str, ...] | None:
    """The names that a user gives, in order; None if there are none."""
    if value is None:
        return None
    names = (value,) if isinstance(value, str) else tuple(value)
    if not names or len(set(names)) < len(names) or not all(isinstance(name, str) for name in names):
        raise PipelineError(f"{kind}(): {what} once, got {value!r}")
    return names


def read_exactly(descriptor: int, size: int, offset: int) -> bytes:
    """Reads so many bytes of an open file at an offset, without moving its position."""
    data = os.pread(descriptor, size, offset)
    while len(data) < size:  # a read above 2 GiB comes in parts
        more = os.pread(descriptor, size - len(data), offset + len(data))
        if not more:
            raise PipelineError(f"{len(data)} of {size} bytes at {offset}: the file is cut off")
        data += more
    return data
