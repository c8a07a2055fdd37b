"""Keeps the large arrays of a declaration in files of its run, `data/<name>-<digest>.npy`, and out of its pickle.

What a run trains with is then not the memory that the user's program may change: every process maps the files, so
that the processes of a machine share one copy, in the page cache. Smaller arrays are copied into the pickle.

Where the directory is to keep no data (`Ensemble(keep_data=False)`), the arrays of `sources.arrays`, and large
ones of functions, are in memory files of the process that drives the run. `data/<name>-<digest>.memory` is then a
link to such a file, in /proc: it is gone with that process, however it ends.
"""

from __future__ import annotations

import errno
import io
import math
import os
import pickle
import re
import sys
import types
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from ensemble.store._compat import make_classes_anew
from ensemble.store.digests import digest_file
from ensemble.store.errors import DamagedError, StoreError
from ensemble.store.files import write_atomically
from ensemble.store.old_names import Unpickler
from pipelines.fingerprint import is_ours
from pipelines.library_settings import apply_settings, find_settings
from pipelines.memory_pickle import Pickler
from pipelines.sources._arrays import Arrays
from pipelines.sources._files import File
from pipelines.sources._mapped import MappedArray

AnyArray = npt.NDArray[Any]

#: Arrays of so many bytes have files of their own.
LEAST_BYTES = 2**20
#: The folder of these files in a run directory.
FOLDER = "data"

#: Ends of the names of files that are kept, and of links to memory.
KEPT, IN_MEMORY = ".npy", ".memory"

_NAME = re.compile(r"[\w.]{1,40}-[0-9a-f]{32}\.(?:npy|memory)", re.ASCII)
_held: dict[Path, int] = {}  # the links of this process, and the descriptors of the memory
#: Kinds of dtypes that a file of numpy's has as they are: numbers, times, texts of one length, and structures.
_PLAIN = "biufcmMSUV"
#: What a copy within a process goes into; everything else that is not ours is taken as it is.
_CONTAINERS = (dict, list, tuple, set, frozenset, np.ndarray, np.generic, np.dtype, pickle.PickleBuffer)


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
        """The size of the array."""
        return self.dtype.itemsize * math.prod(self.shape)

    def open(self, folder: Path) -> AnyArray | MappedArray:
        """Returns the array in the folder of a run.

        Raises:
            DamagedError: the file is missing, which a column says when it is read, or was cut off.
        """
        path = folder.absolute() / self.file
        try:
            if path.suffix == IN_MEMORY and not is_held(path):
                raise FileNotFoundError(errno.ENOENT, "the process that had it in its memory has ended")
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


class DeclarationPickler(Pickler):
    """Pickles a declaration without its large arrays.

    Attributes:
        arrays: name of its file -> array.
    """

    def __init__(
        self, file: BinaryIO, places: dict[int, tuple[Any, Place]] | None = None, *, keeps_data: bool = True
    ) -> None:
        super().__init__(file)
        self._end = KEPT if keeps_data else IN_MEMORY
        self.arrays: dict[str, AnyArray] = {}
        self.places = {} if places is None else places  # by the id of an object, which is kept with it
        self._columns: dict[int, str] = {}

    def reducer_override(self, obj: Any) -> Any:
        """See `pickle.Pickler.reducer_override`."""
        if isinstance(obj, Arrays):
            obj.identity()  # the digest of what is about to be kept, which no other process computes again
            if self._end == IN_MEMORY:
                self._columns |= {id(values): name for name, values in obj.list_arrays()}
            self._columns |= {id(values): name for name, values in obj.columns.items()}
        torch = sys.modules.get("torch")
        if torch is not None and type(obj) is torch.Tensor and _is_plain(obj, is_whole=self._end == KEPT):
            return torch.from_numpy, (obj.numpy(),)
        return super().reducer_override(obj)

    def persistent_id(self, obj: Any) -> Any:
        """The place of a large array, else None."""
        kind = type(obj)
        if kind is MappedArray and is_name(os.path.basename(obj.file.path)):
            self._columns[id(obj)] = os.path.basename(obj.file.path).rpartition("-")[0]
            return self._find_place(obj, obj.array)  # of another run, whose directory may go
        if (
            (kind is not np.ndarray and kind is not np.memmap)
            or not obj.nbytes
            or obj.dtype.kind not in _PLAIN
            or obj.dtype.hasobject
        ):
            return None
        is_left_out = self._end == IN_MEMORY and id(obj) in self._columns
        return self._find_place(obj, obj) if is_left_out or obj.nbytes >= LEAST_BYTES else None

    def _find_place(self, obj: Any, array: AnyArray) -> Place:
        if id(obj) not in self.places:
            column = self._columns.get(id(obj))
            label = re.sub(r"[^\w.]", "_", column or "array", flags=re.ASCII)[:40]
            sink = _Digest()
            np.lib.format.write_array(sink, np.asarray(array), allow_pickle=False)
            is_fortran = array.flags.f_contiguous and not array.flags.c_contiguous
            file, offset = f"{label}-{sink.digest.hexdigest()}{self._end}", sink.size - array.nbytes
            place = Place(file, offset, array.dtype, array.shape, is_fortran, column is not None)
            self.places[id(obj)] = (obj, place)
            self.arrays[file] = np.asarray(array)
        return self.places[id(obj)][1]


def _is_plain(tensor: Any, *, is_whole: bool) -> bool:
    """Whether numpy can have a tensor's memory, and nothing is lost by that.

    Args:
        is_whole: leave other orders of the axes, and views of a part of a storage, to torch.
    """
    if tensor.nbytes < LEAST_BYTES or tensor.requires_grad or tensor.is_sparse or tensor.device.type != "cpu":
        return False
    try:
        flags, nbytes = tensor.numpy().flags, tensor.untyped_storage().nbytes()
    except (RuntimeError, TypeError):
        return False
    return not vars(tensor) and (not is_whole or (flags.forc and nbytes == tensor.nbytes))


class _Digest:
    """Where numpy writes a file of which only the digest and the size are wanted."""

    def __init__(self) -> None:
        import xxhash

        self.digest, self.size = xxhash.xxh3_128(), 0

    def write(self, data: bytes) -> None:
        self.digest.update(data)
        self.size += len(data)


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


def hold_array(path: Path, array: AnyArray) -> None:
    """Writes an array to the memory of this process, and a link to that; `release_arrays` ends both.

    Raises:
        OSError: there is no room.
    """
    descriptor = _held[path] = os.memfd_create(path.name, os.MFD_CLOEXEC)
    with os.fdopen(os.dup(descriptor), "wb") as file:
        np.lib.format.write_array(file, array, allow_pickle=False)
    path.parent.mkdir(mode=0o700, exist_ok=True)
    path.unlink(missing_ok=True)
    path.symlink_to(_describe_memory(descriptor))


def is_held(link: Path) -> bool:
    """Whether a link leads to the memory for which it was made: its process may have ended, and its number may be
    another process's, with another file under that descriptor.
    """
    try:
        return os.readlink(os.readlink(link)).removesuffix(" (deleted)") == f"/memfd:{link.name}"
    except OSError:
        return False


def release_arrays(folder: Path) -> None:
    """Frees the arrays of a run that this process holds in memory, and removes links to memory that is gone.

    This process has the lock of the run's log.
    """
    for path in [path for path in list(_held) if path.parent == folder]:
        descriptor = _held.pop(path)
        if path.is_symlink() and os.readlink(path) == _describe_memory(descriptor):
            path.unlink()
        os.close(descriptor)
    for path in folder.glob(f"*{IN_MEMORY}"):
        if is_name(path.name) and path.is_symlink() and not is_held(path):
            path.unlink(missing_ok=True)


def _describe_memory(descriptor: int) -> str:
    return f"/proc/{os.getpid()}/fd/{descriptor}"


class DeclarationUnpickler(Unpickler):
    """Unpickles a declaration.

    Args:
        file: with the pickle.
        folder: with the large arrays.
        shared: objects that are taken as they are, by number.
        takes_settings: this process gets the library settings that were pickled before it.
    """

    def __init__(
        self, file: BinaryIO, folder: Path, shared: list[Any] | None = None, *, takes_settings: bool = False
    ) -> None:
        super().__init__(file)
        self._folder, self._shared, self._takes_settings = folder, shared or [], takes_settings

    def load(self) -> Any:
        """Returns the declaration."""
        loaded = super().load()
        if not isinstance(loaded, dict):  # earlier versions wrote no settings
            return loaded
        if self._takes_settings:
            apply_settings(loaded)
        return super().load()

    def persistent_load(self, pid: Any) -> Any:
        """An array that is not in the pickle, or an object of this process."""
        return self._shared[pid] if isinstance(pid, int) else Place(*pid).open(self._folder)


class Declaration:
    """A pickled declaration: what it is made of while it is saved.

    Attributes:
        content: the pickle.
        arrays: name of its file in `data` -> array that is not in the pickle.
    """

    def __init__(self, ensemble: Any) -> None:
        self._ensemble = ensemble
        self._keeps_data = getattr(ensemble, "keep_data", True)
        with io.BytesIO() as file:
            pickler = DeclarationPickler(file, keeps_data=self._keeps_data)
            pickler.dump(find_settings())
            pickler.dump(ensemble)
            self.content, self.arrays, self._places = file.getvalue(), pickler.arrays, pickler.places

    def load(self, folder: Path, *, is_in_process: bool = False) -> Any:
        """The declaration with data of its own, the large arrays in a folder.

        Args:
            is_in_process: with the functions and the objects of this process; else as other processes load it.

        Raises:
            StoreError: a part of it cannot be unpickled.
        """
        try:
            return self._load_here(folder) if is_in_process else self._load_anew(folder)
        except StoreError:
            raise
        except Exception as error:  # objects raise whatever they like from __setstate__
            raise StoreError(
                f"ensemble {self._ensemble.name!r} can be pickled, but not unpickled, as all processes "
                f"of a run do: {type(error).__name__}: {error}"
            ) from error

    def _load_anew(self, folder: Path) -> Any:
        """The declaration as other processes load it.

        Its functions and classes are not those of the modules here: whoever receives one of them from this process
        has it by value, and does not import what the user has edited meanwhile.
        """
        with make_classes_anew():
            return DeclarationUnpickler(io.BytesIO(self.content), folder).load()

    def _load_here(self, folder: Path) -> Any:
        """The declaration with the functions and the objects of this process."""
        shared: list[Any] = []
        train, places = self._ensemble.train, self._places

        class SharingPickler(DeclarationPickler):
            def persistent_id(self, obj: Any) -> Any:
                place = super().persistent_id(obj)
                if place is not None or obj is train or not _is_shared(obj):
                    return place
                shared.append(obj)
                return len(shared) - 1

        with io.BytesIO() as file:
            SharingPickler(file, places, keeps_data=self._keeps_data).dump(self._ensemble)
            file.seek(0)
            return DeclarationUnpickler(file, folder, shared).load()


def _is_shared(value: Any) -> bool:
    """Whether a copy within a process has the very object: functions, classes, what is the user's."""
    if isinstance(value, type | types.ModuleType | types.FunctionType | types.BuiltinFunctionType):
        return True
    kind = type(value)
    return not (is_ours(kind) or issubclass(kind, _CONTAINERS) or kind.__module__ == "builtins")
