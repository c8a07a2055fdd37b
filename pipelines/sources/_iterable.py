"""Source of a stream: anything that can be iterated over again and again, but not be indexed.

A batch must be a function of its position alone, in any process, at any time, also after a resume. A stream cannot
give that: whoever wants record one million has to read all before it, and each preparation worker would read
everything. So the stream is read once, when the source is made, into a spool, from which all processes read by
index. Its records' digests identify it.

A spool is a folder of mode 0700 with the records. The process that wrote it holds a lock on it and removes it at
its end; a spool whose process was killed is removed by whoever writes the next one beside it.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import hashlib
import itertools
import os
import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from pipelines.checks import check_flag, check_integer
from pipelines.errors import PipelineError, SampleError
from pipelines.fingerprint import known_as
from pipelines.sources._base import Source
from pipelines.sources._file_records import FileRecords
from pipelines.sources._files import File, check_names, read_exactly
from pipelines.sources._recent import ThreadLock
from pipelines.sources._record_codec import NotStorable, decode, encode
from pipelines.sources._values import UnnamedValues, make_record

_PREFIX = "ray-ensemble-spool-"
_BUFFER = 8 << 20
Digests = npt.NDArray[np.uint64]


@known_as("pipelines.sources.iterable")
class IterableRecords(FileRecords):
    """See `iterable`."""

    kind = "iterable"

    def __init__(
        self,
        items: Any,
        length: int,
        id: str | None,
        names: Sequence[str] | None,
        folder: str | os.PathLike[str] | None,
        endless: bool,
    ) -> None:
        check_flag("iterable: endless", endless)
        self._items = _check_repeatable(items)
        self._called = check_names("iterable", names, "names= must name each value of an item")
        self._id = id
        count = check_integer("iterable: length", length, 1)
        self.is_endless, self._length = endless, count
        self._epochs: dict[int, tuple[BinaryIO, npt.NDArray[np.int64]]] = {}  # later ones, opened
        self._ahead_at: tuple[int, int, Iterator[Any]] | None = None  # process, next record, what yields it
        self._folder = _make_folder(None if folder is None else os.fspath(folder))
        self._owner = _own(self, self._folder)
        try:
            offsets, self._digests = _write(self._path, self._iterate(), count, None)
        except BaseException:
            self._owner()
            raise
        super().__init__([File.of(self._path)], [offsets])

    def renew(self, known: dict[int, Source]) -> Source:
        return self  # a spool that is gone is written again, and its records are compared

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_owner": None, "_epochs": {}, "_ahead_at": None}

    @property
    def _path(self) -> str:
        return os.path.join(self._folder, "records")

    def _iterate(self, first: int = 0) -> Iterator[dict[str, Any]]:
        """The records from one on: all, or those of an epoch, after which the process goes on from there."""
        kept, self._ahead_at = self._ahead_at, None
        begin, iterator = kept[1:] if kept and kept[0] == os.getpid() and kept[1] <= first else (0, None)
        for count in itertools.count(begin):
            if self.is_endless and count == first + self._length:
                if first and iterator is not None:
                    self._ahead_at = (os.getpid(), count, iterator)
                return
            try:
                if iterator is None:
                    iterator = iter(self._items if hasattr(self._items, "__iter__") else self._items())
                record = make_record(next(iterator), self._called)
            except StopIteration:
                return
            except UnnamedValues as error:
                raise PipelineError(f"iterable(): record {count}: {error}") from None
            except (PipelineError, MemoryError):
                raise
            except Exception as error:
                raise PipelineError(f"iterable(): record {count}: {type(error).__name__}: {error}") from error
            if count >= first:
                yield record

    def _read(self, index: int) -> dict[str, Any]:
        if index >= self._length:
            return self._read_later(index)
        if not os.path.exists(self.files[0].path):
            self._restore(index)
        return decode(self._read_bytes(index))

    def _read_later(self, index: int) -> dict[str, Any]:
        """Reads a record of a later epoch; who comes first writes the epoch for all processes of the machine."""
        epoch, place = divmod(index, self._length)
        try:
            with _lock:
                while epoch not in self._epochs:
                    path = self._write_missing(epoch)
                    for number in [each for each in self._epochs if abs(each - epoch) > 1]:
                        self._epochs.pop(number)[0].close()
                    with contextlib.suppress(FileNotFoundError):  # removed meanwhile by who is two epochs further
                        self._epochs[epoch] = open(path, "rb", buffering=0), np.load(f"{path}.npy")  # noqa: SIM115
                file, offsets = self._epochs[epoch]
                start, end = offsets[place : place + 2].tolist()
                return decode(read_exactly(file.fileno(), end - start, start))
        except (PipelineError, OSError) as error:
            raise SampleError(index, self.where(index), str(error)) from error

    def will_read(self, indices: npt.NDArray[np.int64]) -> None:
        super().will_read(indices[indices < self._length])

    def _restore(self, index: int) -> None:
        """Reads the stream again, on a machine that does not have the spool."""
        with _lock:
            if not os.path.exists(self._path):
                try:
                    self.files = [File.of(self._write_missing(0))]
                except (PipelineError, OSError) as error:
                    raise SampleError(index, self.where(index), str(error)) from error
                self._open.drop(0)

    def _write_missing(self, epoch: int) -> str:
        """Writes the file of an epoch where it is missing, and checks the records of the first; returns its path.

        Later epochs but the last two are removed: a process that needs one again reads the stream again up to it.

        Processes that do this at the same time wait for the first one.

        Raises:
            PipelineError: the stream's records differ from those of its first pass; says from where on.
        """
        is_new = not os.path.isdir(self._folder)
        try:
            os.makedirs(self._folder, 0o700, exist_ok=True)
            status = os.stat(self._folder)
        except OSError as error:
            raise PipelineError(f"iterable(): {self._folder}: {error.strerror}") from error
        if status.st_uid != os.geteuid() or status.st_mode & 0o077:
            raise PipelineError(f"iterable(): {self._folder} belongs to somebody else")
        with open(os.path.join(self._folder, "writing"), "wb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            path = f"{self._path}-{epoch}" if epoch else self._path
            if not os.path.exists(f"{path}.npy" if epoch else path):
                known = (None, None) if epoch else (self._digests, self.files[0].mtime_ns)
                offsets, _ = _write(path, self._iterate(epoch * self._length), self._length, *known)
                if epoch:
                    np.save(f"{path}.new.npy", offsets)
                    os.rename(f"{path}.new.npy", f"{path}.npy")
                for old in (f"{self._path}-{epoch - 2}{end}" for end in ("", ".npy") if epoch > 2):
                    with contextlib.suppress(FileNotFoundError):
                        os.unlink(old)
                if is_new or not epoch:
                    self._owner = _own(self, self._folder)
            return path

    def where(self, index: int) -> str:
        return f"{self._describe_items()}:record {index}"

    def _describe_items(self) -> str:
        named = getattr(self._items, "__qualname__", None)
        return f"{named}()" if named else type(self._items).__name__

    def identity(self) -> Any:
        goes_on = {"endless": True} if self.is_endless else {}
        if self._id is not None:
            return {"source": self._describe_class(), "id": self._id, "count": len(self), **goes_on}
        digest = hashlib.sha256(self._digests.astype("<u8").tobytes()).hexdigest()
        return {"source": self._describe_class(), "records": digest, **goes_on}


_lock = ThreadLock()


def iterable(
    dataset: Any,
    length: int,
    id: str | None = None,
    names: Sequence[str] | None = None,
    folder: str | os.PathLike[str] | None = None,
    *,
    endless: bool = False,
) -> IterableRecords:
    """Makes a source of a stream: a torch or Hugging Face IterableDataset, a WebDataset, any re-iterable object.

    The stream is read once, now, and its records are written to a temporary folder, which needs the room that all
    records take, decoded as the stream yields them. All processes read them there, by index; so shuffling,
    resuming and preparing in parallel are as for any other source. The folder is removed with the source or at the
    process's end. A process on another machine reads the stream again and compares each record with the first
    pass.

    Args:
        dataset: the stream, or a function without arguments that makes it. Each iteration yields the same records
            in the same order. An iterator or generator, which is read only once, is refused.
        length: the number of records; the stream must yield exactly as many, unless it is endless.
        id: identifies the records in fingerprints, instead of a digest of all.
        names: fields of an item that is a tuple, in order (`image`, `label` for two values unless given). Dicts,
            named tuples and dataclasses have their own names.
        folder: where the records are written, instead of the folder for temporary files (`TMPDIR`).
        endless: whether the stream goes on after `length` records: an epoch is then so many records, epoch e those
            from `e * length` on, shuffled among themselves (`Pipeline(shuffle=False)`: in the stream's order). A
            later epoch is written to the folder when it is first needed, the last two are kept. A process that has
            not read the epoch before, such as after a restart, reads the stream from its beginning for it. With
            `sampling=`, or in parts (`split`), the source has the first `length` records alone.

    Returns:
        A source of records. Tensors are numpy arrays, PIL images uint8 [C, H, W].

    Raises:
        PipelineError: it cannot be iterated over again, yields more or fewer records, fails, or yields what cannot
            be stored: anything but arrays, numbers, texts, bytes, and dicts, lists and tuples of these.

    Examples:
        >>> source = iterable(webdataset.WebDataset("shard-{00..09}.tar").decode("rgb8"), length=50_000)
    """
    return IterableRecords(dataset, length, id, names, folder, endless)


def _check_repeatable(items: Any) -> Any | Callable[[], Any]:
    if hasattr(items, "__next__"):
        raise PipelineError(
            f"iterable(): {type(items).__name__} is an iterator, which can be read only once; give the function "
            "that makes it, as in iterable(read_records, length=...)"
        )
    if not hasattr(items, "__iter__") and not callable(items):
        raise PipelineError(f"iterable(): {type(items).__name__} can neither be iterated over nor be called")
    return items


def _make_folder(parent: str | None) -> str:
    """Makes a folder for a spool in another one, or in that for temporary files."""
    parent = tempfile.gettempdir() if parent is None else os.path.abspath(os.path.expanduser(parent))
    _remove_abandoned(parent)
    try:
        return tempfile.mkdtemp(prefix=_PREFIX, dir=parent)
    except OSError as error:
        raise PipelineError(f"iterable(): {parent}: {(error.strerror or str(error)).lower()}") from None


def _own(source: IterableRecords, folder: str) -> Any:
    """Locks a spool until its source is garbage, or this process ends, and removes it then; returns what removes
    it."""
    lock = os.open(os.path.join(folder, "owned"), os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    fcntl.flock(lock, fcntl.LOCK_SH)
    return weakref.finalize(source, _remove, folder, lock, os.getpid())


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
    path: str,
    records: Iterable[dict[str, Any]],
    length: int,
    expected: Digests | None,
    mtime_ns: int | None = None,
) -> tuple[npt.NDArray[np.int64], Digests]:
    """Writes all records into a file, which is there only when it is complete.

    Args:
        length: the number of records that there must be.
        expected: their digests (XXH3, 64 bits), uint64 [length], if they are known.
        mtime_ns: the time of change that processes expect which know the file already.

    Returns:
        Where the records begin, and where the last one ends, int64 [length + 1]; their digests.

    Raises:
        PipelineError: there are more records or fewer, one cannot be stored or is another, or the disk is full.
    """
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
        if mtime_ns is not None:
            os.utime(unfinished, ns=(mtime_ns, mtime_ns))
        os.rename(unfinished, path)
    except OSError as error:
        if error.filename not in (None, unfinished):
            raise  # the stream's own
        raise PipelineError(
            f"iterable(): {path}: {error.strerror or error} after {count} of {length} records; say with folder= "
            "where there is room for all of them"
        ) from error
    return offsets, digests
