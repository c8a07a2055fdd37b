"""Source of a stream: anything that can be iterated over again and again, but not be indexed.

A batch must be a function of its position alone, so the stream is read once, when the source is made, into a
*spool*: a file in the folder of `_kept_files`, from which all processes read by index. It is removed with the
source, or by others if its process was killed. Where it is missing, as on another machine, the stream is read
again and compared with the first pass.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import uuid
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from pipelines.checks import check_integer
from pipelines.errors import DataOutOfReach, PipelineError
from pipelines.fingerprint import known_as
from pipelines.sources._base import Source
from pipelines.sources._file_records import FileRecords
from pipelines.sources._files import File, check_names
from pipelines.sources._kept_files import find_folder
from pipelines.sources._record_codec import NotStorable, decode, encode
from pipelines.sources._values import UnnamedValues, make_record

_BUFFER = 8 << 20


@known_as("pipelines.sources.iterable")
class IterableRecords(FileRecords):
    """See `iterable`."""

    kind = "iterable"

    def __init__(self, items: Any, length: int, id: str | None, names: Sequence[str] | None) -> None:
        self._items = _check_repeatable(items)
        self._called = check_names("iterable", names, "names= must name each value of an item")
        self._id, self._key = id, uuid.uuid4().hex
        count = check_integer("iterable: length", length, 1)
        self._digests, self._bytes = np.zeros(count, np.uint64), 0
        offsets = np.zeros(count + 1, np.int64)
        super().__init__([File.of(self._open_spool(offsets).name)], [offsets])
        self._bytes = int(offsets[-1])

    def renew(self, renewed: dict[int, Source]) -> Source:
        return self  # a spool that is gone is written again, and its records are compared

    def _open_spool(self, offsets: npt.NDArray[np.int64] | None) -> BinaryIO:
        """Opens the spool, which is written where it is missing; who has written it removes it at its end."""
        written = list[str]()

        def write(path: str) -> None:
            self._write(offsets, path)
            written.append(path)

        spool = find_folder().open("spool", "records", self._key, self._bytes, write, is_owned=True)
        if written:
            weakref.finalize(self, _remove, spool, os.getpid())
        return spool

    def _open_file(self, number: int) -> tuple[BinaryIO, int]:
        try:
            spool = self._open_spool(None)
        except PipelineError as error:
            raise DataOutOfReach(str(error)) from error  # nothing is wrong with the record
        if os.fstat(spool.fileno()).st_size != self._bytes:
            raise DataOutOfReach(f"{spool.name}: was changed after it was written; make the source again")
        return spool, 1

    def _write(self, offsets: npt.NDArray[np.int64] | None, path: str) -> None:
        """Writes all records into a file; notes their digests (XXH3), or compares them with those of before."""
        import xxhash

        length, count = len(self._digests), 0
        with open(path, "wb", buffering=_BUFFER) as file:
            for count, record in enumerate(self._iterate(), 1):
                number = count - 1
                if count > length:
                    raise PipelineError(f"{self.kind}(): yields more records than length={length}")
                try:
                    data = encode(record)
                except NotStorable as error:
                    raise PipelineError(
                        f"{self.kind}(): record {number}: {error}; yield arrays, numbers, texts, bytes, or dicts, "
                        "lists and tuples of these"
                    ) from None
                digest = xxhash.xxh3_64_intdigest(data)
                if offsets is not None:
                    self._digests[number], offsets[count] = digest, offsets[number] + len(data)
                elif digest != self._digests[number]:
                    raise PipelineError(
                        f"{self.kind}(): record {number} differs from that of the first pass: a stream must yield "
                        "the same records each time (no shuffling, no random transform, no clock)"
                    )
                file.write(data)
        if count < length:
            raise PipelineError(f"{self.kind}(): ended after {count} records, but length={length}")

    def _iterate(self) -> Iterator[dict[str, Any]]:
        iterator = None
        for count in itertools.count():
            try:
                if iterator is None:
                    iterator = iter(self._items if hasattr(self._items, "__iter__") else self._items())
                record = make_record(next(iterator), self._called)
            except StopIteration:
                return
            except UnnamedValues as error:
                raise PipelineError(f"{self.kind}(): record {count}: {error}") from None
            except (PipelineError, MemoryError):
                raise
            except Exception as error:
                raise PipelineError(f"{self.kind}(): record {count}: {type(error).__name__}: {error}") from error
            yield record

    def _read(self, index: int) -> dict[str, Any]:
        return decode(self._read_bytes(index))

    def where(self, index: int) -> str:
        named = getattr(self._items, "__qualname__", None)
        return f"{f'{named}()' if named else type(self._items).__name__}:record {index}"

    def identity(self) -> Any:
        if self._id is not None:
            return {"source": self._describe_class(), "id": self._id, "count": len(self)}
        digest = hashlib.sha256(self._digests.astype("<u8").tobytes()).hexdigest()
        return {"source": self._describe_class(), "records": digest}


def iterable(
    dataset: Any, length: int, id: str | None = None, names: Sequence[str] | None = None
) -> IterableRecords:
    """Makes a source of a stream: a torch or Hugging Face IterableDataset, a WebDataset, any re-iterable object.

    The stream is read once, now, and its records are written to a file in the folder that the environment variable
    `ENSEMBLE_SOURCES_DIR` names, which needs the room that all records take, decoded as they are yielded. All
    processes read them there, by index; so shuffling, resuming and preparing in parallel are as for any other
    source. The file is removed with the source or at the process's end. A process on another machine reads the
    stream again and compares each record with the first pass.

    Args:
        dataset: the stream, or a function without arguments that makes it. Each iteration yields the same records
            in the same order. An iterator or generator, which is read only once, is refused.
        length: the number of records; the stream must yield exactly as many.
        id: identifies the records in fingerprints, instead of a digest of all.
        names: fields of an item that is a tuple, in order (`image`, `label` for two values unless given). Dicts,
            named tuples and dataclasses have their own names.

    Returns:
        A source of records. Tensors are numpy arrays, PIL images uint8 [C, H, W].

    Raises:
        PipelineError: it cannot be iterated over again, yields more or fewer records, fails, or yields what cannot
            be stored: anything but arrays, numbers, texts, bytes, and dicts, lists and tuples of these.

    Examples:
        >>> source = iterable(webdataset.WebDataset("shard-{00..09}.tar").decode("rgb8"), length=50_000)
    """
    return IterableRecords(dataset, length, id, names)


def _check_repeatable(items: Any) -> Any | Callable[[], Any]:
    if hasattr(items, "__next__"):
        raise PipelineError(
            f"iterable(): {type(items).__name__} is an iterator, which can be read only once; give the function "
            "that makes it, as in iterable(read_records, length=...)"
        )
    if not hasattr(items, "__iter__") and not callable(items):
        raise PipelineError(f"iterable(): {type(items).__name__} can neither be iterated over nor be called")
    return items


def _remove(spool: BinaryIO, pid: int) -> None:
    if os.getpid() == pid:  # and no forked child of it
        with contextlib.suppress(OSError):
            os.unlink(spool.name)
