"""Infers the fields of a pipeline's samples by preparing one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from pipelines.errors import ForeignRandomness, PipelineError, SampleError
from pipelines.order import Generators
from pipelines.prepare import global_generators
from pipelines.prepare.fields import INDEX, OK, Field, describe_fields
from pipelines.prepare.memory_order import NUMBERS, MemoryLayout, layout_of
from pipelines.prepare.preparer import as_array, prepare_sample

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
        ForeignRandomness: the source or a stage draws from a global generator that nobody seeds.
    """
    generators = Generators(pipeline.seed)
    try:
        with global_generators.preserve_states():
            for index in range(start, len(pipeline.source)):
                try:
                    return _prepare_checked(pipeline, generators, index, stages)
                except SampleError:
                    if pipeline.on_error == "raise" or index == len(pipeline.source) - 1:
                        raise
    finally:
        pipeline.source.forget()  # a consumer that reads from a feeder has no use for a whole row group
    raise AssertionError("a pipeline has samples")


def _prepare_checked(pipeline: Pipeline, generators: Generators, index: int, stages: int | None) -> dict[str, Any]:
    """One sample of epoch 0 after the stages [0, stages), by default all, made stage by stage."""
    last = len(pipeline.stages) if stages is None else stages

    def make(given: Any, first: int, stop: int) -> Any:
        return prepare_sample(pipeline, generators, index, 0, given, first, stop)

    def find_draws(first: int, stop: int) -> set[str]:
        # Made anew each time: a stage may write into what it is given.
        given = [make(None, 0, first) if stop else None for _ in range(2)]
        return global_generators.find_draws(lambda: make(given.pop(), first, stop))

    sample: Any = None
    for stop in range(last + 1):
        first = max(0, stop - 1)
        before = global_generators.read_states()
        sample = make(sample, first, stop)
        if _select_undeclared(
            pipeline, stop, global_generators.find_changes(before, global_generators.read_states())
        ):
            drawn = _select_undeclared(pipeline, stop, find_draws(first, stop))
            if drawn:
                raise ForeignRandomness(_explain_draws(pipeline, stop, index, drawn))
        if not isinstance(sample, dict):
            return prepare_sample(pipeline, generators, index, 0, last=stages)
    return sample  # type: ignore[no-any-return]


def _select_undeclared(pipeline: Pipeline, stop: int, generators: set[str]) -> set[str]:
    """Of these generators those that are not seeded for the stage before `stop` (0: for the source)."""
    seeded = stop > 0 and pipeline.stages[stop - 1].random == "torch"
    return generators - {global_generators.TORCH} if seeded else generators


def _explain_draws(pipeline: Pipeline, stop: int, index: int, drawn: set[str]) -> str:
    whose = " and ".join(sorted(drawn))
    if not stop:
        return (
            f"reading {pipeline.source.where(index)} draws from {whose}, which nobody seeds: it is another record "
            "each time. Leave what is random out of the source and map() it as a stage "
            '(random="torch" if it draws from torch)'
        )
    only_torch = drawn == {global_generators.TORCH}
    how = 'declare it, map(..., random="torch")' if only_torch else "draw from the generator of f(sample, rng)"
    return (
        f"the stage {pipeline.stages[stop - 1].name} draws from {whose}, which nobody seeds: its samples would "
        f"differ from run to run and from process to process; {how}"
    )


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
