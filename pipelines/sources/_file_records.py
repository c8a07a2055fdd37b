"""Bases of sources whose records lie in files, those of one file after those of the other.

`FileRecords` are ranges of bytes: members of archives, records of a spool. The index has the offset of each
record, 8 bytes, which all processes of a machine share; a record is one `pread`.
`GroupedRecords` are rows of files of which the least unit of reading holds many.
"""

from __future__ import annotations

import contextlib
import functools
import os
from abc import abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import pairwise
from typing import Any, BinaryIO, Self

import numpy as np
import numpy.typing as npt

from pipelines.errors import DataOutOfReach, PipelineError, SampleError
from pipelines.sources._base import Groups, Source
from pipelines.sources._files import OPEN_FILES, File, read_exactly
from pipelines.sources._labels import pack_values
from pipelines.sources._recent import RecentlyUsed

# Of a file, what a block shuffle reads together: long enough for a disk to stream, short enough for many.
GROUP_BYTES = 8 << 20
# Decoded groups that one process keeps, in bytes.
CACHE_BYTES = 512 << 20

Offsets = npt.NDArray[np.int64]
Readers = list[tuple[str, Callable[[int], Any]]]  # of each column, the field and a function row -> value


class MissingValue(Exception):
    """A value is missing in the file, or does not fit into an array; the message says which."""


class FilesSource(Source):
    """Records of several files.

    Args:
        files: that have the records.
        counts: of the records in each file.
        what: a record is, for the error that there is none.
    """

    _made_by: tuple[str, tuple[Any, ...], dict[str, Any]] = ("", (), {})

    def __new__(cls, *positional: Any, **named: Any) -> Self:
        """Takes note of what it is made of, for `renew`, before a subclass has changed that."""
        made = super().__new__(cls)
        made._made_by = (os.getcwd(), positional, named)
        return made

    def __init__(self, files: list[File], counts: Sequence[int], what: str = "record") -> None:
        self.files = files
        self._firsts = [0, *np.cumsum(counts).tolist()]  # record that each file begins with, and the number of all
        if not self._firsts[-1]:
            raise PipelineError(f"{self.kind}(): {', '.join(file.path for file in files)}: holds no {what}")

    def renew(self, renewed: dict[int, Source]) -> Source:
        if not any(file.was_changed() for file in self.files if type(file) is File):
            return self
        folder, positional, named = self._made_by
        with contextlib.chdir(folder):  # relative paths are of there
            return type(self)(*positional, **named)

    def __len__(self) -> int:
        return int(self._firsts[-1])

    def _find_file(self, index: int) -> int:
        """Number of the file that has a record."""
        return bisect_right(self._firsts, index) - 1

    def where(self, index: int) -> str:
        number = self._find_file(index)
        return f"{self.files[number].path}:row {index - self._firsts[number]}"

    def identity(self) -> Any:
        return {"source": self._describe_class(), "files": [file.identity() for file in self.files]}


class FileRecords(FilesSource):
    """Records that are ranges of bytes in files; a subclass parses them.

    Args:
        offsets: of each file, where its records begin, ascending, and where the last one ends: int64 [records +
            1].
        what: as above.
    """

    is_fork_safe = True

    def __init__(self, files: list[File], offsets: list[Offsets], what: str = "record") -> None:
        super().__init__(files, [len(bounds) - 1 for bounds in offsets], what)
        self._starts = np.concatenate([bounds[:-1] for bounds in offsets])
        self._ends = [int(bounds[-1]) for bounds in offsets]
        self._open = RecentlyUsed[int, BinaryIO](OPEN_FILES)
        self._ahead: set[int] = set()  # groups that the system was told of last

    def _locate(self, index: int) -> tuple[int, int, int]:
        """Number of the file that has a record, and the bounds of its bytes there."""
        number = self._find_file(index)
        is_last = index + 1 == self._firsts[number + 1]
        return number, int(self._starts[index]), self._ends[number] if is_last else int(self._starts[index + 1])

    def _open_file(self, number: int) -> tuple[BinaryIO, int]:
        return self.files[number].open(), 1

    def _read_bytes(self, index: int) -> bytes:
        """The bytes of a record."""
        number, start, end = self._locate(index)
        return self._read_ranges(index, number, ((start, end - start),))[0]

    def _read_ranges(self, index: int, number: int, ranges: Iterable[tuple[int, int]]) -> list[bytes]:
        try:
            file = self._open.get(number, self._open_file)  # held, so that no other thread closes it
            descriptor = file.fileno()
            return [read_exactly(descriptor, size, start) for start, size in ranges]
        except DataOutOfReach:
            raise
        except (OSError, PipelineError) as error:
            self._open.drop(number)
            raise SampleError(index, self.where(index), f"cannot be read: {error}") from error

    @functools.cached_property
    def groups(self) -> Groups:
        """Bounds of ranges of `GROUP_BYTES` within each file."""
        file = np.searchsorted(self._firsts, np.arange(len(self)), side="right")
        changes = (np.diff(file) != 0) | (np.diff(self._starts // GROUP_BYTES) != 0)
        return np.concatenate([[0], np.flatnonzero(changes) + 1, [len(self)]]).astype(np.int64)

    def will_read(self, indices: npt.NDArray[np.int64]) -> None:
        """Asks the kernel to read the groups of these records into the page cache."""
        groups = set(np.unique(np.searchsorted(self.groups, indices, side="right") - 1).tolist())
        for group in groups - self._ahead:
            number, begin, _ = self._locate(int(self.groups[group]))
            _, _, end = self._locate(int(self.groups[group + 1]) - 1)
            with contextlib.suppress(OSError, PipelineError):  # whoever reads the records says what is wrong
                file = self._open.get(number, self._open_file)
                os.posix_fadvise(file.fileno(), begin, end - begin, os.POSIX_FADV_WILLNEED)
        self._ahead = groups


class GroupedRecords(FilesSource):
    """Rows that are decoded in groups of many, which each process caches.

    Args:
        files, counts: as above.
        bounds: of the groups: strictly ascending from 0 to the number of rows.

    Attributes:
        columns: fields of the records.
    """

    columns: Collection[str]
    keeps_missing: bool | None = None  # of a source with the argument `missing`

    def __init__(
        self, files: list[File], counts: Sequence[int], bounds: list[int], cache_bytes: int, what: str = "row"
    ) -> None:
        super().__init__(files, counts, what)
        self._bounds = bounds
        self._cache_bytes = cache_bytes
        self._cache = RecentlyUsed[int, Readers](cache_bytes)

    @abstractmethod
    def _decode(self, group: int) -> tuple[Readers, int]:
        """Decodes a group of rows: what reads each column, and the size in bytes."""

    def _read(self, index: int) -> dict[str, Any]:
        name = ""
        try:
            group = bisect_right(self._bounds, index) - 1
            row, record = index - self._bounds[group], {}
            for name, read in self._cache.get(group, self._decode):
                record[name] = read(row)
            return record
        except MissingValue as error:
            remedy = f'; {self.kind}(missing="nan") keeps missing values' if self.keeps_missing is False else ""
            raise SampleError(index, self.where(index), f"column {name!r} {error}{remedy}") from None
        except (SampleError, DataOutOfReach, MemoryError):
            raise
        except Exception as error:  # Arrow and h5py raise what they like on a damaged file
            raise SampleError(index, self.where(index), f"cannot be read: {format_error(error)}") from error

    def column(self, field: str) -> npt.NDArray[Any]:
        if field not in self.columns:
            raise self._missing_field(field, self.columns)
        values = list[Any]()
        for group, (first, last) in enumerate(pairwise(self._bounds)):
            try:
                values += map(dict(self._cache.get(group, self._decode))[field], range(last - first))
            except Exception:
                for index in range(first, last):
                    self._read(index)  # says which record it is
                raise
        return pack_values(values)

    def forget(self) -> None:
        self._cache = RecentlyUsed(self._cache_bytes)

    @property
    def groups(self) -> Groups | None:
        """Bounds of the groups, over all files."""
        return np.array(self._bounds, np.int64)


def format_error(error: Exception) -> str:
    """The message of an error in one line; that of a KeyError is its key, quoted."""
    text = error.args[0] if isinstance(error, KeyError) and error.args else error
    return " ".join(str(text).split()) or type(error).__name__
