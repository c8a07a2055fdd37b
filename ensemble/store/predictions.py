"""Reads and writes the file of a member's predictions, one safetensors file for all splits. Needs no torch.

Of each split: `values` float32 [n, ...] (`ensemble.spec.task`), `index` int64 [n], ascending, `target`, and
`positions` int64 [k] where some are kept. With `lengths` [n, axes], values and targets are of all positions: [N,
...].
"""

from __future__ import annotations

import ctypes
import json
import math
import mmap
import os
import tempfile
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import numpy.typing as npt

from ensemble.spec.positions import fill_up
from ensemble.spec.task import CLASSIFICATION, Task
from ensemble.store.digests import open_checked
from ensemble.store.errors import DamagedError, StoreError, explain_format
from ensemble.store.files import make_directory, write_atomically
from ensemble.store.regular_files import open_regular

VERSION = 4
KEY = "ensemble.predictions"
LENGTH_BYTES = 8  # at the start of a safetensors file: how long its header is
DTYPES = {"I64": "<i8", "F64": "<f8", "F32": "<f4"}  # in the order that they have in a file


@dataclass(frozen=True)
class Predictions:
    """A member's predictions for each sample of a split.

    Attributes:
        values: float32 [n, ...], laid out by the task.
        index: int64 [n], the samples' indices, ascending.
        target: int64 or float64 [n, ...], or None.
        task: what they are predictions of.
        positions: int64 [k], which positions of each sample they are of (`PredictedRows.positions`); None: all.
        fields: fields of the batch [n, ...] that metrics of the split ask for, where this member has kept them.
    """

    values: npt.NDArray[np.float32]
    index: npt.NDArray[np.int64]
    target: npt.NDArray[Any] | None
    task: Task = CLASSIFICATION
    positions: npt.NDArray[np.int64] | None = None
    fields: Mapping[str, npt.NDArray[Any]] = field(default_factory=dict)


class Part(NamedTuple):
    """A tensor of a file: its type and shape, and what writes its bytes."""

    dtype: str
    shape: tuple[int, ...]
    write: Callable[[BinaryIO], object]

    @property
    def nbytes(self) -> int:
        return np.dtype(DTYPES[self.dtype]).itemsize * math.prod(self.shape)


def read_others(path: Path, split: str, digest: str) -> tuple[dict[str, Part], dict[str, dict[str, Any]]]:
    """The tensors of a file, and what its header says of each split, without those of one.

    Raises:
        DamagedError: the file has not this digest.
    """
    with open_checked(path, digest, follows_link=False) as checked:
        metadata, tensors = _map_tensors(checked)
    types = {np.dtype(name): dtype for dtype, name in DTYPES.items()}
    others = {name: array for name, array in tensors.items() if name.partition(".")[0] != split}
    splits: dict[str, dict[str, Any]] = json.loads(metadata[KEY])["splits"]
    return {
        name: Part(types[array.dtype], array.shape, lambda file, array=array: file.write(array.data))  # type: ignore[misc]
        for name, array in others.items()
    }, {name: about for name, about in splits.items() if name != split}


def write_parts(path: Path, parts: Mapping[str, Part], splits: Mapping[str, Mapping[str, Any]]) -> str:
    """Write a safetensors file as that library writes it: dtypes of more bytes first, then by name.

    Args:
        splits: task and fields of each split.
    """
    entries: dict[str, Any] = {"__metadata__": {KEY: json.dumps({"v": VERSION, "splits": splits})}}
    order, first = sorted(parts, key=lambda name: (list(DTYPES).index(parts[name].dtype), name)), 0
    for name in order:
        last = first + parts[name].nbytes
        entries[name] = {
            "dtype": parts[name].dtype,
            "shape": list(parts[name].shape),
            "data_offsets": [first, last],
        }
        first = last
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)

    def write(temporary: Path) -> None:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(len(text).to_bytes(LENGTH_BYTES, "little") + text)
            for name in order:
                parts[name].write(file)

    make_directory(path.parent)
    return write_atomically(path, write, LENGTH_BYTES + len(text) + first)


def load_predictions(
    path: str | os.PathLike[str], split: str, *, mapped: bool = False, digest: str | None = None
) -> Predictions:
    """Read what `PredictedRows.save` wrote; a symbolic link, a pipe or a device in its place is refused.

    Samples of unlike length are filled up to the longest (`ensemble.spec.positions.fill_up`).

    Args:
        mapped: whether the arrays are mapped from the file, read only, and not read into memory.
        digest: that the file has, by the log; None: not known.

    Raises:
        DamagedError: there is no such file, or it is damaged.
        StoreError: it holds something else, or is of another format.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with (
            open_checked(path, digest, follows_link=False) as name,
            safe_open(name, framework="numpy") as file,
        ):
            text = (file.metadata() or {}).get(KEY)
            if text is None:
                raise StoreError(f"{path} holds no predictions of a member (a plain safetensors file)")
            about = json.loads(text)
            version = about["v"] if isinstance(about, dict) else about
            if version != VERSION:
                raise StoreError(explain_format(path, version, VERSION))
            names = [name for name in file.keys() if name.startswith(f"{split}.")]  # noqa: SIM118 - it is no dict
            arrays = _map_tensors(name)[1] if mapped else {key: file.get_tensor(key) for key in names}
        if split not in about["splits"]:
            saved = ", ".join(about["splits"])
            raise DamagedError(f"{path} has no predictions on {split!r}: the member saved those on {saved}")
        tensors, split_record = {key.partition(".")[2]: arrays[key] for key in names}, about["splits"][split]
        values, target, lengths = tensors["values"], tensors.get("target"), tensors.get("lengths")
        if lengths is not None:
            target = None if target is None else fill_up(target, lengths, is_target=True)
            values = fill_up(values, lengths, out=_make_array if mapped else np.empty)
        fields = {name: np.asarray(own) for name, own in split_record.get("fields", {}).items()}
        task = Task.from_record(split_record["task"])
        return Predictions(values, tensors["index"], target, task, tensors.get("positions"), fields)
    except FileNotFoundError:
        raise DamagedError(f"{path} does not exist: the member has not saved predictions") from None
    except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
        raise DamagedError(f"cannot read {path}: {type(error).__name__}: {error}") from None


def _make_array(shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """An array, in a file without a name where it is large: of all members together it may be more than memory."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    if size < _LEAST_FILED:
        return np.empty(shape, dtype)
    with tempfile.TemporaryFile() as file:
        os.posix_fallocate(file.fileno(), 0, size)  # else a full disk would kill the process at the first write
        return np.memmap(file, dtype, shape=shape)


_LEAST_FILED = 2**24
#: Bytes of a file that is mapped, at least: a process may have 65,530 maps, and of small files more are read.
_LEAST_MAPPED = 2**16
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *(ctypes.c_int,) * 3, ctypes.c_int64)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_MAP_FAILED = ctypes.c_void_p(-1).value


def list_splits(path: Path) -> list[str]:
    """The splits on which a file has predictions; none where there is no file.

    Raises:
        DamagedError: it cannot be read.
    """
    try:
        with open_regular(path) as file:
            header = json.loads(file.read(int.from_bytes(file.read(LENGTH_BYTES), "little")))
        return list(json.loads(header["__metadata__"][KEY])["splits"])
    except FileNotFoundError:
        return []
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DamagedError(f"cannot read {path}: {type(error).__name__}: {error}") from None


def _map_tensors(path: str) -> tuple[dict[str, str], dict[str, npt.NDArray[Any]]]:
    """The metadata of a safetensors file, and its tensors as read-only maps; safetensors copies them for numpy."""
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        content = map_file(file, size) if size >= _LEAST_MAPPED else np.frombuffer(file.read(), np.uint8)
    start = LENGTH_BYTES + int.from_bytes(content[:LENGTH_BYTES].tobytes(), "little")
    tensors, header = dict[str, npt.NDArray[Any]](), json.loads(content[LENGTH_BYTES:start].tobytes())
    metadata = header.pop("__metadata__", {})
    for name, entry in header.items():
        first, last = (start + offset for offset in entry["data_offsets"])
        tensors[name] = content[first:last].view(DTYPES[entry["dtype"]]).reshape(entry["shape"])
    return metadata, tensors


def map_file(file: BinaryIO, size: int) -> npt.NDArray[np.uint8]:
    """The bytes of a file, mapped until nobody refers to them.

    `mmap.mmap`, and so `np.memmap`, keeps a descriptor of the file open for each map, of which a process often may
    have 1,024 only: of thousands of members each has a file.
    """
    address = _libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, file.fileno(), 0)
    if address == _MAP_FAILED:
        raise OSError(error := ctypes.get_errno(), os.strerror(error))
    memory = (ctypes.c_ubyte * size).from_address(address)
    weakref.finalize(memory, _libc.munmap, address, size).atexit = False  # what is left may be read to the end
    return np.frombuffer(memoryview(memory).toreadonly(), np.uint8)
