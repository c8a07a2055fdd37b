"""What a cache keeps of a pipeline: up to which stage, in which size, and how many bytes that will be."""

from __future__ import annotations

import warnings
from typing import Any, Literal, TypeVar

from pipelines.cache import codec, file
from pipelines.description import PipelineDescription
from pipelines.errors import PipelineError, SampleError
from pipelines.prepare.draw_watch import find_own_generators
from pipelines.prepare.global_generators import preserve_states
from pipelines.prepare.inference import prepare_first_sample
from pipelines.prepare.sample_maker import SampleMaker
from pipelines.prepare.torch_threads import limit_torch_threads
from pipelines.stages._decode import DecodeImage, DecodeJpeg, ShrinkJpeg, get_image_bytes, is_jpeg
from pipelines.stages._geometry import Crop, Resize
from pipelines.stages._joint import TvTransform
from pipelines.stages._sample import get_value

Format = Literal["jpeg", "raw"]
FORMATS = ("jpeg", "raw")
Described = TypeVar("Described", bound=PipelineDescription)
_PROBES = 128
_QUALITY = 90


def shrink_images(pipeline: Described, shorter: int) -> Described:
    """Returns the pipeline with `stages.shrink_jpeg` before the stage that decodes, for a cache of smaller images.

    Its samples are other ones, and so is its fingerprint. A pipeline that has the stage already is returned.

    Args:
        shorter: pixels of the shorter side of what is decoded.

    Raises:
        PipelineError: it is not clear which images to make smaller, or labels may lie in them.
        SampleError: the first record cannot be prepared.
    """
    still = pipeline.stages[: count_still_stages(pipeline)]
    decoders = [i for i, stage in enumerate(still) if type(stage.call) in (DecodeJpeg, DecodeImage)]
    if len(decoders) != 1:
        what = "no stage decode_jpeg or decode_image" if not decoders else f"{len(decoders)} stages that decode"
        raise PipelineError(
            f"there are no images to make smaller: the pipeline has {what} before its first random stage"
        )
    joint = [stage.call for stage in pipeline.stages if isinstance(stage.call, TvTransform)]
    if any(call.masks or call.boxes or call.keypoints for call in joint):
        raise PipelineError(
            "images cannot be made smaller alone, their boxes, masks or keypoints would not follow: map a "
            "tv_transform that resizes all of them before the first random stage"
        )
    decoder: Any = still[decoders[0]].call
    known = next((stage.call for stage in still if isinstance(stage.call, ShrinkJpeg)), None)
    if known is not None:
        if (known.field, known.shorter) != (decoder.field, shorter):
            raise PipelineError(f"the pipeline makes images smaller already, by {known!r}")
        return pipeline
    for stage in pipeline.stages:
        size = _find_size(stage.call, decoder.field)
        if size > shorter:
            raise PipelineError(
                f"{stage.name} makes images of {size} pixels, for which those of {shorter} would be enlarged: "
                f"keep {size} at least"
            )
    field = still[decoders[0]].field
    first = prepare_first_sample(pipeline, decoders[0])
    data = get_image_bytes(first if field is None else get_value(first, field), decoder.field)
    if not is_jpeg(data):
        raise PipelineError(
            "the first image is no JPEG file; to keep images of other formats smaller, map "
            f"stages.resize({decoder.field!r}, shorter={shorter}) between {still[decoders[0]].name} and the first "
            "random stage"
        )
    return pipeline.insert(
        decoders[0], ShrinkJpeg(decoder.field, shorter, _QUALITY, decoder.max_pixels), field=field
    )


def _find_size(call: Any, field: str) -> int:
    """Pixels of the longer side of what a stage makes of a field, of the shorter if it keeps the ratio; or 0."""
    size = getattr(call, "size", None) or (getattr(call, "shorter", 0),)
    return max(size) if isinstance(call, Crop | Resize) and call.field == field else 0


def count_still_stages(pipeline: PipelineDescription) -> int:
    """Counts the stages before the first random one."""
    return next((i for i, stage in enumerate(pipeline.stages) if stage.random), len(pipeline.stages))


def count_cached_stages(pipeline: PipelineDescription, form: Format | None = None) -> int:
    """Counts the leading stages to apply to a sample before it is cached: those before the first random stage.

    Fewer if a sample cannot be encoded there; a warning says so.

    Args:
        form: of images that `stages.shrink_jpeg` makes smaller: "jpeg", the default, keeps what it makes, "raw"
            what the stages after it make.

    Raises:
        PipelineError: there is no such stage.
    """
    still = count_still_stages(pipeline)
    if not still:
        what = f"its first stage, {pipeline.stages[0].name}, is random" if pipeline.stages else "it has no stages"
        raise PipelineError(f"the cache has nothing to keep of this pipeline: {what}")
    shrunk = [i + 1 for i in range(still) if isinstance(pipeline.stages[i].call, ShrinkJpeg)]
    if form is not None and not shrunk:
        raise PipelineError(
            f"cache_format={form!r} is for images that stages.shrink_jpeg makes smaller, and the pipeline has no "
            "such stage before its first random one"
        )
    if shrunk and form != "raw":
        still = shrunk[-1]
    reasons: list[str] = []
    for stages in range(still, 0, -1):
        said = codec.encode(0, prepare_first_sample(pipeline, stages))
        if not isinstance(said, str):
            if reasons:
                warnings.warn(
                    f"kept are samples up to {pipeline.stages[stages - 1].name}: {reasons[0]}", stacklevel=5
                )
            return stages
        reasons.append(f"after {pipeline.stages[stages - 1].name} {said}, which cannot be kept")
    raise PipelineError(f"the cache has nothing to keep of this pipeline: {reasons[0]}")


def estimate_bytes(pipeline: PipelineDescription, stages: int) -> int:
    """Bytes of a cache of all samples after the first `stages` stages, from some that are prepared for it.

    They are evenly spread over the source; those that cannot be prepared are left out.
    """
    n = len(pipeline.source)
    maker, sizes, probes = SampleMaker(pipeline), [], min(n, _PROBES)
    with limit_torch_threads(), preserve_states(own=find_own_generators(pipeline)):
        for index in ((2 * number + 1) * n // (2 * probes) for number in range(probes)):
            try:
                encoded = codec.encode(index, maker.make(index, 0, last=stages))
            except SampleError:
                continue
            sizes.append(0 if isinstance(encoded, str) else sum(memoryview(each).nbytes for each in encoded))
    pipeline.source.forget()
    return file.records_offset(n) + (n * sum(sizes) // len(sizes) if sizes else 0)
