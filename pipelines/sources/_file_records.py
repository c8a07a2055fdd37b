"""Base of sources whose records lie one after the other in files: rows of text, records with a length before them.

The index has the offset of each record, 8 bytes, which all processes of a machine share; a record is one `pread`.
"""

from __future__ import annotations

import contextlib
import functools
import os
from bisect import bisect_right
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from pipelines.errors import PipelineError, SampleError
from pipelines.sources._base import Groups, Source
from pipelines.sources._files import File, OpenFiles, read_exactly

# Of a file, what a block shuffle reads together: long enough for a disk to stream, short enough for many.
GROUP_BYTES = 8 << 20

Offsets = npt.NDArray[np.int64]


def group_by_place(firsts: Sequence[int], starts: Offsets) -> Groups:
    """Bounds of groups of records: ranges of `GROUP_BYTES` within each file.

    Args:
        firsts: the first record of each file.
        starts: where each record begins in its file, int64 [n].
    """
    file = np.searchsorted(firsts, np.arange(len(starts)), side="right")
    changes = (np.diff(file) != 0) | (np.diff(starts // GROUP_BYTES) != 0)
    return np.concatenate([[0], np.flatnonzero(changes) + 1, [len(starts)]]).astype(np.int64)


class FileRecords(Source):
    """Records that are ranges of bytes in files; a subclass parses them.

    Args:
        files: that have the records.
        offsets: of each file, where its records begin, ascending, and where the last one ends: int64 [records +
            1].

    Raises:
        PipelineError: there is no record.
    """

    is_fork_safe = True

    def __init__(self, files: list[File], offsets: list[Offsets]) -> None:
        self.files = files
        counts = [len(each) - 1 for each in offsets]
        self._firsts = [0, *np.cumsum(counts).tolist()]  # record that each file begins with, and the number of all
        if not self._firsts[-1]:
            raise PipelineError(f"{self.kind}(): {', '.join(file.path for file in files)}: holds no record")
        self._starts = np.concatenate([each[:-1] for each in offsets])
        self._ends = [int(each[-1]) for each in offsets]
        self._open = OpenFiles()
        self._ahead: set[int] = set()  # groups that the system was told of last

    def __len__(self) -> int:
        return int(self._firsts[-1])

    def _locate(self, index: int) -> tuple[int, int, int]:
        """Number of the file that has a record, and the bounds of its bytes there."""
        number = bisect_right(self._firsts, index) - 1
        is_last = index + 1 == self._firsts[number + 1]
        return number, int(self._starts[index]), self._ends[number] if is_last else int(self._starts[index + 1])

    def _read_bytes(self, index: int) -> bytes:
        """The bytes of a record.

        Raises:
            SampleError: they cannot be read.
        """
        number, start, end = self._locate(index)
        try:
            file = self._open.get(number, self.files[number])  # held, so that no other thread closes it
            return read_exactly(file.fileno(), end - start, start)
        except (OSError, PipelineError) as error:
            self._open.forget(number)
            raise SampleError(index, self.where(index), f"cannot be read: {error}") from error

    @functools.cached_property
    def groups(self) -> Groups:
        """Bounds of ranges of `GROUP_BYTES` within each file."""
        return group_by_place(self._firsts, self._starts)

    def will_read(self, indices: npt.NDArray[np.int64]) -> None:
        """Asks the kernel to read the groups of these records into the page cache."""
        groups = set(np.unique(np.searchsorted(self.groups, indices, side="right") - 1).tolist())
        for group in groups - self._ahead:
            number, begin, _ = self._locate(int(self.groups[group]))
            _, _, end = self._locate(int(self.groups[group + 1]) - 1)
            with contextlib.suppress(OSError, PipelineError):  # whoever reads the records says what is wrong
                file = self._open.get(number, self.files[number])
                os.posix_fadvise(file.fileno(), begin, end - begin, os.POSIX_FADV_WILLNEED)
        self._ahead = groups

    def where(self, index: int) -> str:
        number = bisect_right(self._firsts, index) - 1
        return f"{self.files[number].path}:row {index - self._firsts[number]}"

    def identity(self) -> Any:
        return {"source": self._describe_class(), "files": [file.identity() for file in self.files]}
