"""Infers the fields of a pipeline's samples by preparing one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from pipelines.description import PipelineDescription
from pipelines.errors import PipelineError, SampleError
from pipelines.prepare.checked import prepare_checked
from pipelines.prepare.preparer import as_array
from pipelines.prepare.sample_maker import SampleMaker
from pipelines.samples.fields import INDEX, OK, Field
from pipelines.samples.memory_order import NUMBERS, MemoryLayout, layout_of
from pipelines.samples.nested import Slot
from pipelines.samples.structure import Inferred, Structure, column_fields, find_foreign_container, is_flat
from pipelines.stage import find_slots


def infer(pipeline: PipelineDescription) -> Inferred:
    """Infer fields, layouts and structure of a pipeline's samples from the first that can be prepared.

    Raises:
        SampleError: it cannot be prepared (with `on_error="skip"`: none can).
        PipelineError: a field is no array.
        ForeignRandomness: see `prepare_first_sample`.
    """
    return infer_from_sample(prepare_first_sample(pipeline), find_slots(pipeline.stages))


def infer_from_sample(sample: dict[str, Any], slots: Mapping[str, Slot]) -> Inferred:
    """What `infer` finds in a sample.

    Args:
        slots: path -> what stages have declared of the field there (`find_slots`).

    Raises:
        PipelineError: a field is no array, and nothing else is declared of it.
    """
    for name in sample:
        if name in (INDEX, OK):
            raise PipelineError(
                f"the field name {name!r} is taken: a batch carries the samples' index there; rename the field, "
                f".map(stages.rename({name}='row')), or leave it out, .map(stages.drop({name!r}))"
            )
    if is_flat(sample, slots):
        fields = {name: _infer_field(name, value) for name, value in sample.items()}
        structure = None
    else:
        structure, fields = Structure.of(sample, slots), {}
        for leaf, slot, value in structure.columns(sample, slots):
            if slot is not None and slot.kind in ("text", "binary"):
                fields.update(column_fields(leaf, None, slot))
            else:
                shape, dtype = _infer_field(leaf.column, value)
                fields.update(column_fields(leaf, Field(shape, dtype), slot))
    if not fields:
        raise PipelineError("the pipeline's samples have no fields")
    return Inferred(fields, _infer_layouts(sample, structure), structure)


def _infer_field(name: str, value: Any) -> Field:
    array = as_array(value)
    if array is not None:
        return Field(array.shape, str(array.dtype))
    drop = f"leave it out with .map(stages.drop({name!r}))"
    if isinstance(value, str):
        how = f"declare it, .map(stages.text({name!r}, most_bytes=...)), tokenize it, or {drop}"
    elif isinstance(value, bytes):
        how = f"decode it, declare it, .map(stages.binary({name!r}, most_bytes=...)), or {drop}"
    elif isinstance(value, list):
        how = (
            f"turn it into an array, or a tuple if each entry is a value of its own; if its length varies, "
            f".map(stages.ragged({name!r}, most=...)); or {drop}"
        )
    elif isinstance(value, tuple):
        how = f"turn it into a dict (._asdict()) or a plain tuple, or {drop}"
    else:
        how = f"return numbers or arrays, an object as a dict of its arrays for collate= to rebuild, or {drop}"
    raise PipelineError(f"the field {name!r} is {_name_type(value)}, which a batch cannot hold: {how}")


def prepare_first_sample(
    pipeline: PipelineDescription, stages: int | None = None, start: int = 0
) -> dict[str, Any]:
    """The first sample from index `start` on that can be prepared, after all stages or so many.

    Raises:
        SampleError: it cannot be prepared (with `on_error="skip"`, and of a set: none can).
        ForeignRandomness: the source or a stage draws random numbers that are not seeded.
    """
    maker, first = SampleMaker(pipeline), None
    goes_on = pipeline.on_error == "skip" or pipeline.is_set
    try:
        for index in range(start, len(pipeline.source)):
            try:
                return prepare_checked(maker, index, last=stages, is_repeated=True, is_varied=start == 0)
            except SampleError as error:
                first = first or error
                if not goes_on or index == len(pipeline.source) - 1:
                    raise first from first.__cause__
    finally:
        pipeline.source.forget()  # a consumer that reads from a feeder has no use for a whole row group
    raise AssertionError("a pipeline has samples")


def _infer_layouts(sample: dict[str, Any], structure: Structure | None) -> dict[str, MemoryLayout] | str:
    """Returns the memory layout of each value, or a text that says why a ring cannot hold the sample."""
    if type(sample) is not dict:
        return f"the sample is {_name_type(sample)}, not a plain dict"
    values: list[tuple[str, Any]] = list(sample.items())
    if structure is not None:
        if (why := find_foreign_container(sample)) is not None:
            return why
        flat = structure.flatten(sample)
        values = [
            (leaf.column, value)
            for leaf, value in flat
            if not (leaf.kind in ("text", "binary") and type(value) in (str, bytes))
        ]
    arrays: list[tuple[str, npt.NDArray[Any]]] = []
    for name, value in values:
        if type(value) in NUMBERS:
            continue
        if not (type(value) is np.ndarray or isinstance(value, np.generic)):
            return f"the field {name!r} is {_name_type(value)}, neither a numpy array nor a number"
        if type(value) is np.ndarray:
            other = next((other for other, array in arrays if np.may_share_memory(array, value)), None)
            if other is not None:
                return f"the fields {other!r} and {name!r} lie in the same memory"
            arrays.append((name, value))
    return {name: NUMBERS.get(type(value)) or layout_of(value) for name, value in values}


def _name_type(value: Any) -> str:
    return str(value.dtype) if hasattr(value, "dtype") else type(value).__name__
