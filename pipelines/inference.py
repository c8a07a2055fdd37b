"""What a pipeline's samples look like, found by preparing one."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from pipelines.errors import PipelineError, SampleError
from pipelines.fields import Field, described
from pipelines.forms import NUMBERS, Form, form_of
from pipelines.order import Generators
from pipelines.prepare import INDEX, OK, as_array, prepared, torch_generator_kept

if TYPE_CHECKING:
    from pipelines.pipeline import Pipeline


def infer(pipeline: Pipeline) -> tuple[dict[str, Field], dict[str, Form] | str]:
    """`Pipeline.fields` and `Pipeline.forms`, from the first sample that can be prepared.

    With `on_error="skip"` that one may be the odd one, for which all others would be left out: what the first
    sample, one in the middle and the last one say is compared, and two have to agree.

    Raises:
        SampleError: it cannot be prepared (with `on_error="skip"`: none can).
        PipelineError: a field is no array, or no two samples are alike.
    """
    found = [inferred(first_sample(pipeline))]
    if pipeline.on_error == "raise":
        return found[0]
    last = len(pipeline) - 1
    for start in sorted({last // 2, last} - {0}):
        with contextlib.suppress(PipelineError):
            found.append(inferred(first_sample(pipeline, start=start)))
    alike = [sum(fields == other for other, _ in found) for fields, _ in found]
    if len(found) == 3 and max(alike) == 1:
        said = "; ".join(str(described(fields)) for fields, _ in found)
        raise PipelineError(
            f"no two samples have the same fields, so that all would be left out: {said}; resize or pad them"
        )
    return found[alike.index(max(alike))]


def inferred(sample: dict[str, Any]) -> tuple[dict[str, Field], dict[str, Form] | str]:
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
                f"the field {name!r} is {_kind(value)}, which cannot stand in a batch: "
                f"turn it into an array, or leave it out with .map(stages.drop({name!r}))"
            )
        fields[name] = Field(array.shape, str(array.dtype))
    if not fields:
        raise PipelineError("the pipeline's samples have no fields")
    return fields, _forms(sample)


def first_sample(pipeline: Pipeline, stages: int | None = None, start: int = 0) -> dict[str, Any]:
    """The first sample from index `start` on that can be prepared, after all stages or so many.

    Raises:
        SampleError: it cannot be prepared (with `on_error="skip"`: none can).
    """
    generators = Generators(pipeline.seed)
    try:
        with torch_generator_kept(any(s.random == "torch" for s in pipeline.stages)):
            for index in range(start, len(pipeline)):
                try:
                    return prepared(pipeline, generators, index, 0, last=stages)
                except SampleError:
                    if pipeline.on_error == "raise" or index == len(pipeline) - 1:
                        raise
    finally:
        pipeline.source.forget()  # a consumer that reads from a feeder has no use for a whole row group
    raise AssertionError("a pipeline has samples")


def _forms(sample: dict[str, Any]) -> dict[str, Form] | str:
    """The form of each value, or why readers could not go on from this sample's place in a ring."""
    if type(sample) is not dict:
        return f"the sample is {_kind(sample)}, not a plain dict"
    arrays: list[tuple[str, npt.NDArray[Any]]] = []
    for name, value in sample.items():
        if type(value) in NUMBERS:
            continue
        if not (type(value) is np.ndarray or isinstance(value, np.generic)):
            return f"the field {name!r} is {_kind(value)}, neither a numpy array nor a number"
        if type(value) is np.ndarray:
            other = next((other for other, array in arrays if np.may_share_memory(array, value)), None)
            if other is not None:
                return f"the fields {other!r} and {name!r} lie in the same memory"
            arrays.append((name, value))
    return {name: NUMBERS.get(type(value)) or form_of(value) for name, value in sample.items()}


def _kind(value: Any) -> str:
    return str(value.dtype) if hasattr(value, "dtype") else type(value).__name__
