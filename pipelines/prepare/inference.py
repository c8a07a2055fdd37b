"""Infers the fields of a pipeline's samples by preparing one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from pipelines.errors import ForeignRandomness, PipelineError, SampleError
from pipelines.order import Generators
from pipelines.prepare.checked import prepare_checked
from pipelines.prepare.fields import INDEX, OK, Field, describe_fields
from pipelines.prepare.memory_order import NUMBERS, MemoryLayout, layout_of
from pipelines.prepare.preparer import as_array

if TYPE_CHECKING:
    from pipelines.pipeline import Pipeline


def infer(pipeline: Pipeline) -> tuple[dict[str, Field], dict[str, MemoryLayout] | str]:
    """Infers `Pipeline.fields` and `Pipeline.forms` from the first sample that can be prepared.

    With `on_error="skip"`, that sample may be an outlier, for which all others would be left out. So the first
    sample, one in the middle and the last one are compared, and two have to agree.

    Raises:
        SampleError: it cannot be prepared (with `on_error="skip"`: none can).
        PipelineError: a field is no array, or no two samples are alike.
        ForeignRandomness: see `prepare_first_sample`.
    """
    found = [infer_from_sample(prepare_first_sample(pipeline))]
    if pipeline.on_error == "raise":
        return found[0]
    last = len(pipeline.source) - 1
    for start in sorted({last // 2, last} - {0}):
        try:
            found.append(infer_from_sample(prepare_first_sample(pipeline, start=start)))
        except ForeignRandomness:
            raise
        except PipelineError:
            continue
    alike = [sum(fields == other for other, _ in found) for fields, _ in found]
    if len(found) == 3 and max(alike) == 1:
        said = "; ".join(str(describe_fields(fields)) for fields, _ in found)
        raise PipelineError(
            f"no two samples have the same fields, so that all would be left out: {said}; resize or pad them"
        )
    return found[alike.index(max(alike))]


def infer_from_sample(sample: dict[str, Any]) -> tuple[dict[str, Field], dict[str, MemoryLayout] | str]:
    """What `infer` finds in a sample.

    Raises:
        PipelineError: a field is no array.
    """
    fields = {}
    for name, value in sample.items():
        array = as_array(value)
        if name in (INDEX, OK):
            raise PipelineError(f"the field name {name!r} is taken: a batch carries the samples' index there")
        if array is None:
            raise PipelineError(
                f"the field {name!r} is {_name_type(value)}, which cannot stand in a batch: "
                f"turn it into an array, or leave it out with .map(stages.drop({name!r}))"
            )
        fields[name] = Field(array.shape, str(array.dtype))
    if not fields:
        raise PipelineError("the pipeline's samples have no fields")
    return fields, _infer_layouts(sample)


def prepare_first_sample(pipeline: Pipeline, stages: int | None = None, start: int = 0) -> dict[str, Any]:
    """The first sample from index `start` on that can be prepared, after all stages or so many.

    Raises:
        SampleError: it cannot be prepared (with `on_error="skip"`: none can).
        ForeignRandomness: the source or a stage draws random numbers that nobody seeds.
    """
    generators = Generators(pipeline.seed)
    try:
        for index in range(start, len(pipeline.source)):
            try:
                return prepare_checked(pipeline, generators, index, last=stages, is_repeated=True)
            except SampleError:
                if pipeline.on_error == "raise" or index == len(pipeline.source) - 1:
                    raise
    finally:
        pipeline.source.forget()  # a consumer that reads from a feeder has no use for a whole row group
    raise AssertionError("a pipeline has samples")


def _infer_layouts(sample: dict[str, Any]) -> dict[str, MemoryLayout] | str:
    """Returns the memory layout of each value, or a text that says why a ring cannot hold the sample."""
    if type(sample) is not dict:
        return f"the sample is {_name_type(sample)}, not a plain dict"
    arrays: list[tuple[str, npt.NDArray[Any]]] = []
    for name, value in sample.items():
        if type(value) in NUMBERS:
            continue
        if not (type(value) is np.ndarray or isinstance(value, np.generic)):
            return f"the field {name!r} is {_name_type(value)}, neither a numpy array nor a number"
        if type(value) is np.ndarray:
            other = next((other for other, array in arrays if np.may_share_memory(array, value)), None)
            if other is not None:
                return f"the fields {other!r} and {name!r} lie in the same memory"
            arrays.append((name, value))
    return {name: NUMBERS.get(type(value)) or layout_of(value) for name, value in sample.items()}


def _name_type(value: Any) -> str:
    return str(value.dtype) if hasattr(value, "dtype") else type(value).__name__
