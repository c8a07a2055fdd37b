"""Finds the leading stages that several pipelines have in common, which are prepared once for all."""

from __future__ import annotations

import warnings
from collections.abc import Iterable

from pipelines.checks import check_pipeline, shorten_repr
from pipelines.errors import DataOutOfReach, PipelineError
from pipelines.fingerprint.comparison import Part, explain_unsure
from pipelines.pipeline import Pipeline
from pipelines.prepare.inference import infer_from_sample, prepare_first_sample
from pipelines.samples.fields import Field
from pipelines.stage import find_slots

_PROBES = 4


def find_shared_stages(pipelines: Iterable[Pipeline]) -> Pipeline:
    """Returns the longest common leading part of several pipelines whose samples a ring can hold.

    Pipelines agree up to a stage if they were mapped from one object there, or if the fingerprints of source,
    seed, order, error policy and stages are equal. After the cut, every value must be a number or a numpy array of
    one shape and dtype: encoded bytes, texts, and images before they are resized do not fit into a ring. If such a
    value forbids the longest cut, the next shorter one is used, and a warning gives the reason.

    Args:
        pipelines: one or more pipelines.

    Returns:
        A pipeline for a `Feeder`; each reader attaches with its own pipeline and applies the remaining stages.

    Raises:
        PipelineError: the sources differ, or no cut is possible.

    Examples:
        >>> shared = find_shared_stages([pipe.map(stages.scale("image", mean=mean)) for mean in (0.4, 0.5)])
    """
    try:
        pipelines = list(pipelines)
    except TypeError:
        raise PipelineError(
            f"find_shared_stages() takes several Pipelines, got {shorten_repr(pipelines)}"
        ) from None
    for number, pipeline in enumerate(pipelines):
        check_pipeline(f"pipeline {number} of find_shared_stages()", pipeline)
    if not pipelines:
        raise PipelineError("find_shared_stages() takes at least one pipeline")
    first, *others = pipelines
    agreed = len(first.stages)
    for other in others:
        agreed = min(agreed, first.count_common_stages(other.describe_for_peers()))
        if agreed < 0:
            difference = first.find_difference(other.describe_for_peers())
            why = difference.reason if difference else "their sources cannot be compared"
            raise PipelineError(f"these pipelines have nothing in common: {why}")
    if all(len(pipeline.stages) == agreed for pipeline in pipelines):
        return first
    reasons = _explain_unsure(pipelines, agreed)
    for stages in range(agreed, -1, -1):
        reason = _find_obstacle(first.take_stages(stages))
        if reason is None:
            if reasons:
                text = f"only the stages up to {_name_end(first, stages)} are shared: {reasons[0]}"
                warnings.warn(text, stacklevel=2)
            return first.take_stages(stages, is_cut=all(len(pipeline.stages) > stages for pipeline in pipelines))
        reasons.append(f"after {_name_end(first, stages)} {reason}")
    raise PipelineError(f"these pipelines cannot share what they have in common: {reasons[0]}")


def _explain_unsure(pipelines: list[Pipeline], stages: int) -> list[str]:
    """Says why the next stage is not common to all, where it may be the same but cannot be compared."""
    following = [pipeline.stages[stages].description for pipeline in pipelines if len(pipeline.stages) > stages]
    if len(following) < len(pipelines) or len({description.digest for description in following}) > 1:
        return []
    gaps = next((description.gaps for description in following if description.gaps), ())
    part = Part(f"stage {stages} {pipelines[0].stages[stages].name}", following[0].digest, gaps)
    return [why] if (why := explain_unsure([part])) else []


def _name_end(pipeline: Pipeline, stages: int) -> str:
    return pipeline.stages[stages - 1].name if stages else "the source"


def _find_obstacle(cut: Pipeline) -> str | None:
    """Says why a ring cannot hold the samples of a pipeline; None if it can.

    Prepares a few samples, spread over the source: neighbouring records often have equal shapes, distant ones not.
    """
    try:
        fields, layouts, structure = cut.fields, cut.layouts, cut.structure
    except DataOutOfReach:
        raise
    except PipelineError as error:
        return str(error)
    if isinstance(layouts, str):
        return layouts
    for probe in range(1, _PROBES):
        sample = prepare_first_sample(cut, start=probe * (len(cut.source) - 1) // (_PROBES - 1))
        inferred = infer_from_sample(sample, find_slots(cut.stages))
        if inferred.structure != structure:
            return "samples have different structures"
        for name in {**fields, **inferred.fields}:
            if fields.get(name) != inferred.fields.get(name):
                both = f"{_format_field(fields.get(name))}, {_format_field(inferred.fields.get(name))}"
                return f"the field {name!r} differs between samples: {both}"
    return None


def _format_field(field: Field | None) -> str:
    return "missing" if field is None else f"{field.dtype}{list(field.shape)}"
