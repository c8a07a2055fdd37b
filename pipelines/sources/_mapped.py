"""Arrays in mapped files: in which file memory lies, and arrays that are pickled as a place in a file.

A process that receives such an array maps the file for itself, so that all processes of a machine share the pages
of the file in the page cache, and none has a copy.
"""

from __future__ import annotations

import bisect
import mmap
import os
from typing import Any, NamedTuple

import numpy as np

from pipelines.errors import PipelineError
from pipelines.sources._files import File

_DELETED = " (deleted)"


class _Mapping(NamedTuple):
    start: int
    end: int
    offset: int
    inode: int
    path: str

    def is_continued_by(self, other: _Mapping) -> bool:
        """Whether the kernel has split one mapping into these two."""
        is_adjacent = self.end == other.start and self.offset + self.end - self.start == other.offset
        return is_adjacent and (self.inode, self.path) == (other.inode, other.path)


class FileMappings:
    """The files that this process has mapped, as they are when this is made (proc_pid_maps(5)).

    Left out is what differs from the file, or may: mappings that are private and writable, and deleted files.
    """

    def __init__(self) -> None:
        self._mappings: list[_Mapping] = []
        self._files: dict[tuple[str, int], File | None] = {}
        with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as lines:
            for line in lines:
                bounds, modes, offset, _, inode, *path = line.rstrip("\n").split(maxsplit=5)
                is_copy = modes[1] == "w" and modes[3] == "p"
                if modes[0] != "r" or is_copy or not path or inode == "0" or path[0].endswith(_DELETED):
                    continue
                start, end = (int(each, 16) for each in bounds.split("-"))
                self._add(_Mapping(start, end, int(offset, 16), int(inode), path[0]))
        self._starts = [mapping.start for mapping in self._mappings]

    def _add(self, new: _Mapping) -> None:
        last = self._mappings[-1] if self._mappings else None
        if last is not None and last.is_continued_by(new):
            self._mappings[-1] = last._replace(end=new.end)
        else:
            self._mappings.append(new)

    def find(self, address: int, nbytes: int) -> tuple[File, int] | None:
        """Returns the file, and the offset in it, of which these bytes of memory are; None if of no file."""
        number = bisect.bisect_right(self._starts, address) - 1
        if number < 0 or address + nbytes > self._mappings[number].end:
            return None
        mapping = self._mappings[number]
        file = self._find_file(mapping.path, mapping.inode)
        return None if file is None else (file, mapping.offset + address - mapping.start)

    def _find_file(self, path: str, inode: int) -> File | None:
        key = (path, inode)
        if key not in self._files:
            try:
                # Another file may have taken the path since.
                self._files[key] = File.of(path).identify() if os.stat(path).st_ino == inode else None
            except (OSError, PipelineError):
                self._files[key] = None
        return self._files[key]


class MappedArray:
    """An array in a file, which each process maps at first use: pickled, it is its place in the file.

    Attributes:
        file: as it was when this was made.
        offset: of the first element, in bytes.
        dtype, shape, strides: as a numpy array's.
    """

    def __init__(
        self, file: File, offset: int, dtype: np.dtype[Any], shape: tuple[int, ...], strides: tuple[int, ...]
    ) -> None:
        self.file, self.offset, self.dtype, self.shape, self.strides = file, offset, dtype, shape, strides
        self._array: np.ndarray[Any, Any] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_array": None}

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: Any) -> Any:
        return self.array[index]

    @property
    def array(self) -> np.ndarray[Any, Any]:
        """The read-only array.

        Raises:
            PipelineError: the file is missing, or was changed since.
        """
        if self._array is None:
            mapping = map_file(self.file)
            self._array = np.ndarray(self.shape, self.dtype, mapping, self.offset, self.strides)
        return self._array

    def identity(self) -> list[Any]:
        """Describes the place as a JSON value."""
        return [*self.file.identity(), self.offset, self.dtype.str, list(self.shape), list(self.strides)]


def map_file(file: File) -> mmap.mmap:
    """Maps a whole file, read-only.

    Raises:
        PipelineError: the file is missing, was changed since it was indexed, or cannot be mapped.
    """
    with file.open() as handle:
        try:
            return mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise PipelineError(f"{file.path}: cannot be mapped: {error.strerror}") from error


def locate(array: np.ndarray[Any, Any], mappings: FileMappings) -> MappedArray | None:
    """Returns an array in mapped memory as a place in its file; None if its memory is of no file."""
    if array.dtype.hasobject or not array.size:
        return None
    memmap = _find_memmap(array)
    if memmap is not None and memmap.mode in ("r+", "w+"):
        memmap.flush()  # the time of change is that of the last byte written
    low, high = np.lib.array_utils.byte_bounds(array)
    found = mappings.find(low, high - low)
    if found is None:
        return None
    file, offset = found
    return MappedArray(file, offset + array.ctypes.data - low, array.dtype, array.shape, array.strides)


def is_memmap(array: np.ndarray[Any, Any]) -> bool:
    """Whether an array is an `np.memmap`, or a view of one."""
    return _find_memmap(array) is not None


def _find_memmap(array: Any) -> np.memmap[Any, Any] | None:
    while isinstance(array, np.ndarray):
        if isinstance(array, np.memmap):
            return array
        array = array.base
    return None
