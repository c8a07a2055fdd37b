"""Saves and loads a member's predictions on a split, for selection, calibration and combination. Needs no torch.

One safetensors file: `values` float32 [n, ...] as `ensemble.spec.task` lays them out for the task, which its
header names; `index` int64 [n]; `target` [n, ...] where there is one; `positions` int64 [k] where some are
kept. Rows are kept in the order of `index`, so that those of two members stand side by side. Where a collate
function pads batches to unlike lengths, all rows have the longest: what was added has a target that takes no part.
"""

from __future__ import annotations

import ctypes
import io
import json
import math
import mmap
import os
import tempfile
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np
import numpy.typing as npt

from ensemble.spec.positions import take_positions, widen
from ensemble.spec.task import CLASSIFICATION, Task
from ensemble.store.digests import open_checked
from ensemble.store.errors import DamagedError, StoreError, UnlikeRows, explain_format
from ensemble.store.files import make_directory, make_write_error, write_atomically

VERSION = 3
_KEY = "ensemble.predictions"
LENGTH_BYTES = 8  # at the start of a safetensors file: how long its header is
_DTYPES = {"F32": "<f4", "F64": "<f8", "I64": "<i8"}
_WRITTEN = ("I64", "F64", "F32")  # the order of dtypes in a file
#: What to do where batches are of unlike length, and cannot be filled up.
PAD = (
    "only positions with a target, of classes or numbers, are filled up, by a target that takes no part: pad all "
    'batches to one length, as by padding="max_length"'
)
_SPOOL_BYTES, _PIECE_BYTES = 2**24, 2**22  # of rows: in memory at most; read at a time


@dataclass(frozen=True)
class Predictions:
    """A member's predictions for each sample of a split.

    Attributes:
        values: float32 [n, ...], laid out by the task.
        index: int64 [n], the samples' indices, ascending.
        target: int64 or float64 [n, ...], or None.
        task: what they are predictions of.
        positions: int64 [k], which positions of each sample they are of (`PredictedRows.positions`); None: all.
    """

    values: npt.NDArray[np.float32]
    index: npt.NDArray[np.int64]
    target: npt.NDArray[Any] | None
    task: Task = CLASSIFICATION
    positions: npt.NDArray[np.int64] | None = None


class _Spool:
    """Rows in the order in which they come, to be read once `widen` has given all one shape: in memory while few,
    else in a file without a name.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._memory: io.BytesIO | None = io.BytesIO()
        self._file: BinaryIO = self._memory
        self.rows, self.dtype, self.shape = 0, np.dtype(np.float32), ()
        self._shapes: list[tuple[int, tuple[int, ...]]] = []  # how many rows that follow each other have which
        self._size = 0  # in bytes

    def add(self, rows: npt.NDArray[Any], *, may_differ: bool = False) -> None:
        now = rows.dtype, rows.shape[1:]
        if not self.rows:
            self.dtype, self.shape = now
        if now != (self.dtype, self.shape) and not (may_differ and now[0] == self.dtype):
            raise ValueError(f"rows of {now[0]} {list(now[1])} follow rows of {self.dtype} {list(self.shape)}")
        if not self._shapes or self._shapes[-1][1] != now[1]:
            self._shapes.append((0, now[1]))
        self._shapes[-1] = self._shapes[-1][0] + len(rows), now[1]
        self.rows, self._size = self.rows + len(rows), self._size + rows.nbytes
        if self._memory is not None and self._size > _SPOOL_BYTES:
            make_directory(self._directory)
            nameless = tempfile.TemporaryFile(dir=self._directory)  # noqa: SIM115 - `close` closes it
            self._file = cast(BinaryIO, nameless)
            self._file.write(self._memory.getbuffer())
            self._memory = None
        self._file.seek(0, os.SEEK_END)
        if rows.size:
            self._file.write(np.ascontiguousarray(rows).data.cast("B"))

    @property
    def nbytes(self) -> int:
        return self.rows * self.row_bytes

    @property
    def row_bytes(self) -> int:
        return self.dtype.itemsize * math.prod(self.shape)

    def read(self, first: int, count: int) -> npt.NDArray[Any]:
        """Some rows, as they came."""
        self._file.seek(first * self.row_bytes)
        content = self._file.read(count * self.row_bytes)
        return np.frombuffer(content, self.dtype).reshape(-1, *self.shape)

    def map(self) -> npt.NDArray[Any]:
        """All rows, as they came; of a file they are mapped, read only."""
        if self._memory is None:
            self._file.flush()
            content = _map_file(self._file, self.rows * self.row_bytes)
            return content.view(self.dtype).reshape(self.rows, *self.shape)
        return self.read(0, self.rows)

    def copy_to(self, file: BinaryIO, order: npt.NDArray[np.int64] | None) -> None:
        """Write the rows in an order (None: as they came), some at a time."""
        rows = None if order is None or not self.rows else self.map()
        step = max(1, _PIECE_BYTES // max(1, self.row_bytes))
        for first in range(0, self.rows, step):
            some = self.read(first, step) if rows is None or order is None else rows[order[first : first + step]]
            file.write(some.tobytes())

    def widen(self, lengths: Sequence[int], *, is_target: bool) -> _Spool:
        """A spool of the same rows with these lengths, instead of this one; this one, where they have them."""
        if all(shape[: len(lengths)] == tuple(lengths) for _, shape in self._shapes):
            return self
        made = _Spool(self._directory)
        self._file.seek(0)
        for rows, shape in self._shapes:
            size = self.dtype.itemsize * math.prod(shape)
            step = max(1, _PIECE_BYTES // max(1, size))
            for first in range(0, rows, step):
                count = min(step, rows - first)
                some = np.frombuffer(self._file.read(count * size), self.dtype).reshape(count, *shape)
                made.add(widen(some, lengths, is_target=is_target))
        self.close()
        return made

    def close(self) -> None:
        self._file.close()


class PredictedRows:
    """Predictions as they are made, batch by batch: a process never holds all of them.

    Args:
        directory: of the file for what is too large for memory; it has no name, and ends with the process.

    Attributes:
        index: of the rows so far.
        has_target: whether they have one.
        positions: which ones of each sample are kept (`ensemble.spec.positions`); None: all.
        tail: how many axes of values come after those of positions; None: a sample cannot be divided.
        shape: of the values of a sample, with all of its positions; None before the first.
    """

    def __init__(self, directory: Path) -> None:
        self.positions: npt.NDArray[np.int64] | None = None
        self._whole = 0  # how many positions a sample has
        self.tail: int | None = None
        self.shape: tuple[int, ...] | None = None
        self._directory, self._values, self._target = directory, _Spool(directory), _Spool(directory)
        self._indices: list[npt.NDArray[np.int64]] = []
        self.has_target = False

    @property
    def index(self) -> npt.NDArray[np.int64]:
        return np.concatenate([np.empty(0, np.int64), *self._indices])

    def __len__(self) -> int:
        return self._values.rows

    def add(self, values: Any, index: Any, target: Any | None) -> None:
        """Add rows, arrays or CPU tensors: values [k, ...], index [k], target [k, ...].

        Raises:
            ValueError: shapes do not fit.
            UnlikeRows: samples have other positions than before, and no target that takes no part there.
            WriteError: the disk is full.
        """
        rows, order = np.asarray(values, dtype=np.float32), np.asarray(index, dtype=np.int64)
        if rows.ndim < 1 or order.shape != rows.shape[:1]:
            raise ValueError(f"predictions [n, ...] and index [n] have shapes {rows.shape} and {order.shape}")
        if self.positions is not None:
            positions = math.prod(rows.shape[1 : rows.ndim - (self.tail or 0)])
            self._whole = self._whole if positions == len(self.positions) else positions
        truth = None if target is None else _read_target(target, len(order))
        try:
            self.widen(rows.shape[1:])
            self._values.add(self._keep(rows, self.tail or 0), may_differ=self.tail is not None)
            if truth is not None:
                self._add_target(truth)
        except OSError as error:
            raise make_write_error(self._directory / "predictions", error) from None
        self._indices.append(order.copy())

    def _keep(self, rows: npt.NDArray[Any], tail: int) -> npt.NDArray[Any]:
        """Rows [k, ...] of the positions that are kept; what has not all of them stays: rows of another rank, and
        targets of another kind than the values.
        """
        is_whole = self.positions is not None and math.prod(rows.shape[1 : rows.ndim - tail]) == self._whole
        return take_positions(rows, self.positions, tail) if is_whole else rows

    def widen(self, shape: Sequence[int]) -> None:
        """Let all rows have at least the positions of a sample of this shape, once they are read.

        Raises:
            UnlikeRows: see `add`.
        """
        own, shape = self.shape, tuple(shape)
        if own is None or shape == own:
            self.shape = shape
            return
        axes = len(own) - (self.tail or 0)
        is_paddable = self.tail is not None and self.has_target and self.positions is None
        if not is_paddable or len(shape) != len(own) or shape[axes:] != own[axes:]:
            raise UnlikeRows(f"a sample has predictions of shape {list(shape)}, one before {list(own)}; {PAD}")
        self.shape = (*map(max, shape[:axes], own[:axes]), *own[axes:])

    def _fill_up(self) -> None:
        """Give all rows the positions of the longest: once, as of samples by their length each is longer."""
        if self.shape is not None and self.tail is not None and self.positions is None:
            lengths = self.shape[: len(self.shape) - self.tail]
            self._values = self._values.widen(lengths, is_target=False)
            self._target = self._target.widen(lengths, is_target=True)

    def _add_target(self, truth: npt.NDArray[Any]) -> None:
        self.has_target = True
        self._target.add(self._keep(truth, 0), may_differ=self.tail is not None)

    def replace_target(self, target: Any | None) -> None:
        """Take another target for all rows, in the order in which they were added; None: none."""
        self._target.close()
        self._target, self.has_target = _Spool(self._directory), False
        if target is not None:
            self._add_target(_read_target(target, len(self)))

    def count_pieces(self) -> int:
        """How many there are of `pieces`."""
        self._fill_up()
        return -(-len(self) // self._piece_rows)

    @property
    def _piece_rows(self) -> int:
        return max(1, _PIECE_BYTES // max(1, self._values.row_bytes))

    def pieces(self) -> Iterator[tuple[npt.NDArray[Any], npt.NDArray[Any], npt.NDArray[Any] | None]]:
        """Values, index and target of some rows at a time."""
        self._fill_up()
        index, step = self.index, self._piece_rows
        for first in range(0, len(self), step):
            target = self._target.read(first, step) if self.has_target else None
            yield self._values.read(first, step), index[first : first + step], target

    def arrays(self) -> tuple[npt.NDArray[Any], npt.NDArray[Any], npt.NDArray[Any] | None]:
        """Values, index and target of all rows by ascending index; mapped from the file where there is one."""
        self._fill_up()
        index, parts = self.index, [self._values.map(), self._target.map() if self.has_target else None]
        if (index[1:] < index[:-1]).any():
            order = index.argsort(kind="stable")
            index, parts = index[order], [None if part is None else part[order] for part in parts]
        values, target = parts
        assert values is not None
        return values, index, target

    def save(self, path: str | os.PathLike[str], task: Task = CLASSIFICATION) -> str:
        """Write the file of the predictions, which is there whole or not at all.

        Returns:
            The digest of the file.

        Raises:
            ValueError: shapes do not fit, or an index is there twice.
            WriteError: the file cannot be written.
        """
        self._fill_up()
        index, values, target = self.index, self._values, self._target
        if task == CLASSIFICATION and not values.shape:
            raise ValueError(f"{path}: probabilities [n, ..., C] have shape {(len(self), *values.shape)}")
        if target.rows not in (0, values.rows):
            raise ValueError(f"{path}: target must have {values.rows} rows, got {target.rows}")
        order = None if (index[1:] > index[:-1]).all() else index.argsort(kind="stable")
        index = index if order is None else index[order]
        if (twice := index[1:][index[1:] == index[:-1]]).size:
            raise ValueError(f"{path}: index {twice[0]} is there twice; every sample is predicted once")
        shapes = {"index": ("I64", index.shape), "values": ("F32", (len(self), *values.shape))}
        if self.has_target:
            shapes["target"] = ("F64" if target.dtype.kind == "f" else "I64", (len(self), *target.shape))
        parts = [index]
        if self.positions is not None:
            parts.append(self.positions)
            shapes["positions"] = ("I64", self.positions.shape)
        header = _make_header(shapes, {_KEY: json.dumps({"v": VERSION, "task": task.as_record()})})

        def write(temporary: Path) -> None:
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                file.write(b"".join([header, *(part.tobytes() for part in parts)]))
                for part in (target, values):
                    part.copy_to(file, order)

        size = len(header) + sum([each.nbytes for each in parts] + [each.nbytes for each in (target, values)])
        make_directory(Path(path).parent)
        return write_atomically(Path(path), write, size)

    def close(self) -> None:
        """Free the memory and the files; what `arrays` gave stays."""
        self._values.close()
        self._target.close()


def _read_target(target: Any, rows: int) -> npt.NDArray[Any]:
    truth = np.asarray(target)
    if truth.shape[:1] != (rows,):
        raise ValueError(f"target must have {rows} rows, got the shape {truth.shape}")
    return truth.astype(np.float64 if truth.dtype.kind == "f" else np.int64)


def _make_header(shapes: Mapping[str, tuple[str, tuple[int, ...]]], metadata: Mapping[str, str]) -> bytes:
    """The head of a safetensors file as that library writes it: dtypes of more bytes first, then by name."""
    entries: dict[str, Any] = {"__metadata__": dict(metadata)}
    first = 0
    for name in sorted(shapes, key=lambda name: (_WRITTEN.index(shapes[name][0]), name)):
        dtype, shape = shapes[name]
        last = first + np.dtype(_DTYPES[dtype]).itemsize * math.prod(shape)
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [first, last]}
        first = last
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(LENGTH_BYTES, "little") + text


def save_predictions(
    path: str | os.PathLike[str], values: Any, index: Any, target: Any | None, task: Task = CLASSIFICATION
) -> str:
    """`PredictedRows.save` of arrays or CPU tensors that are there: values [n, ...], index [n], target [n, ...].

    Returns:
        The digest of the file.

    Raises:
        ValueError: shapes do not fit, or an index is there twice.
        WriteError: the file cannot be written.
    """
    rows = PredictedRows(Path(path).parent)
    try:
        rows.add(values, index, target)
        return rows.save(path, task)
    finally:
        rows.close()


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
        more = (tensors.get("target"), task, tensors.get("positions"))
        return Predictions(tensors["values"], tensors["index"], *more)
    except FileNotFoundError:
        raise DamagedError(f"{path} does not exist: the member has not saved predictions for that split") from None
    except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
        raise DamagedError(f"cannot read {path}: {type(error).__name__}: {error}") from None


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
