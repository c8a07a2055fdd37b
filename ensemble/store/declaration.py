"""Pickles a declaration without its large arrays, which files of the run have (`ensemble.store.frozen_arrays`)."""

from __future__ import annotations

import contextlib
import functools
import io
import os
import pickle
import re
import sys
import types
from collections.abc import Iterable
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from ensemble.store._compat import make_classes_anew
from ensemble.store.errors import OtherPythonError, StoreError
from ensemble.store.frozen_arrays import LEAST_BYTES, AnyArray, Place, is_name
from ensemble.user_code.fingerprint import PYTHON
from pipelines.environment.library_settings import apply_settings, find_settings
from pipelines.fingerprint import is_ours
from pipelines.ipc.memory_pickle import Pickler
from pipelines.sources._arrays import Arrays
from pipelines.sources._mapped import MappedArray

#: Kinds of dtypes that a file of numpy's has as they are: numbers, times, texts of one length, and structures.
_PLAIN = "biufcmMSUV"
#: What a copy within a process goes into; everything else that is not ours is taken as it is.
_CONTAINERS = (dict, list, tuple, set, frozenset, np.ndarray, np.generic, np.dtype, pickle.PickleBuffer)
#: What a module of the user's knows of where it is from, and what is found in it by its name.
_WHERE = ("__file__", "__path__", "__package__")
_NAMED = (type, types.FunctionType, functools._lru_cache_wrapper)


class DeclarationPickler(Pickler):
    """Pickles a declaration without its large arrays.

    Attributes:
        arrays: name of its file -> array.
    """

    def __init__(self, file: BinaryIO, places: dict[int, tuple[Any, Place]] | None = None) -> None:
        super().__init__(file)
        self.arrays: dict[str, AnyArray] = {}
        self.places = {} if places is None else places  # by the id of an object, which is kept with it
        self._columns: dict[int, str] = {}
        self._of_modules: dict[tuple[str, str], None] = {}  # by value: module, name

    def dump_with_settings(self, ensemble: Any) -> None:
        """Pickles the version of Python, the global settings of libraries, a declaration, its modules' parts."""
        self.dump((PYTHON, find_settings()))
        self.dump(ensemble)
        self.dump(_collect_modules(self._of_modules))

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, Arrays):
            obj.identity()  # the digest of what is about to be kept, which no other process computes again
            self._columns |= {id(values): name for name, values in obj.columns.items()}
        torch = sys.modules.get("torch")
        if torch is not None and type(obj) is torch.Tensor and _is_plain(obj):
            return torch.from_numpy, (obj.numpy(),)
        reduced = super().reducer_override(obj)
        if reduced is not NotImplemented and (place := _find_place_by_name(obj)) is not None:
            self._of_modules[place] = None
        return reduced

    def persistent_id(self, obj: Any) -> Any:
        """The place of a large array, else None."""
        kind = type(obj)
        if kind is MappedArray and is_name(os.path.basename(obj.file.path)):
            self._columns[id(obj)] = os.path.basename(obj.file.path).rpartition("-")[0]
            return self._find_place(obj, obj.array)  # of another run, whose directory may go
        if (
            (kind is not np.ndarray and kind is not np.memmap)
            or obj.nbytes < LEAST_BYTES
            or obj.dtype.kind not in _PLAIN
            or obj.dtype.hasobject
        ):
            return None
        return self._find_place(obj, obj)

    def _find_place(self, obj: Any, array: AnyArray) -> Place:
        if id(obj) not in self.places:
            column = self._columns.get(id(obj))
            label = re.sub(r"[^\w.]", "_", column or "array", flags=re.ASCII)[:40]
            sink = _Digest()
            np.lib.format.write_array(sink, np.asarray(array), allow_pickle=False)
            is_fortran = array.flags.f_contiguous and not array.flags.c_contiguous
            file, offset = f"{label}-{sink.digest.hexdigest()}.npy", sink.size - array.nbytes
            place = Place(file, offset, array.dtype, array.shape, is_fortran, column is not None)
            self.places[id(obj)] = (obj, place)
            self.arrays[file] = np.asarray(array)
        return self.places[id(obj)][1]


def _is_plain(tensor: Any) -> bool:
    """Whether numpy can have a tensor's memory, and nothing is lost by that: no view, no other order of the
    axes."""
    if tensor.nbytes < LEAST_BYTES or tensor.requires_grad or tensor.is_sparse or tensor.device.type != "cpu":
        return False
    try:
        flags, nbytes = tensor.numpy().flags, tensor.untyped_storage().nbytes()
    except (RuntimeError, TypeError):
        return False
    return bool(not vars(tensor) and flags.forc and nbytes == tensor.nbytes)


class _Digest:
    """Where numpy writes a file of which only the digest and the size are wanted."""

    def __init__(self) -> None:
        import xxhash

        self.digest, self.size = xxhash.xxh3_128(), 0

    def write(self, data: bytes) -> None:
        self.digest.update(data)
        self.size += len(data)


class DeclarationUnpickler(pickle.Unpickler):
    """Unpickles a declaration.

    Args:
        content: the pickle.
        folder: with the large arrays.
        shared: objects that are taken as they are, by number.
        takes_settings: this process gets the library settings that were pickled before it.
        takes_modules: this process, a member's, finds what it holds of the user's modules by their names.
    """

    def __init__(
        self,
        content: bytes,
        folder: Path,
        shared: list[Any] | None = None,
        *,
        takes_settings: bool = False,
        takes_modules: bool = False,
    ) -> None:
        super().__init__(io.BytesIO(content))
        self._has_functions = b"CodeType" in content
        self._folder, self._shared, self._takes_settings = folder, shared or [], takes_settings
        self._takes_modules = takes_modules

    def load(self) -> Any:
        """Returns the declaration; the settings before it are applied if they are to be.

        Raises:
            OtherPythonError: it has functions by value, whose instructions would end this Python, or compute
                something else.
        """
        python, settings = super().load()
        if python != PYTHON and self._has_functions:
            raise OtherPythonError(
                f"it holds functions as Python {python} compiled them, which Python {PYTHON} cannot run: use "
                f"Python {python}, or submit the declaration again (ensemble run SPEC), which compiles them again"
            )
        if self._takes_settings:
            apply_settings(settings)
        ensemble = super().load()
        if self._takes_modules:
            with contextlib.suppress(EOFError):  # an earlier version pickled none
                from ensemble.user_code.members_modules import enter

                enter(super().load(), "ensemble.executors.spawned")
        return ensemble

    def persistent_load(self, pid: Any) -> Any:
        """An array that is not in the pickle, or an object of this process."""
        return self._shared[pid] if isinstance(pid, int) else Place(*pid).open(self._folder)


class _Everything(type):
    def __call__(cls, *_: Any, **__: Any) -> Any:
        return cls

    def __setitem__(cls, *_: Any) -> None: ...


class _Stub(metaclass=_Everything):
    """Stands for all that a declaration names, and for what that makes: it is read without being loaded."""

    def __new__(cls, *_: Any, **__: Any) -> Any:
        return cls

    @classmethod
    def _ignore(cls, *_: Any, **__: Any) -> None: ...

    __setstate__ = append = extend = add = update = _ignore


class _NameReader(pickle.Unpickler):
    def __init__(self, file: BinaryIO) -> None:
        super().__init__(file)
        self.names: dict[str, None] = {}

    def find_class(self, module: str, name: str) -> Any:
        """A stand-in; by `subimport` cloudpickle names the modules that functions use."""
        if name == "subimport":
            return self._note
        self._note(module)
        return _Stub

    def _note(self, module: str) -> Any:
        self.names[module] = None
        return _Stub

    def persistent_load(self, pid: Any) -> None:
        """Arrays stay where they are."""


def read_named_modules(run_dir: Path) -> list[str]:
    """The modules that the declaration of a run names, in the order of their names in it; nothing is imported."""
    with open(run_dir / "ensemble.pkl", "rb") as file:
        reader = _NameReader(file)
        with contextlib.suppress(Exception):  # what cannot be read to its end: workers report it
            for _ in ("settings", "declaration"):
                reader.load()
    return list(reader.names)


class Declaration:
    """A pickled declaration: what it is made of while it is saved.

    Attributes:
        content: the pickle.
        arrays: name of its file in `data` -> array that is not in the pickle.
    """

    def __init__(self, ensemble: Any) -> None:
        self._ensemble = ensemble
        with io.BytesIO() as file:
            pickler = DeclarationPickler(file)
            pickler.dump_with_settings(ensemble)
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
            return DeclarationUnpickler(self.content, folder).load()

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
            SharingPickler(file, places).dump_with_settings(self._ensemble)
            return DeclarationUnpickler(file.getvalue(), folder, shared).load()


def _is_shared(value: Any) -> bool:
    """Whether a copy within a process has the very object: functions, classes, what is the user's."""
    if isinstance(value, type | types.ModuleType | types.FunctionType | types.BuiltinFunctionType):
        return True
    kind = type(value)
    return not (is_ours(kind) or issubclass(kind, _CONTAINERS) or kind.__module__ == "builtins")


def _find_place_by_name(value: Any) -> tuple[str, str] | None:
    """Module and name at its top by which a class or function is found, or its outermost class; else None."""
    if not isinstance(value, _NAMED):
        return None
    module, (top, *inner) = getattr(value, "__module__", None) or "", value.__qualname__.split(".")
    found = outermost = getattr(sys.modules.get(module), top, None)
    for name in inner:
        found = getattr(found, name, None)
    return (module, top) if outermost is not None and found is value else None


def _collect_modules(places: Iterable[tuple[str, str]]) -> dict[str, dict[str, Any]]:
    """The parts of modules at these places, and where the modules are from."""
    modules: dict[str, dict[str, Any]] = {}
    for module, name in places:
        loaded = vars(sys.modules[module])
        part = modules.setdefault(module, {one: loaded[one] for one in _WHERE if one in loaded})
        part[name] = loaded[name]
    return modules
