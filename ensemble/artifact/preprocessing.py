"""Divides the stages of a pipeline: the last ones go into the exported program, the others remain to its caller.

A stage goes into the program if it has a twin in torch (`as_module`), all stages after it do, and what comes
before it can lie in one tensor [b, ...] with that of other samples. So a program takes decoded uint8 images and
scales them itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from pipelines import stages
from pipelines.errors import PipelineError
from pipelines.stages.records import as_record

RENAME, CENTER_CROP = type(stages.rename(a="b")), type(stages.center_crop("a", 1))
#: Kinds of dtypes that numbers are cast between.
NUMBERS = "buif"

if TYPE_CHECKING:
    from torch import nn

    from pipelines import Pipeline
    from pipelines.stage import Stage


@dataclass(frozen=True)
class Input:
    """A tensor that a program takes.

    Attributes:
        shape: without the batch axis; None for a height or width that may vary.
        least: the smallest sizes of these axes, in their order.
        dtype: as numpy names it.
    """

    shape: tuple[int | None, ...]
    dtype: str
    least: tuple[int, ...] = ()


@dataclass(frozen=True)
class Division:
    """Which stages of a pipeline are in a program.

    Attributes:
        prepared: the pipeline up to the program, of the fields that the program takes.
        of_caller, in_program: the stages, in order.
        inputs: by field.
    """

    prepared: Pipeline
    of_caller: tuple[Stage, ...]
    in_program: tuple[Stage, ...]
    inputs: Mapping[str, Input]

    def make_modules(self) -> list[nn.Module]:
        return [module for stage in self.in_program if (module := _make_module(stage)) is not None]

    def describe(self) -> dict[str, list[dict[str, Any]]]:
        """See `layout.read_record`."""
        return {
            "of_caller": [_describe_stage(stage) for stage in self.of_caller],
            "in_program": [_describe_stage(stage) for stage in self.in_program],
        }


def divide(pipeline: Pipeline, fields: Sequence[str], *, fold: bool = True) -> Division:
    """Divide the stages of a pipeline, so that the program takes as little prepared samples as it can.

    Args:
        pipeline: with a random stage none goes into the program.
        fields: that the model reads of the pipeline's samples.
        fold: whether any stage goes into the program.

    Raises:
        SampleError: the first sample cannot be prepared.
    """
    count = len(pipeline.stages)
    if pipeline.random_stage is not None:
        return _divide_at(pipeline, count, fields)
    first = count
    while fold and first > 0 and _make_module(pipeline.stages[first - 1]) is not None:
        first -= 1
    for cut in range(first, count):
        try:
            return _divide_at(pipeline, cut, fields)
        except PipelineError:  # what lies before that stage does not fit into a tensor: texts, bytes of images
            continue
    return _divide_at(pipeline, count, fields)


def _divide_at(pipeline: Pipeline, cut: int, fields: Sequence[str]) -> Division:
    before, after = pipeline.stages[:cut], pipeline.stages[cut:]
    names, cropped = list(fields), dict[str, tuple[int, int]]()
    for stage in reversed(after):
        if isinstance(stage.call, RENAME):
            old = {new: old for old, new in stage.call.names}
            names = [old.get(name, name) for name in names]
            cropped = {old.get(name, name): size for name, size in cropped.items()}
        elif isinstance(stage.call, CENTER_CROP) and stage.call.field in names:
            cropped[stage.call.field] = stage.call.size
    prepared = pipeline.take_stages(cut).map(stages.select(*names))
    inputs = {
        name: Input((field.shape[0], None, None), field.dtype, cropped[name])
        if name in cropped
        else Input(field.shape, field.dtype)
        for name, field in prepared.fields.items()
    }
    return Division(prepared, before, after, inputs)


def _make_module(stage: Stage) -> nn.Module | None:
    """The twin of a stage, which a user's stage may have as well; None for one that has none."""
    make = getattr(stage.call, "as_module", None)
    if stage.field is not None or stage.random is not None or make is None:
        return None
    module: nn.Module | None = make()
    return module


def _describe_stage(stage: Stage) -> dict[str, Any]:
    return {"name": stage.name, "record": as_record(stage.call) if stage.field is None else None}


@dataclass(frozen=True)
class As:
    """A stage that converts numbers to a dtype, where that loses no more than precision.

    Attributes:
        field: of the numbers.
        dtype: numpy's name of it.
    """

    field: str
    dtype: str

    def __call__(self, sample: dict[str, Any]) -> dict[str, Any]:
        """The sample with the field in the dtype.

        Raises:
            PipelineError: the dtype cannot hold a number: it is too large, negative, or no integer.
        """
        if self.field not in sample:
            raise PipelineError(f"no field {self.field!r} (the sample has: {', '.join(map(str, sample))})")
        value, dtype = np.asarray(sample[self.field]), np.dtype(self.dtype)
        if value.dtype == dtype:
            return sample
        if value.dtype.kind not in NUMBERS or dtype.kind not in NUMBERS:
            raise PipelineError(f"field {self.field!r} holds {value.dtype}, not {dtype}")
        with np.errstate(over="ignore", invalid="ignore"):
            made = value.astype(dtype)
        lost = np.isinf(made) & ~np.isinf(value) if dtype.kind == "f" else made != value
        if lost.any():
            raise PipelineError(f"field {self.field!r} holds {value[lost].flat[0]}, which {dtype} cannot hold")
        return {**sample, self.field: made}
