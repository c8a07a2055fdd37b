"""Keeps the large arrays of a declaration in files of its run, `data/<name>-<digest>.npy`, and out of its pickle.

What a run trains with is then not the memory that the user's program may change: every process maps the files, so
that the processes of a machine share one copy, in the page cache. Smaller arrays are copied into the pickle.
"""

from __future__ import annotations

import math
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from ensemble.store.digests import digest_file
from ensemble.store.errors import DamagedError, StoreError
from ensemble.store.event_log import read_files
from ensemble.store.files import write_atomically
from pipelines.sources._files import File
from pipelines.sources._mapped import MappedArray

if TYPE_CHECKING:
    from ensemble.store.run_paths import RunPaths

AnyArray = npt.NDArray[Any]

#: Arrays of so many bytes have files of their own.
LEAST_BYTES = 2**20

_NAME = re.compile(r"[\w.]{1,40}-[0-9a-f]{32}\.npy", re.ASCII)


class Place(NamedTuple):
    """Where an array is.

    Attributes:
        file: name in the folder `data`.
        offset: of its first element, in bytes.
        dtype, shape: as a numpy array's.
        is_fortran: whether its first index changes fastest.
        is_column: whether it is a column of `sources.arrays`, which nobody may write; else each process has a copy
            of the pages that it writes to.
    """

    file: str
    offset: int
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    is_fortran: bool
    is_column: bool

    @property
    def nbytes(self) -> int:
        return self.dtype.itemsize * math.prod(self.shape)

    def open(self, folder: Path) -> AnyArray | MappedArray:
        """Returns the array in the folder of a run.

        Raises:
            DamagedError: the file is missing, which a column says when it is read, or was cut off.
        """
        path = folder.absolute() / self.file
        try:
            file = File.of(str(path))
        except OSError as error:
            if not self.is_column:
                raise DamagedError(f"{path} cannot be read: {error.strerror or error}") from None
            file = File(str(path), 0, 0)
        else:
            if file.size != self.offset + self.nbytes:
                raise DamagedError(f"{path} is damaged: it has {file.size} bytes, not {self.offset + self.nbytes}")
        if not self.is_column:
            order: Literal["C", "F"] = "F" if self.is_fortran else "C"
            return np.asarray(np.memmap(path, self.dtype, "c", self.offset, self.shape, order))
        sizes = self.shape if self.is_fortran else self.shape[::-1]
        strides = [self.dtype.itemsize * math.prod(sizes[:n]) for n in range(len(sizes))]
        strides = strides if self.is_fortran else strides[::-1]
        return MappedArray(file, self.offset, self.dtype, self.shape, tuple(strides))


def name_to_digest(file: str) -> str:
    """The digest of an array's file, which its name has."""
    return f"xxh3:{Path(file).stem.rpartition('-')[2]}"


def is_name(file: str) -> bool:
    """Whether a file of the folder `data` has the name of an array's."""
    return _NAME.fullmatch(file) is not None


def save_array(path: Path, array: AnyArray) -> None:
    """Saves an array in a file whose name has its digest, unless it is there already.

    Raises:
        WriteError: it cannot be written.
        StoreError: it has been changed since the declaration was pickled.
    """
    digest = name_to_digest(path.name)
    if path.is_file() and digest_file(path) == digest:
        return
    path.parent.mkdir(mode=0o700, exist_ok=True)  # private, also where a group may read the run

    def write(temporary: Path) -> None:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as opened:
            np.lib.format.write_array(opened, array, allow_pickle=False)

    if write_atomically(path, write, array.nbytes) != digest:
        path.unlink()
        raise StoreError(
            f"the array {path.stem.rpartition('-')[0]!r} was changed while it was submitted: submit it again, and "
            "change it only when submit() has returned"
        )


def list_arrays(run_dir: RunPaths) -> set[Path]:
    """The files of the arrays of the declarations that a run keeps, whether they are there or not."""
    logged = read_files(run_dir.events)
    every = [path.name for file in logged.files if (path := run_dir.path / file).parent == run_dir.data]
    declarations = (run_dir.ensemble_file, *run_dir.path.glob("code/*/ensemble.pkl"))
    digests = (digest_file(path) for path in declarations if path.is_file())
    return {run_dir.data / name for digest in digests for name in logged.arrays.get(digest, every)}


def remove_unused_arrays(run_dir: RunPaths) -> None:
    """Remove the arrays that a run has saved, by its log, and that no declaration has any more; no other files.

    This process has the lock of the run's log.
    """
    logged = read_files(run_dir.events)
    saved = {run_dir.data / name for names in logged.arrays.values() for name in names if is_name(name)}
    for path in saved - list_arrays(run_dir):
        path.unlink(missing_ok=True)
