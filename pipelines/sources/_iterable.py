"""Source of a stream: anything that can be iterated over again and again, but not be indexed.

A batch must be a function of its position alone, in any process, at any time, also after a resume. A stream cannot
give that: whoever wants record one million has to read all before it, and each preparation worker would read
everything. So the stream is read once, when the source is made, into a spool (`_spool.py`), from which all
processes read by index. Its records' digests identify it.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from pipelines.checks import check_integer
from pipelines.errors import PipelineError, SampleError
from pipelines.fingerprint import known_as
from pipelines.sources._file_records import FileRecords
from pipelines.sources._items import UnnamedValues, check_names, make_record
from pipelines.sources._recent import ThreadLock
from pipelines.sources._record_codec import decode
from pipelines.sources._spool import check_iterated, write_spool


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
    ) -> None:
        self._items = _check_repeatable(items)
        self._called = check_names("iterable", names)
        self._id = id
        count = check_integer("iterable: length", length, 1)
        self._spool = write_spool(None if folder is None else os.fspath(folder), self._iterate(), count)
        found = self._spool.find()
        assert found is not None
        super().__init__([found], [self._spool.offsets])

    def _iterate(self) -> Iterator[dict[str, Any]]:
        for count, item in enumerate(check_iterated(self._items)):
            try:
                yield make_record(item, self._called)
            except UnnamedValues as error:
                raise PipelineError(f"iterable(): record {count}: {error}") from None

    def _read(self, index: int) -> dict[str, Any]:
        if not os.path.exists(self.files[0].path):
            self._restore(index)
        return decode(self._read_bytes(index))

    def _restore(self, index: int) -> None:
        """Reads the stream again, on a machine that does not have the spool."""
        with _lock:
            if not os.path.exists(self.files[0].path):
                try:
                    self.files = [self._spool.restore(self._iterate())]
                except PipelineError as error:
                    raise SampleError(index, self.where(index), str(error)) from error
                self._open.drop(0)

    def where(self, index: int) -> str:
        return f"{self._describe_items()}:record {index}"

    def _describe_items(self) -> str:
        named = getattr(self._items, "__qualname__", None)
        return f"{named}()" if named else type(self._items).__name__

    def identity(self) -> Any:
        if self._id is not None:
            return {"source": self._describe_class(), "id": self._id, "count": len(self)}
        digest = hashlib.sha256(self._spool.digests.astype("<u8").tobytes()).hexdigest()
        return {"source": self._describe_class(), "records": digest}


_lock = ThreadLock()


def iterable(
    dataset: Any,
    length: int,
    id: str | None = None,
    names: Sequence[str] | None = None,
    folder: str | os.PathLike[str] | None = None,
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
        length: the number of records; the stream must yield exactly as many.
        id: identifies the records in fingerprints, instead of a digest of all.
        names: fields of an item that is a tuple, in order (`image`, `label` for two values unless given). Dicts,
            named tuples and dataclasses have their own names.
        folder: where the records are written, instead of the folder for temporary files (`TMPDIR`).

    Returns:
        A source of records. Tensors are numpy arrays, PIL images uint8 [C, H, W].

    Raises:
        PipelineError: it cannot be iterated over again, yields more or fewer records, fails, or yields what cannot
            be stored: anything but arrays, numbers, texts, bytes, and dicts, lists and tuples of these.

    Examples:
        >>> source = iterable(webdataset.WebDataset("shard-{00..09}.tar").decode("rgb8"), length=50_000)
    """
    return IterableRecords(dataset, length, id, names, folder)


def _check_repeatable(items: Any) -> Any | Callable[[], Any]:
    if hasattr(items, "__next__"):
        raise PipelineError(
            f"iterable(): {type(items).__name__} is an iterator, which can be read only once; give the function "
            "that makes it, as in iterable(read_records, length=...)"
        )
    if not hasattr(items, "__iter__") and not callable(items):
        raise PipelineError(f"iterable(): {type(items).__name__} can neither be iterated over nor be called")
    return items
