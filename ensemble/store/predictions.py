"""Saves and loads a member's predictions on a split, for selection, calibration and combination. Needs no torch.

One safetensors file by ascending `index` int64 [n]: `values` float32 [n, ...] as `ensemble.spec.task` lays them
out, `target` [n, ...] where there is one, `positions` int64 [k] where some are kept. Of
samples of unlike `lengths` int64 [n, axes], values and targets are of all positions: [N, ...].
"""

from __future__ import annotations

import ctypes
import json
import math
import mmap
import os
import tempfile
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from ensemble.spec.positions import fill_up
from ensemble.spec.task import CLASSIFICATION, Task
from ensemble.store.digests import open_checked
from ensemble.store.errors import DamagedError, StoreError, explain_format

VERSION, RAGGED = 3, 4  # of samples of one length, and of unlike ones
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


def load_predictions(
    path: str | os.PathLike[str], *, mapped: bool = False, digest: str | None = None
) -> Predictions:
    """Read what `save_predictions` wrote; a symbolic link, a pipe or a device in its place is refused.

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
            if version not in (VERSION, RAGGED):
                raise StoreError(explain_format(path, version, RAGGED))
            keys = list(file.keys())
            tensors = _map_tensors(name) if mapped else {key: file.get_tensor(key) for key in keys}
        task = Task.from_record(about["task"])
        values, target, lengths = tensors["values"], tensors.get("target"), tensors.get("lengths")
        if lengths is not None:
            target = None if target is None else fill_up(target, lengths, is_target=True)
            values = fill_up(values, lengths, out=_make_array if mapped else np.empty)
        fields = {name: np.asarray(own) for name, own in about.get("fields", {}).items()}
        return Predictions(values, tensors["index"], target, task, tensors.get("positions"), fields)
    except FileNotFoundError:
        raise DamagedError(f"{path} does not exist: the member has not saved predictions for that split") from None
    except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
        raise DamagedError(f"cannot read {path}: {type(error).__name__}: {error}") from None


def _make_array(shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """An array, in a file without a name where it is large: of all members together it may be more than memory."""
    if math.prod(shape) * np.dtype(dtype).itemsize < _LEAST_FILED:
        return np.empty(shape, dtype)
    with tempfile.TemporaryFile() as file:
        return np.memmap(file, dtype, shape=shape)


_LEAST_FILED = 2**24
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
        content = map_file(file, size) if size >= _LEAST_MAPPED else np.frombuffer(file.read(), np.uint8)
    start = LENGTH_BYTES + int.from_bytes(content[:LENGTH_BYTES].tobytes(), "little")
    found: dict[str, npt.NDArray[Any]] = {}
    for name, entry in json.loads(content[LENGTH_BYTES:start].tobytes()).items():
        if name != "__metadata__":
            first, last = (start + offset for offset in entry["data_offsets"])
            found[name] = content[first:last].view(DTYPES[entry["dtype"]]).reshape(entry["shape"])
    return found


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
