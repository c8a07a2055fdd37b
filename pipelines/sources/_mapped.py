"""Arrays in mapped files: in which file memory lies, and arrays that are pickled as a place in a file.

A process that receives such an array maps the file for itself, so that all processes of a machine share the pages
of the file in the page cache, and none has a copy.
"""

from __future__ import annotations

import bisect
import functools
import mmap
import os
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from pipelines.errors import PipelineError
from pipelines.sources._files import File


class MappedPlace(NamedTuple):
    """The memory of a buffer as a range of bytes of a file."""

    file: File
    offset: int
    size: int


class MappedFiles:
    """Where this process has mapped some files (proc_pid_maps(5))."""

    def __init__(self, paths: Iterable[str]) -> None:
        wanted = {os.path.realpath(path) for path in paths}
        self._files = functools.cache(lambda path: File.of(path).identify())
        self._ranges: list[tuple[int, int, int, str]] = []  # first and last address, offset in the file, path
        with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape", newline="\n") as lines:
            for line in lines if wanted else ():
                bounds, _, offset, _, _, *path = line.rstrip("\n").split(maxsplit=5)
                if path and path[0] in wanted:
                    start, end = (int(bound, 16) for bound in bounds.split("-"))
                    mapped = (start, end, int(offset, 16), path[0])
                    if self._ranges:
                        first, last, at, before = self._ranges[-1]
                        if (last, at + last - first, before) == (start, mapped[2], path[0]):
                            mapped = (first, end, at, before)  # the kernel has split one mapping in two
                            self._ranges.pop()
                    self._ranges.append(mapped)

    def locate(self, memory: memoryview) -> MappedPlace | None:
        """The place of a buffer; None for one that lies in no file."""
        if not memory.nbytes:
            return None
        address = np.frombuffer(memory, np.uint8).ctypes.data
        number = bisect.bisect_right(self._ranges, address, key=lambda mapped: mapped[0]) - 1
        if number < 0 or address + memory.nbytes > self._ranges[number][1]:
            return None
        start, _, offset, path = self._ranges[number]
        return MappedPlace(self._files(path), offset + address - start, memory.nbytes)


class MappedArray:
    """An array in a file, which each process maps at first use: pickled, it is its place in the file.

    Attributes:
        file: as it was when this was made.
        offset: of the first element, in bytes.
    """

    def __init__(
        self, file: File, offset: int, dtype: np.dtype[Any], shape: tuple[int, ...], strides: tuple[int, ...]
    ) -> None:
        self.file, self.offset, self.dtype, self.shape, self.strides = file, offset, dtype, shape, strides
        self._array: np.ndarray[Any, Any] | None = None
        self._mapping: mmap.mmap | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_array": None, "_mapping": None}

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: Any) -> Any:
        return self.array[index]

    @property
    def array(self) -> np.ndarray[Any, Any]:
        """The read-only array."""
        if self._array is None:
            with self.file.open() as handle:
                try:
                    mapping = mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ)
                except OSError as error:
                    raise PipelineError(f"{self.file.path}: cannot be mapped: {error.strerror}") from error
            self._array = np.ndarray(self.shape, self.dtype, mapping, self.offset, self.strides)
            self._mapping = mapping
        return self._array

    def find_whole(self) -> np.ndarray[Any, Any] | None:
        """The array; None if its file is gone, changed or shorter: who reads behind its end is killed (SIGBUS)."""
        try:
            array = self.array
            return array if self._mapping is not None and self._mapping.size() >= len(self._mapping) else None
        except (PipelineError, OSError):
            return None

    def identity(self) -> list[Any]:
        """Describes the place as a JSON value."""
        return [*self.file.identity(), self.offset, self.dtype.str, list(self.shape), list(self.strides)]


def locate(array: np.ndarray[Any, Any]) -> MappedArray | None:
    """Returns an `np.memmap`, or a view of one, as a place in its file.

    None for any other array, and where the file was removed or replaced, or does not get what is written (mode
    "c").
    """
    root: Any = array
    memmap: np.memmap[Any, Any] | None = None
    while isinstance(root, np.ndarray):
        memmap = root if isinstance(root, np.memmap) else memmap
        root = root.base
    if memmap is None or not isinstance(root, mmap.mmap) or memmap.filename is None:
        return None
    if memmap.mode == "c" or array.dtype.hasobject or not array.size:
        return None
    if memmap.mode != "r":
        memmap.flush()  # the time of change is that of the last byte written
    try:
        file = File.of(str(memmap.filename)).identify()  # before it is looked at whether this is what is mapped
        place = MappedFiles([file.path]).locate(memoryview(root))
    except (OSError, PipelineError):
        return None
    if place is None:
        return None
    offset = place.offset + array.ctypes.data - np.frombuffer(root, np.uint8).ctypes.data
    return MappedArray(file, offset, array.dtype, array.shape, array.strides)
