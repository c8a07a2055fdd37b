"""Saves and loads a member's predictions on a split, for selection, calibration and combination. Needs no torch.

One safetensors file: `values` float32 [n, ...] as `ensemble.spec.task` lays them out for the task, which its
header names; `index` int64 [n]; `target` [n, ...] where there is one. Rows are kept in the order of `index`, so
that those of two members stand side by side.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from ensemble.spec.task import CLASSIFICATION, Task
from ensemble.store.digests import open_checked
from ensemble.store.errors import DamagedError, StoreError, explain_format
from ensemble.store.files import make_directory, write_bytes

VERSION = 3
_KEY = "ensemble.predictions"
LENGTH_BYTES = 8  # at the start of a safetensors file: how long its header is


@dataclass(frozen=True)
class Predictions:
    """A member's predictions for each sample of a split.

    Attributes:
        values: float32 [n, ...], laid out by the task.
        index: int64 [n], the samples' indices, ascending.
        target: int64 or float64 [n, ...], or None.
        task: what they are predictions of.
    """

    values: npt.NDArray[np.float32]
    index: npt.NDArray[np.int64]
    target: npt.NDArray[Any] | None
    task: Task = CLASSIFICATION


def save_predictions(
    path: str | os.PathLike[str], values: Any, index: Any, target: Any | None, task: Task = CLASSIFICATION
) -> str:
    """Writes predictions atomically; arrays or CPU tensors, in any order of rows.

    Args:
        values: [n, ...], laid out by the task.
        index: [n], each sample once.
        target: [n, ...]; integers are kept as int64, floats as float64.

    Returns:
        The digest of the file.

    Raises:
        ValueError: shapes do not fit, or an index is there twice.
        WriteError: the file cannot be written.
    """
    from safetensors.numpy import save

    rows, order = np.asarray(values, dtype=np.float32), np.asarray(index, dtype=np.int64)
    if rows.ndim < 1 or order.shape != rows.shape[:1]:
        raise ValueError(f"{path}: predictions [n, ...] and index [n] have shapes {rows.shape} and {order.shape}")
    if task == CLASSIFICATION and rows.ndim < 2:
        raise ValueError(f"{path}: probabilities [n, ..., C] have shape {rows.shape}")
    by_index = np.argsort(order, kind="stable")
    order = order[by_index]
    if (twice := order[1:][order[1:] == order[:-1]]).size:
        raise ValueError(f"{path}: index {twice[0]} is there twice; every sample is predicted once")
    tensors: dict[str, npt.NDArray[Any]] = {"values": np.ascontiguousarray(rows[by_index]), "index": order}
    if target is not None:
        truth = np.asarray(target)
        truth = truth.astype(np.float64 if truth.dtype.kind == "f" else np.int64)
        if truth.shape[:1] != order.shape:
            raise ValueError(f"{path}: target must have {len(order)} rows, got the shape {truth.shape}")
        tensors["target"] = np.ascontiguousarray(truth[by_index])
    # One entry: of several the order in the file, and so its digest, would be another each time.
    header = {_KEY: json.dumps({"v": VERSION, "task": task.as_record()})}
    file = Path(path)
    make_directory(file.parent)
    return write_bytes(file, save(tensors, metadata=header))


def load_predictions(
    path: str | os.PathLike[str], *, mapped: bool = False, digest: str | None = None
) -> Predictions:
    """Read what `save_predictions` wrote; a symbolic link, a pipe or a device in its place is refused.

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
            text = (file.metadata() or {}).get(_KEY)
            if text is None:
                raise StoreError(f"{path} holds no predictions of a member (a plain safetensors file)")
            about = json.loads(text)
            version = about["v"] if isinstance(about, dict) else about
            if version != VERSION:
                raise StoreError(explain_format(path, version, VERSION))
            keys = list(file.keys())
            tensors = _map_tensors(name) if mapped else {key: file.get_tensor(key) for key in keys}
        task = Task.from_record(about["task"])
        return Predictions(tensors["values"], tensors["index"], tensors.get("target"), task)
    except FileNotFoundError:
        raise DamagedError(f"{path} does not exist: the member has not saved predictions for that split") from None
    except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
        raise DamagedError(f"cannot read {path}: {type(error).__name__}: {error}") from None


_DTYPES = {"F32": "<f4", "F64": "<f8", "I64": "<i8"}
#: Bytes of a file that is mapped, at least: a process may have 65,530 maps, and of small files more are read.
_LEAST_MAPPED = 2**16
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *(ctypes.c_int,) * 3, ctypes.c_int64)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_MAP_FAILED = ctypes.c_void_p(-1).value


def _map_tensors(path: str) -> dict[str, npt.NDArray[Any]]:
    """The tensors of a safetensors file as read-only maps of it; safetensors itself copies them for numpy."""
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        content = _map_file(file, size) if size >= _LEAST_MAPPED else np.frombuffer(file.read(), np.uint8)
    start = LENGTH_BYTES + int.from_bytes(content[:LENGTH_BYTES].tobytes(), "little")
    found: dict[str, npt.NDArray[Any]] = {}
    for name, entry in json.loads(content[LENGTH_BYTES:start].tobytes()).items():
        if name != "__metadata__":
            first, last = (start + offset for offset in entry["data_offsets"])
            found[name] = content[first:last].view(_DTYPES[entry["dtype"]]).reshape(entry["shape"])
    return found


def _map_file(file: BinaryIO, size: int) -> npt.NDArray[np.uint8]:
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
