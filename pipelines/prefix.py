"""What several pipelines have in common: the part that is prepared once, where only the ends differ."""

from __future__ import annotations

import warnings
from collections.abc import Iterable

from pipelines import checks
from pipelines.errors import PipelineError
from pipelines.pipeline import Pipeline
from pipelines.prepare.fields import Field

_PROBES = 4


def common_prefix(pipelines: Iterable[Pipeline]) -> Pipeline:
    """The longest leading part of all the pipelines whose samples a ring can carry to what follows.

    Pipelines agree up to a stage if they have grown from one object there, or if the fingerprints of source, seed,
    order, error policy and stages are the same. Behind the cut every value must be a number or numpy array of one
    shape and dtype, for a ring gives back nothing else: bytes before they are decoded, texts, images before they
    are resized do not pass. Where such a value forbids the longest cut, the next shorter is
    taken and a warning says what was in the way.

    Raises:
        PipelineError: not even the source is common, or no cut is possible.
    """
    try:
        pipelines = list(pipelines)
    except TypeError:
        raise PipelineError(f"common_prefix() takes several Pipelines, got {checks.shown(pipelines)}") from None
    for number, pipeline in enumerate(pipelines):
        checks.pipeline(f"pipeline {number} of common_prefix()", pipeline)
    if not pipelines:
        raise PipelineError("common_prefix() takes at least one pipeline")
    first, *others = pipelines
    agreed = len(first.stages)
    for other in others:
        agreed = min(agreed, first.count_common_stages(other.describe_for_peers()))
        if agreed < 0:
            difference = first.find_difference(other.describe_for_peers())
            why = difference.reason if difference else "their sources cannot be compared"
            raise PipelineError(f"these pipelines have nothing in common, not even the source: {why}")
    if all(len(pipeline.stages) == agreed for pipeline in pipelines):
        return first
    reasons: list[str] = []
    for stages in range(agreed, -1, -1):
        reason = _find_obstacle(first.prefix(stages))
        if reason is None:
            if reasons:
                said = f"only what comes up to {_name_end(first, stages)} is prepared in common: {reasons[0]}"
                warnings.warn(said, stacklevel=2)
            return first.prefix(stages, is_cut=all(len(pipeline.stages) > stages for pipeline in pipelines))
        reasons.append(f"after {_name_end(first, stages)} {reason}")
    raise PipelineError(f"these pipelines cannot share what they have in common: {reasons[0]}")


def _name_end(pipeline: Pipeline, stages: int) -> str:
    return pipeline.stages[stages - 1].name if stages else "the source"


def _find_obstacle(cut: Pipeline) -> str | None:
    """Why samples cannot be carried from the end of a pipeline to a stage elsewhere; None where they can.

    A few samples are prepared, spread over the source: photos of one camera are alike, those of a dataset are not.
    """
    from pipelines.prepare.inference import infer_from_sample, prepare_first_sample

    try:
        fields, layouts = cut.fields, cut.layouts
    except PipelineError as error:
        return str(error)
    if isinstance(layouts, str):
        return layouts
    for probe in range(1, _PROBES):
        sample = prepare_first_sample(cut, start=probe * (len(cut) - 1) // (_PROBES - 1))
        other = infer_from_sample(sample)[0]
        for name in {**fields, **other}:
            if fields.get(name) != other.get(name):
                here, there = _format_field(fields.get(name)), _format_field(other.get(name))
                return f"the field {name!r} is not alike in all samples: {here}, {there}"
    return None


def _format_field(field: Field | None) -> str:
    return "missing" if field is None else f"{field.dtype}{list(field.shape)}"
