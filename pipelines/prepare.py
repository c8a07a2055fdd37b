"""From a source's record to a sample's place in memory: what a preparation worker does, and a loader alone.

Both run the very same function, so what is shared and what is private are equal to the last bit.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from pipelines.errors import PipelineError, SampleError
from pipelines.fields import Field
from pipelines.order import Generators, Indices, epoch_indices

if TYPE_CHECKING:
    from pipelines.pipeline import Pipeline

Columns = dict[str, npt.NDArray[Any]]

INDEX = "index"
OK = "_ok"
_CHUNK = 1024
_LARGE = 16_384


class Preparer:
    """Prepares the samples of one pipeline, in one process.

    Attributes:
        cpu_s: CPU-seconds of this thread spent in `fill` so far.
        on_skip: called with the error of each record that is left out.
    """

    def __init__(self, pipeline: Pipeline, on_skip: Callable[[SampleError], None] | None = None) -> None:
        self.pipeline = pipeline
        self.on_skip = on_skip
        self.cpu_s = 0.0
        self._fields = pipeline.fields
        self._generators = Generators(pipeline.seed)
        self._chunk: tuple[int, int, Indices] = (-1, -1, np.empty(0, np.int64))
        self._in_torch = any(stage.random == "torch" for stage in pipeline.stages)

    def indices(self, epoch: int, start: int, stop: int) -> Indices:
        """The sample indices at the places [start, stop) of an epoch."""
        known_epoch, first, chunk = self._chunk
        if not (epoch == known_epoch and first <= start and stop <= first + len(chunk)):
            n = len(self.pipeline)
            first = start
            chunk = epoch_indices(
                n,
                self.pipeline.seed,
                epoch,
                first,
                min(n, max(stop, first + _CHUNK)),
                shuffle=self.pipeline.shuffle,
            )
            self._chunk = (epoch, first, chunk)
        return chunk[start - first : stop - first]

    def fill(self, columns: Columns, slot: int, epoch: int, start: int, stop: int) -> None:
        """Prepare the places [start, stop) of an epoch into columns[name][slot:], wrapping at their end.

        A record that cannot be prepared is marked in the column `_ok` where there is one.

        Raises:
            SampleError: a record cannot be prepared and the columns have no `_ok`.
        """
        began = time.thread_time()
        capacity = len(columns[INDEX])
        ok = columns.get(OK)
        saved = _torch_state() if self._in_torch else None
        try:
            for index in self.indices(epoch, start, stop).tolist():
                columns[INDEX][slot] = index
                try:
                    self._store(columns, slot, index, self.sample(index, epoch))
                except SampleError as error:
                    if ok is None:
                        raise
                    ok[slot] = 0
                    if self.on_skip is not None:
                        self.on_skip(error)
                else:
                    if ok is not None:
                        ok[slot] = 1
                slot += 1
                if slot == capacity:
                    slot = 0
        finally:
            if saved is not None:
                _restore_torch_state(saved)
            self.cpu_s += time.thread_time() - began

    def sample(self, index: int, epoch: int) -> dict[str, Any]:
        """One sample after all stages.

        Raises:
            SampleError: naming the index, the file and the stage.
        """
        stage = None
        try:
            sample = self.pipeline.source[index]
            for position, stage in enumerate(self.pipeline.stages):
                value = sample if stage.field is None else sample[stage.field]
                if stage.random is None:
                    value = stage.call(value)
                elif stage.random == "numpy":
                    value = stage.call(value, self._generators.at(epoch, index, position))
                else:
                    _seed_torch(self._generators.at(epoch, index, position))
                    value = stage.call(value)
                sample = value if stage.field is None else {**sample, stage.field: value}
        except SampleError as error:
            if error.index == index:
                raise
            raise SampleError(index, error.where, error.reason) from error
        except Exception as error:
            said = str(error) or type(error).__name__
            if isinstance(error, KeyError):
                said = f"no field {error}"
            reason = f"{stage.name}: {said}" if stage else said
            raise SampleError(index, self.pipeline.source.where(index), reason) from error
        if not isinstance(sample, dict):
            where = self.pipeline.source.where(index)
            raise SampleError(index, where, f"the last stage returned {type(sample).__name__}, not a dict")
        return sample

    def _store(self, columns: Columns, slot: int, index: int, sample: dict[str, Any]) -> None:
        for name, field in self._fields.items():
            given = sample.get(name)
            value = given if type(given) is np.ndarray else _as_array(given)
            if value is None or value.shape != field.shape or value.dtype != columns[name].dtype:
                raise self._misfit(index, sample, name)
            if value.ndim == 3 and value.size >= _LARGE and _is_channels_last(value):
                import cv2

                cv2.split(value.transpose(1, 2, 0), list(columns[name][slot]))
            else:
                columns[name][slot] = value
        if len(sample) != len(self._fields):
            surplus = next(name for name in sample if name not in self._fields)
            raise self._misfit(index, sample, surplus)

    def _misfit(self, index: int, sample: dict[str, Any], name: str) -> SampleError:
        wanted = self._fields.get(name)
        value = _as_array(sample.get(name))
        if name not in sample:
            said = f"the field {name!r} is missing"
        elif wanted is None:
            said = f"the field {name!r} is not one of the pipeline's ({', '.join(self._fields)})"
        else:
            got = type(sample[name]).__name__ if value is None else f"{value.dtype}{list(value.shape)}"
            said = f"the field {name!r} is {got}, the pipeline's fields say {wanted.dtype}{list(wanted.shape)}"
        return SampleError(index, self.pipeline.source.where(index), said)


def infer_fields(pipeline: Pipeline) -> dict[str, Field]:
    """The fields of a pipeline's samples, from the first one that can be prepared.

    Raises:
        SampleError: it cannot be prepared (with `on_error="skip"`: none can).
        PipelineError: a field is no array.
    """
    blank = object.__new__(Preparer)
    blank.pipeline = pipeline
    blank._generators = Generators(pipeline.seed)
    saved = _torch_state() if any(s.random == "torch" for s in pipeline.stages) else None
    try:
        for index in range(len(pipeline)):
            try:
                sample = blank.sample(index, 0)
                break
            except SampleError:
                if pipeline.on_error == "raise" or index == len(pipeline) - 1:
                    raise
    finally:
        if saved is not None:
            _restore_torch_state(saved)
    fields = {}
    for name, value in sample.items():
        array = _as_array(value)
        if name in (INDEX, OK):
            raise PipelineError(f"the field name {name!r} is taken: a batch carries the samples' index there")
        if array is None:
            raise PipelineError(
                f"the field {name!r} is {type(value).__name__}, which cannot stand in a batch: "
                f"turn it into an array, or leave it out with .map(stages.drop({name!r}))"
            )
        fields[name] = Field(array.shape, str(array.dtype))
    if not fields:
        raise PipelineError("the pipeline's samples have no fields")
    return fields


def _as_array(value: Any) -> npt.NDArray[Any] | None:
    """A number, array or tensor as a numpy array; None for anything else."""
    if isinstance(value, np.ndarray):
        array = value
    elif isinstance(value, bool | int | float | complex | np.generic):
        array = np.asarray(value)
    elif hasattr(value, "detach"):
        array = value.detach().numpy()
    else:
        return None
    return array if array.dtype.kind in "biufc" else None


def _is_channels_last(value: npt.NDArray[Any]) -> bool:
    """Whether a [C, H, W] array is a view of contiguous [H, W, C] memory, as decoders leave it."""
    channels, height, width = value.shape
    size = value.itemsize
    return 1 < channels <= 4 and value.strides == (size, width * channels * size, channels * size) and height > 0


def _torch_state() -> Any:
    import torch

    return torch.get_rng_state()


def _restore_torch_state(state: Any) -> None:
    import torch

    torch.set_rng_state(state)


def _seed_torch(generator: np.random.Generator) -> None:
    import torch

    # The default CPU generator alone: torch.manual_seed would reseed the devices of a training process too.
    torch.default_generator.manual_seed(int(generator.integers(1 << 63)))
