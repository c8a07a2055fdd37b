"""Prepares samples: reads a record, applies the stages, and stores the result in the columns of a buffer.

The preparation workers of a feeder and a loader on its own run the same function, so their samples are bitwise
equal.
"""

from __future__ import annotations

import errno
import functools
import itertools
import math
import time
import warnings
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pipelines.description import PipelineDescription
from pipelines.environment.torch_threads import limit_torch_threads
from pipelines.errors import DataOutOfReach, ForeignRandomness, SampleError
from pipelines.order.epoch_order import Indices
from pipelines.prepare.batches import BatchStages, Begun
from pipelines.prepare.checked import prepare_checked
from pipelines.prepare.generators import SEEDED, DrawWatch, preserve_seeded
from pipelines.prepare.sample_maker import SampleMaker
from pipelines.samples.fields import FAILED, GOOD, INDEX, ODD, OK, UNFIT, UNREACHED, Columns
from pipelines.samples.memory_order import has_layout, is_channels_last
from pipelines.samples.structure import StructureMismatch, describe_shape_mismatch

_CHUNK = 8192  # of the order, found at once: 1024 take about twice as long a sample
_BLOCKS_CHUNK = 1024  # is announced to the source, which may hold the groups of all of it
_LARGE = 16_384
_RUN_OUT = (errno.ENOMEM, errno.EMFILE, errno.ENFILE)
# What torch and numpy both know: what else numpy has, no batch can carry.
_DTYPES = frozenset(
    f"{kind}{bits}"
    for kind, widths in (("uint", (8, 16, 32, 64)), ("int", (8, 16, 32, 64)), ("float", (16, 32, 64)))
    for bits in widths
) | {"bool", "complex64", "complex128"}
# What every OpenCV can split; see `_store`.
_SPLIT = ("uint8", "uint16", "int16", "float32", "float64")


class _Target(NamedTuple):
    """The column of a field; `is_split`: an image is parted into its channels by OpenCV."""

    name: str
    column: npt.NDArray[Any]
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    is_split: bool


class Preparer:
    """Prepares the samples of one pipeline, in one process.

    Attributes:
        cpu_s: CPU-seconds of this thread spent in `fill` so far.
        copies_rows: whether samples are rows of arrays, which are copied, many at once.
        on_skip: called with the error of each record that is left out.

    Args:
        in_ring: whether readers that go on from the pipeline's last stage are told which samples they can take.
        cache: keeps samples from one epoch to the next (`pipelines.cache.file.Cache`).
        is_for_others: whether other processes read the columns, which then prepare themselves what is out of reach
            here.
    """

    def __init__(
        self,
        pipeline: PipelineDescription,
        on_skip: Callable[[SampleError], None] | None = None,
        *,
        in_ring: bool = False,
        cache: Any = None,
        is_for_others: bool = False,
    ) -> None:
        self.pipeline = pipeline
        self.on_skip = on_skip
        self.cpu_s = 0.0
        self._fields = pipeline.fields
        self._structure = pipeline.structure
        layouts = pipeline.layouts if in_ring else ""
        self._layouts = layouts if isinstance(layouts, dict) else None
        self._cache = cache
        self._is_for_others = is_for_others
        self._poison_records = pipeline.poison_records
        self._maker = SampleMaker(pipeline)
        self._batch_stages = BatchStages(self._maker, cache)
        self._order, self._ahead = pipeline.order(), _BLOCKS_CHUNK if pipeline.shuffle == "blocks" else _CHUNK
        self.copies_rows = (
            not pipeline.stages and self._cache is None and hasattr(type(pipeline.source), "copy_records")
        )
        self._chunk: tuple[int, int, Indices] = (-1, -1, np.empty(0, np.int64))
        self._seeded = frozenset[str]().union(*(SEEDED.get(stage.random, ()) for stage in pipeline.stages))
        self._watch = DrawWatch(pipeline, self._seeded)
        self._split = {
            name
            for name, (shape, dtype) in self._fields.items()
            if len(shape) == 3 and math.prod(shape) >= _LARGE and dtype in _SPLIT
        }

    def indices(self, epoch: int, start: int, stop: int) -> Indices:
        """The sample indices at the places [start, stop) of an epoch."""
        known_epoch, first, chunk = self._chunk
        if not (epoch == known_epoch and first <= start and stop <= first + len(chunk)):
            n = len(self.pipeline)
            first = start
            chunk = self._order(epoch, first, min(n, max(stop, first + self._ahead)))
            self._chunk = (epoch, first, chunk)
            if self.pipeline.shuffle == "blocks":
                self.pipeline.source.will_read(chunk if self._cache is None else self._cache.find_missing(chunk))
        return chunk[start - first : stop - first]

    def fill(self, columns: Columns, slot: int, epoch: int, start: int, stop: int) -> None:
        """Prepare the places [start, stop) of an epoch into columns[name][slot:], wrapping at their end.

        A record that cannot be prepared is marked in the column `_ok` where there is one.

        Raises:
            SampleError: a record cannot be prepared and the columns have no `_ok`.
            DataOutOfReach: an outage lasts (`transient`), and no other process reads the columns.
        """
        self.prepare(columns, slot, epoch, range(start, stop), self.indices(epoch, start, stop))

    def prepare(self, columns: Columns, slot: int, epoch: int, places: Iterable[int], indices: Indices) -> None:
        """As `fill`, of the samples with these indices, which are at these places of the epoch."""
        if not (self.copies_rows and self.copy(columns, slot, indices)):
            self._fill(columns, slot, epoch, zip(places, indices.tolist(), itertools.repeat(None)), 0)

    def copy(self, columns: Columns, slot: int, indices: Indices) -> bool:
        """Copy the records of a pipeline that `copies_rows`; False where they have to be read one by one."""
        if self._poison_records.codes or self._poison_records.reads_alone:
            return False
        began = time.thread_time()
        capacity, copied = len(columns[INDEX]), 0
        while copied < len(indices):
            part = indices[copied : copied + capacity - slot]
            window = {name: column[slot : slot + len(part)] for name, column in columns.items()}
            window.pop(INDEX)[:] = part
            if OK in window:
                window.pop(OK)[:] = GOOD
            if not self.pipeline.source.copy_records(part, window):
                self.copies_rows = False
                return False
            copied, slot = copied + len(part), 0
        self.cpu_s += time.thread_time() - began
        return True

    def _get_or_prepare(self, index: int, epoch: int, cache: Any) -> dict[str, Any]:
        """The sample after the cache's stages: from it, or prepared and given to it."""
        sample: dict[str, Any] | None = cache.get(index)
        if sample is None:
            sample = self._maker.make(index, epoch, last=cache.stages)
            cache.put(index, sample)  # as bytes, at once: what is written into the sample later is not kept
        return sample

    def complete(self, columns: Columns, epoch: int, samples: Iterable[Begun], first: int) -> None:
        """Prepare samples of an epoch, of which somebody else has done the stages [0, first), into the columns.

        Args:
            samples: (position in the epoch, index, sample after those stages, normalized); None for one to be
                prepared in full.

        Raises:
            SampleError: as `fill` does.
        """
        self._fill(columns, 0, epoch, samples, first)

    def _fill(self, columns: Columns, slot: int, epoch: int, samples: Iterable[Begun], first: int) -> None:
        began = time.thread_time()
        poison, note = self._poison_records.codes, self._poison_records.note
        if note is not None:
            note.words[1] = epoch
        capacity = len(columns[INDEX])
        ok = columns.get(OK)
        indices, cache, targets = columns[INDEX], self._cache, self._find_targets(columns)
        make = self._maker.make
        if self._batch_stages.are_due(first):
            samples, first, cache = self._batch_stages.run(samples, epoch, first), self._batch_stages.end, None
        filled: list[tuple[int, int, int]] = []  # slot, index, place
        self._watch.start()
        try:
            with limit_torch_threads(), preserve_seeded(self._seeded):
                for place, index, begun in samples:
                    indices[slot] = index
                    filled.append((slot, index, place))
                    if note is not None:
                        note.words[0] = index + 1
                    status = FAILED
                    try:
                        if isinstance(begun, Exception):
                            raise begun
                        done = first
                        if begun is None and cache is not None:
                            begun, done = self._get_or_prepare(index, epoch, cache), cache.stages
                        sample = make(index, epoch, begun, 0 if begun is None else done, None, place)
                        status = UNFIT
                        if self._structure is None:
                            status = self._store(targets, slot, index, sample)
                        else:
                            status = self._store_structured(columns, slot, index, sample)
                    except DataOutOfReach:
                        if ok is None or not self._is_for_others:
                            raise
                        status = UNREACHED
                    except SampleError as error:
                        if ok is None or (self.pipeline.on_error == "skip" and _is_resource_exhaustion(error)):
                            raise
                        status = poison.get(index, status)
                        if self.on_skip is not None and not (status == UNFIT and self.pipeline.is_cut):
                            self.on_skip(error)
                    if ok is not None:
                        ok[slot] = status
                    slot += 1
                    if slot == capacity:
                        slot = 0
            if changed := self._watch.find_changes():
                self._refuse_draws(filled, epoch, ok, changed)
        finally:
            if note is not None:
                note.clear()
            self.cpu_s += time.thread_time() - began

    def _refuse_draws(
        self, filled: list[tuple[int, int, int]], epoch: int, ok: npt.NDArray[Any] | None, changed: set[str]
    ) -> None:
        """Finds the samples for which a stage has drawn from a generator that is not seeded: they count as failed.

        Args:
            filled: (slot, index, place in the epoch) of the samples.
            ok: their status; None: the first one is raised.
            changed: names of the generators whose states have changed.

        Raises:
            ForeignRandomness: there is one, and no status to say it in.
        """
        has_draws = False
        for slot, index, place in filled:
            if ok is not None and ok[slot] not in (GOOD, ODD):
                continue
            try:
                for _ in range(2):  # a draw of another thread, noticed once, is none of the stage's
                    prepare_checked(self._maker, index, epoch, place=place)
            except ForeignRandomness as error:
                has_draws = True
                if ok is None:
                    raise
                ok[slot] = FAILED
                if self.on_skip is not None:
                    self.on_skip(SampleError(index, self.pipeline.source.where(index), str(error)))
            except SampleError:
                continue
            except DataOutOfReach:
                if ok is None or not self._is_for_others:
                    raise
                has_draws, ok[slot] = True, UNREACHED
        if not has_draws:
            self._watch.ignore(changed)

    def _find_targets(self, columns: Columns) -> list[_Target]:
        """What `_store` needs of the columns: looked up once for all samples that are stored in them."""
        return [
            _Target(name, columns[name], shape, columns[name].dtype, name in self._split)
            for name, (shape, _) in self._fields.items()
        ]

    def _store(self, targets: list[_Target], slot: int, index: int, sample: dict[str, Any]) -> int:
        layouts = self._layouts
        # A class of its own (a defaultdict) may do what is not in its items, which are all that the columns hold.
        status = GOOD if layouts is None or type(sample) is dict else ODD
        for name, column, shape, dtype, is_split in targets:
            value = array = sample.get(name)
            if type(value) is not np.ndarray:
                if isinstance(value, np.generic) and value.dtype == dtype and not shape and not layouts:
                    column[slot] = value  # a label, at a fraction of the time of what follows
                    continue
                array = as_array(value)
            if array is None or array.shape != shape or array.dtype != dtype:
                raise self._shape_mismatch_error(index, sample, name)
            if is_split and is_channels_last(array):
                _load_opencv_split()(array.transpose(1, 2, 0), list(column[slot]))
            else:
                column[slot] = array
            if layouts is not None and not has_layout(value, layouts[name]):
                status = ODD
        if len(sample) != len(targets):
            surplus = next(name for name in sample if name not in self._fields)
            raise self._shape_mismatch_error(index, sample, surplus)
        return status

    def _store_structured(self, columns: Columns, slot: int, index: int, sample: dict[str, Any]) -> int:
        """`_store` for samples with nested or declared fields."""
        assert self._structure is not None
        try:
            is_kept = self._structure.store(sample, self._fields, columns, slot, self._layouts, as_array)
        except StructureMismatch as shape_mismatch:
            raise SampleError(index, self.pipeline.source.where(index), str(shape_mismatch)) from None
        return GOOD if is_kept else ODD

    def _shape_mismatch_error(self, index: int, sample: dict[str, Any], name: str) -> SampleError:
        field = self._fields.get(name)
        if name not in sample:
            reason = f"the field {name!r} is missing"
        elif field is None:
            reason = f"the field {name!r} is not one of the pipeline's ({', '.join(self._fields)})"
        else:
            reason = describe_shape_mismatch(name, sample[name], as_array(sample[name]), field)
        return SampleError(index, self.pipeline.source.where(index), reason)


@functools.cache
def _load_opencv_split() -> Callable[..., Any]:
    import cv2

    split: Callable[..., Any] = cv2.split
    return split


def warn_skipped(error: SampleError) -> None:
    """Warns that a record is left out, if there is no feeder that counts it."""
    warnings.warn(f"left out: {error}", stacklevel=3)


def _is_resource_exhaustion(error: BaseException | None) -> bool:
    """Whether the process ran out of memory or file descriptors, so that another may still read the record."""
    while error is not None:
        if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno in _RUN_OUT):
            return True
        error = error.__cause__
    return False


def as_array(value: Any) -> npt.NDArray[Any] | None:
    """A number, array or tensor as a numpy array; None for anything else."""
    if isinstance(value, np.ndarray):
        array = value
    elif isinstance(value, bool | int | float | complex | np.generic):
        array = np.asarray(value)
    elif hasattr(value, "detach"):
        try:
            array = value.detach().numpy()
        except (TypeError, RuntimeError):  # on a device, or of a dtype that numpy has not
            return None
    else:
        return None
    return array if array.dtype.isnative and array.dtype.name in _DTYPES else None
