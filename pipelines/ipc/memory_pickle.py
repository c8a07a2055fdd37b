"""Passes objects from a process to the child processes that it starts, through anonymous memory.

The child inherits a file descriptor. Large arrays inside the object are mapped by every child, copy-on-write, not
copied (pickle protocol 5, out-of-band buffers). This is the one place of the package that unpickles, and it reads
from memory that this process's own parent made, never from a socket or a path.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import io
import mmap
import os
import pickle
import struct
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import cloudpickle

from pipelines.environment.library_settings import apply_settings, find_settings
from pipelines.errors import PipelineError

_ALIGN = 64


class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """A cloudpickle pickler that also handles functions decorated with `functools.cache` or `lru_cache`.

    cloudpickle pickles these by name only. Here they are pickled by value wherever cloudpickle would pickle the
    undecorated function by value: in `__main__`, in a module registered for it, in a module that is not imported.
    The values in the cache are not pickled. Objects that stand for modules, such as `torch.backends`, are pickled
    as modules are.

    A class that is pickled by value keeps its qualified name, which fingerprints contain.
    """

    def reducer_override(self, obj: Any) -> Any:
        """Returns how to rebuild an object (see `pickle.Pickler.reducer_override`)."""
        if isinstance(obj, types.ModuleType) and _is_stand_in(obj):
            return importlib.import_module, (obj.__name__,)
        if isinstance(obj, functools._lru_cache_wrapper) and not is_importable(obj):
            return restore_cached, (obj.__wrapped__, *obj.cache_parameters().values())
        reduced = super().reducer_override(obj)
        if isinstance(obj, type) and isinstance(reduced, tuple) and obj.__qualname__ != obj.__name__:
            (attributes, _) = reduced[2]  # of a class by value, which set them one after the other
            attributes["__qualname__"] = obj.__qualname__
        return reduced


def restore_cached(function: Callable[..., Any], maxsize: int | None, typed: bool) -> Any:
    """Decorates an unpickled function with a new, empty `functools.lru_cache`."""
    return functools.lru_cache(maxsize, typed)(function)


def _is_stand_in(module: types.ModuleType) -> bool:
    """Whether it is of a subclass, and found under a module's name: cloudpickle knows modules alone."""
    return type(module) is not types.ModuleType and sys.modules.get(module.__name__) is module


def is_importable(obj: Any) -> bool:
    """Whether another process finds this very object under its module and qualified name."""
    name = getattr(obj, "__module__", None) or ""
    if name == "__main__" or name in cloudpickle.list_registry_pickle_by_value():
        return False
    value: Any = sys.modules.get(name)
    for part in getattr(obj, "__qualname__", "").split("."):
        value = getattr(value, part, None)
    return value is obj


def dump(value: Any, settings: Mapping[str, Any] | None = None) -> int:
    """Writes an object to a new memory file.

    Args:
        settings: of libraries, which a process has that loads it; None for those of this process.

    Returns:
        The file's descriptor, which the caller closes.

    Raises:
        PipelineError: a part of it cannot be pickled.
    """
    buffers: list[pickle.PickleBuffer] = []
    with io.BytesIO() as file, _errors_in_words():
        Pickler(file, protocol=5, buffer_callback=buffers.append).dump(value)
        body = memoryview(file.getvalue())
    applied = memoryview(pickle.dumps(find_settings() if settings is None else settings))
    parts = [applied, body, *(buffer.raw() for buffer in buffers)]
    header = struct.pack(f"<Q{len(parts)}Q", len(parts), *(part.nbytes for part in parts))
    fd = os.memfd_create("payload", os.MFD_CLOEXEC)
    offset = 0
    for part in (memoryview(header), *parts):
        written = 0
        while written < part.nbytes:
            written += os.pwrite(fd, part[written:], offset + written)
        offset = _aligned(offset + part.nbytes)
    os.ftruncate(fd, max(offset, 1))
    return fd


def load(fd: int) -> Any:
    """Reads an object from a memory file that `dump` wrote; this process gets the library settings in it.

    Its large arrays are views of the file; a page is copied when it is first written to.
    """
    memory = memoryview(mmap.mmap(fd, os.fstat(fd).st_size, flags=mmap.MAP_PRIVATE))
    (count,) = struct.unpack_from("<Q", memory)
    sizes = struct.unpack_from(f"<{count}Q", memory, 8)
    parts = []
    offset = _aligned(8 + 8 * count)
    for size in sizes:
        parts.append(memory[offset : offset + size])
        offset = _aligned(offset + size)
    apply_settings(pickle.loads(parts[0]))
    return pickle.loads(parts[1], buffers=parts[2:])


#: How to make a thing picklable that is not.
REMEDY = (
    "open files, locks and connections at first use in each process, and leave them out of what is pickled, as in "
    "def __getstate__(self): return {**self.__dict__, 'file': None}"
)


@contextlib.contextmanager
def _errors_in_words() -> Iterator[None]:
    try:
        yield
    except (TypeError, AttributeError, ValueError, pickle.PicklingError) as error:
        raise PipelineError(f"the pipeline cannot be given to workers: {error}; {REMEDY}") from error


class Inherited:
    """An object of which each forked child makes a copy of its own, without a second copy of its large arrays.

    A child must not share open files, locks or caches with its parent, as it would if it used the parent's
    object: it unpickles one. The memory of large arrays (pickle protocol 5, out-of-band buffers), and the objects
    for which `is_shared` is true, are the parent's, which the fork has passed on copy-on-write.

    Args:
        value: the object.
        is_shared: whether children may use a part of it as it is.

    Raises:
        PipelineError: a part of it cannot be pickled.
    """

    def __init__(self, value: Any, is_shared: Callable[[Any], bool]) -> None:
        self._buffers: list[pickle.PickleBuffer] = []
        self._shared: list[Any] = []
        shared = self._shared

        class SharingPickler(Pickler):
            def persistent_id(self, obj: Any) -> int | None:
                if not is_shared(obj):
                    return None
                shared.append(obj)
                return len(shared) - 1

        with io.BytesIO() as file, _errors_in_words():
            SharingPickler(file, protocol=5, buffer_callback=self._buffers.append).dump(value)
            self._body = file.getvalue()

    def load(self) -> Any:
        """The copy, in a forked child."""
        shared = self._shared

        class SharingUnpickler(pickle.Unpickler):
            def persistent_load(self, number: int) -> Any:
                return shared[number]

        return SharingUnpickler(io.BytesIO(self._body), buffers=self._buffers).load()


def _aligned(offset: int) -> int:
    return -(-offset // _ALIGN) * _ALIGN
