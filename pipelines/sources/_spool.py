"""Spools: the records of a stream, written once to a file of our own, from which they are read by index.

A spool is a folder of mode 0700 with the records. The process that wrote it holds a lock on it and removes it at
its end; a spool whose process was killed is removed by whoever writes the next one beside it.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import os
import shutil
import tempfile
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from pipelines.errors import PipelineError
from pipelines.sources._files import File
from pipelines.sources._record_codec import NotStorable, encode

_PREFIX = "ray-ensemble-spool-"
_BUFFER = 8 << 20
Digests = npt.NDArray[np.uint64]


class Spool:
    """The records of a stream in a file.

    Attributes:
        folder: the spool's own.
        offsets: where the records begin, and where the last one ends: int64 [records + 1].
        digests: of each record (XXH3, 64 bits): uint64 [records].
    """

    def __init__(self, folder: str, offsets: npt.NDArray[np.int64], digests: Digests) -> None:
        self.folder, self.offsets, self.digests = folder, offsets, digests
        self._owner: Any = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_owner": None}

    @property
    def path(self) -> str:
        """The file."""
        return os.path.join(self.folder, "records")

    def find(self) -> File | None:
        """The file, if it is there and complete."""
        with contextlib.suppress(OSError):
            file = File.of(self.path)
            if file.size == self.offsets[-1]:
                return file
        return None

    def restore(self, records: Iterable[dict[str, Any]]) -> File:
        """Writes the file again where it is missing, as on another machine, and checks each record.

        Processes that do this at the same time wait for the first one.

        Raises:
            PipelineError: the stream's records differ from those of its first pass; says from where on.
        """
        try:
            os.makedirs(self.folder, 0o700, exist_ok=True)
            status = os.stat(self.folder)
        except OSError as error:
            raise PipelineError(f"iterable(): {self.folder}: {error.strerror}") from error
        if status.st_uid != os.geteuid() or status.st_mode & 0o077:
            raise PipelineError(f"iterable(): {self.folder} belongs to somebody else")
        with open(os.path.join(self.folder, "writing"), "wb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if (found := self.find()) is None:
                _write(self.path, records, len(self.digests), self.digests)
                self._owner = _own(self)
                found = self.find()
        if found is None:
            raise PipelineError(f"iterable(): {self.path} was removed while it was read")
        return found


def write_spool(parent: str | None, records: Iterable[dict[str, Any]], length: int) -> Spool:
    """Writes a spool of all records.

    Args:
        parent: the folder to put it into; None: the one for temporary files.
        length: the number of records that there must be.

    Raises:
        PipelineError: there are more records or fewer, one cannot be stored, or the disk is full.
    """
    parent = tempfile.gettempdir() if parent is None else os.path.abspath(os.path.expanduser(parent))
    _remove_abandoned(parent)
    try:
        folder = tempfile.mkdtemp(prefix=_PREFIX, dir=parent)
    except OSError as error:
        raise PipelineError(f"iterable(): {parent}: {(error.strerror or str(error)).lower()}") from None
    spool = Spool(folder, np.zeros(1, np.int64), np.empty(0, np.uint64))
    spool._owner = _own(spool)
    try:
        spool.offsets, spool.digests = _write(spool.path, records, length, None)
    except BaseException:
        spool._owner()
        raise
    return spool


def _own(spool: Spool) -> Any:
    """Locks a spool until it is garbage, or this process ends, and removes it then; returns what removes it."""
    lock = os.open(os.path.join(spool.folder, "owned"), os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    fcntl.flock(lock, fcntl.LOCK_SH)
    return weakref.finalize(spool, _remove, spool.folder, lock, os.getpid())


def _remove(folder: str, lock: int, pid: int) -> None:
    if os.getpid() == pid:  # and no forked child of it
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _remove_abandoned(parent: str) -> None:
    """Removes spools whose processes were killed: nobody holds their locks."""
    for folder in glob.glob(os.path.join(glob.escape(parent), f"{_PREFIX}*")):
        with contextlib.suppress(OSError):
            if os.stat(folder).st_uid != os.geteuid():
                continue
            lock = os.open(os.path.join(folder, "owned"), os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)


def _write(
    path: str, records: Iterable[dict[str, Any]], length: int, expected: Digests | None
) -> tuple[npt.NDArray[np.int64], Digests]:
    import xxhash

    offsets, digests = np.zeros(length + 1, np.int64), np.zeros(length, np.uint64)
    count = 0
    unfinished = f"{path}.unfinished"
    try:
        with open(unfinished, "wb", buffering=_BUFFER) as file:
            for record in records:
                if count == length:
                    raise PipelineError(f"iterable(): yields more records than length={length}")
                try:
                    data = encode(record)
                except NotStorable as error:
                    raise PipelineError(
                        f"iterable(): record {count}: {error}; yield arrays, numbers, texts, bytes, or dicts, "
                        "lists and tuples of these"
                    ) from None
                digest = xxhash.xxh3_64_intdigest(data)
                if expected is not None and digest != expected[count]:
                    raise PipelineError(
                        f"iterable(): record {count} is another than in the first pass: a stream must yield the "
                        "same records each time (no shuffling, no random transform, no clock)"
                    )
                file.write(data)
                offsets[count + 1], digests[count] = offsets[count] + len(data), digest
                count += 1
        if count < length:
            raise PipelineError(f"iterable(): ended after {count} records, but length={length}")
        os.rename(unfinished, path)
    except OSError as error:
        if error.filename not in (None, unfinished):
            raise  # the stream's own
        raise PipelineError(
            f"iterable(): {path}: {error.strerror or error} after {count} of {length} records; say with folder= "
            "where there is room for all of them"
        ) from error
    return offsets, digests


def check_iterated(stream: Any) -> Iterator[Any]:
    """Passes the items of a stream, or of the function that makes one, on, and says at which one it failed."""
    count, iterator = 0, None
    while True:
        try:
            if iterator is None:
                iterator = iter(stream if hasattr(stream, "__iter__") else stream())
            item = next(iterator)
        except StopIteration:
            return
        except (PipelineError, MemoryError):
            raise
        except Exception as error:
            raise PipelineError(f"iterable(): record {count}: {type(error).__name__}: {error}") from error
        yield item
        count += 1
