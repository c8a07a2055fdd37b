"""Collects a member's predictions batch by batch, and writes the file that `ensemble.store.predictions` reads."""

from __future__ import annotations

import functools
import itertools
import math
import os
import tempfile
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np
import numpy.typing as npt

from ensemble.spec.positions import fill_up, take_positions
from ensemble.spec.task import CLASSIFICATION, Task
from ensemble.store.errors import UnlikeRows
from ensemble.store.files import make_directory, make_write_error
from ensemble.store.predictions import DTYPES, Part, map_file, read_others, write_parts

#: What to do where samples of unlike length are not kept.
PAD = (
    'only the number of positions with targets can vary: pad all batches to one length, as by padding="max_length"'
)
_SPOOL_BYTES, _PIECE_BYTES = 2**24, 2**22  # of rows: in memory at most; read at a time


class _Spool:
    """Rows of one shape in the order in which they come: in memory while few, else in a file without a name."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.rows, self.dtype, self.shape = 0, np.dtype(np.float32), ()

    @functools.cached_property
    def _file(self) -> tempfile.SpooledTemporaryFile[bytes]:
        return tempfile.SpooledTemporaryFile(_SPOOL_BYTES, dir=str(self._directory))  # `close` closes it

    def add(self, rows: npt.NDArray[Any]) -> None:
        layout = rows.dtype, rows.shape[1:]
        if not self.rows:
            self.dtype, self.shape = layout
        if layout != (self.dtype, self.shape):
            raise ValueError(
                f"rows of {layout[0]} {list(layout[1])} follow rows of {self.dtype} {list(self.shape)}"
            )
        self.rows += len(rows)
        if self.nbytes > _SPOOL_BYTES:
            make_directory(self._directory)
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
        """All rows, as they came; those that are in a file are mapped, read only."""
        if self.nbytes <= _SPOOL_BYTES:
            return self.read(0, self.rows)
        self._file.flush()
        return map_file(cast(BinaryIO, self._file), self.nbytes).view(self.dtype).reshape(self.rows, *self.shape)

    def close(self) -> None:
        if "_file" in vars(self):
            self._file.close()


class PredictedRows:
    """Predictions as they are made, batch by batch: a process never holds all of them.

    Args:
        directory: of the file for what is too large for memory; it has no name, and ends with the process.

    Attributes:
        positions: which ones of each sample are kept (`ensemble.spec.positions`); None: all.
        tail: how many axes of values come after those of positions; None: a sample cannot be divided.
        has_target: whether the rows have one.
        fields: fields of the samples, batch by batch.
        is_ragged: whether batches were of unlike length.
    """

    def __init__(self, directory: Path) -> None:
        self.positions: npt.NDArray[np.int64] | None = None
        self.tail: int | None = None
        self.fields: dict[str, list[npt.NDArray[Any]]] = {}
        self.is_ragged = self.has_target = False
        self._shape: tuple[int, ...] | None = None  # of the first sample's values, with all positions
        self._directory, self._values, self._target = directory, _Spool(directory), _Spool(directory)
        self._indices: list[npt.NDArray[np.int64]] = []
        self._lengths: list[npt.NDArray[np.int64]] = []

    @property
    def index(self) -> npt.NDArray[np.int64]:
        return np.concatenate([np.empty(0, np.int64), *self._indices])

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """How many positions each sample has along each axis of positions: [n, axes]."""
        return np.concatenate(self._lengths or [np.empty((0, 0), np.int64)])

    @property
    def nbytes(self) -> int:
        return self._values.nbytes + self._target.nbytes

    def __len__(self) -> int:
        return sum(map(len, self._indices))

    def add(self, values: Any, index: Any, target: Any | None) -> None:
        """Add rows, arrays or CPU tensors: values [k, ...], index [k], target [k, ...].

        Raises:
            ValueError: shapes do not fit.
            UnlikeRows: samples have other shapes than before, and not only more or fewer positions.
            WriteError: the disk is full.
        """
        rows, order = np.asarray(values, dtype=np.float32), np.asarray(index, dtype=np.int64)
        if rows.ndim < 1 or order.shape != rows.shape[:1]:
            raise ValueError(f"predictions [n, ...] and index [n] have shapes {rows.shape} and {order.shape}")
        truth = None if target is None else _read_target(target, len(order))
        own, shape = self._shape or rows.shape[1:], rows.shape[1:]
        axes = 0 if self.tail is None else max(0, len(shape) - self.tail)
        has_positions = truth is not None and axes > 0 and truth.shape[1:] == shape[:axes]
        if shape != own:
            is_divisible = has_positions and self.positions is None and len(shape) == len(own)
            if not is_divisible or shape[axes:] != own[axes:]:
                why = f"a sample has predictions of shape {list(shape)}, one before {list(own)}; {PAD}"
                raise UnlikeRows(
                    why if self.positions is None else f"{why}, or raise Ensemble.keep_predictions_gb"
                )
        self._shape = own
        if self.positions is not None and self.tail is not None:
            rows, axes = take_positions(rows, self.positions, self.tail), 1
            truth = take_positions(truth, self.positions, 0) if has_positions else truth
        lengths = np.tile(np.array(rows.shape[1 : 1 + axes], np.int64), (len(rows), 1))
        flat = rows.reshape(math.prod(rows.shape[: 1 + axes]), *rows.shape[1 + axes :])
        self.add_flat(flat, lengths, order, truth.reshape(-1) if has_positions and truth is not None else truth)

    def add_fields(self, fields: Mapping[str, npt.NDArray[Any]]) -> None:
        for name, values in fields.items():
            self.fields[name].append(values)

    def add_flat(self, values: Any, lengths: Any, index: Any, target: Any | None) -> None:
        """Add what `pieces` of other rows gave."""
        try:
            self._values.add(values)
            if target is not None:
                self.has_target = True
                self._target.add(target)
        except OSError as error:
            raise make_write_error(self._directory / "predictions", error) from None
        if len(index):
            self._lengths.append(lengths.copy())
            self._indices.append(index.copy())
            self.is_ragged = self.is_ragged or bool((lengths != self._lengths[0][:1]).any())

    def replace_target(self, target: Any | None) -> None:
        """Take another target for all rows, in the order in which they were added; None: none."""
        self._target.close()
        self._target, self.has_target = _Spool(self._directory), target is not None
        if target is not None:
            truth = _read_target(target, len(self))
            if self.positions is not None and truth.shape[1:] == (self._shape or ())[: truth.ndim - 1]:
                truth = take_positions(truth, self.positions, 0)
            self._target.add(truth)

    def count_pieces(self) -> int:
        return -(-len(self) // self._piece)

    @property
    def _piece(self) -> int:
        """Samples that are read at a time."""
        return max(1, _PIECE_BYTES * len(self) // max(1, self._values.nbytes))

    def pieces(self) -> Iterator[tuple[npt.NDArray[Any] | None, ...]]:
        """Values of all positions, lengths, index and target (None: there is none) of some samples at a time."""
        index, lengths, step = self.index, self.lengths, self._piece
        targets = self._read_in_order(self._target) if self.has_target else itertools.repeat(None)
        for number, (values, target) in enumerate(zip(self._read_in_order(self._values), targets, strict=False)):
            at = slice(number * step, (number + 1) * step)
            yield values, lengths[at], index[at], target

    def arrays(self) -> tuple[npt.NDArray[Any], npt.NDArray[Any], npt.NDArray[Any] | None]:
        """Values, index and target of all rows by ascending index, filled up to the longest sample; of samples of
        one length mapped from the file, where there is one.
        """
        index, parts = self.index, [self._unfold(self._values)]
        parts.append(self._unfold(self._target) if self.has_target else None)
        if (index[1:] < index[:-1]).any():
            order = index.argsort(kind="stable")
            index, parts = index[order], [None if part is None else part[order] for part in parts]
        values, target = parts
        assert values is not None
        return values, index, target

    def _is_of_positions(self, spool: _Spool) -> bool:
        return spool is self._values or (spool.rows == self._values.rows and not spool.shape)

    def _unfold(self, spool: _Spool) -> npt.NDArray[Any] | None:
        rows, lengths = spool.map(), self.lengths
        if not lengths.shape[1] or not self._is_of_positions(spool):
            return rows
        is_target: bool = spool is self._target
        filled = fill_up(rows, lengths, is_target=is_target) if self.is_ragged else rows
        unfolded: npt.NDArray[Any] = filled.reshape(len(lengths), *lengths.max(axis=0), *spool.shape)
        return unfolded

    def take_fields(self) -> dict[str, npt.NDArray[Any]]:
        """The fields of all rows by ascending index."""
        order = self.index.argsort(kind="stable")
        return {name: np.concatenate(parts)[order] for name, parts in self.fields.items() if parts}

    def save(
        self, path: str | os.PathLike[str], split: str, task: Task = CLASSIFICATION, *, beside: str | None = None
    ) -> str:
        """Write the file of the predictions, which is there whole or not at all.

        Args:
            beside: the digest of the file that is there, of which the predictions on other splits are kept.

        Returns:
            The digest of the file.

        Raises:
            ValueError: shapes do not fit, or an index is there twice.
            WriteError: the file cannot be written.
            FileNotFoundError, DamagedError: the file with the digest `beside` is not there.
        """
        index, lengths, values, target = self.index, self.lengths, self._values, self._target
        if task == CLASSIFICATION and not values.shape:
            raise ValueError(f"{path}: probabilities [n, ..., C] have shape {(len(self), *values.shape)}")
        if target.rows not in (0, len(self), values.rows):
            raise ValueError(f"{path}: target must have {len(self)} rows, got {target.rows}")
        order = None if (index[1:] > index[:-1]).all() else index.argsort(kind="stable")
        index = index if order is None else index[order]
        if (twice := index[1:][index[1:] == index[:-1]]).size:
            raise ValueError(f"{path}: index {twice[0]} is there twice; every sample is predicted once")
        parts = {"index": index}
        if self.positions is not None:
            parts["positions"] = self.positions
        shape = (len(self), *lengths[0].tolist()) if len(lengths) else (0,)
        if self.is_ragged:
            parts["lengths"], shape = (lengths if order is None else lengths[order]), (values.rows,)
        named = {
            name: Part(_name_dtype(part.dtype), part.shape, lambda file, part=part: file.write(part.tobytes()))  # type: ignore[misc]
            for name, part in parts.items()
        }
        for name, spool in {"values": values, **({"target": target} if self.has_target else {})}.items():
            rows = shape if self._is_of_positions(spool) else (spool.rows,)
            write = partial(self._write, spool, order)
            named[name] = Part(_name_dtype(spool.dtype), (*rows, *spool.shape), write)
        about: dict[str, Any] = {"task": task.as_record()}
        if self.fields:
            about["fields"] = {name: own.tolist() for name, own in self.take_fields().items()}
        all_parts, splits = {f"{split}.{name}": part for name, part in named.items()}, {split: about}
        if beside is not None:
            others = read_others(Path(path), split, beside)
            all_parts, splits = {**others[0], **all_parts}, {**others[1], **splits}
        return write_parts(Path(path), all_parts, splits)

    def _write(self, spool: _Spool, order: npt.NDArray[np.int64] | None, file: BinaryIO) -> None:
        for some in self._read_in_order(spool, order):
            file.write(some.tobytes())

    def _read_in_order(
        self, spool: _Spool, order: npt.NDArray[np.int64] | None = None
    ) -> Iterator[npt.NDArray[Any]]:
        """The rows by the order of their samples (None: as they came), some samples at a time."""
        is_of_positions, samples, step = spool.rows == self._values.rows, len(self), self._piece
        counts = self.lengths.prod(axis=1) if is_of_positions else np.ones(samples, np.int64)
        starts, rows = np.concatenate([[0], np.cumsum(counts)]), None if order is None else spool.map()
        for first in range(0, samples, step):
            if rows is None or order is None:
                begin, end = (int(starts[at]) for at in (first, min(first + step, samples)))
                yield spool.read(begin, end - begin)
                continue
            some = order[first : first + step]
            ends = np.cumsum(counts[some])
            yield rows[np.repeat(starts[some] - ends + counts[some], counts[some]) + np.arange(ends[-1])]

    def close(self) -> None:
        """Free the memory and the files; what `arrays` gave stays."""
        self._values.close()
        self._target.close()


def _read_target(target: Any, rows: int) -> npt.NDArray[Any]:
    truth = np.asarray(target)
    if truth.shape[:1] != (rows,):
        raise ValueError(f"target must have {rows} rows, got the shape {truth.shape}")
    return truth.astype(np.float64 if truth.dtype.kind == "f" else np.int64)


def _name_dtype(dtype: np.dtype[Any]) -> str:
    return next(name for name, numpy_name in DTYPES.items() if dtype == np.dtype(numpy_name))
