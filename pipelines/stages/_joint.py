"""`tv_transform`: a transform of torchvision's for an image and its targets together."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pipelines.errors import PipelineError
from pipelines.fingerprint import known_as
from pipelines.samples.nested import map_arrays, require_path, set_at
from pipelines.stages._pictures import image_to_array, is_pil_image
from pipelines.stages._sample import Sample, get_image, get_value

Names = str | Sequence[str]
_FORMATS = ("XYXY", "XYWH", "CXCYWH", "XYWHR", "CXCYWHR", "XYXYXYXY")


@known_as("pipelines.stages.tv_transform")
@dataclass(frozen=True)
class TvTransform:
    """See `tv_transform`."""

    transform: Callable[[Any], Any]
    images: tuple[str, ...]
    masks: tuple[str, ...]
    boxes: tuple[str, ...]
    keypoints: tuple[str, ...]
    box_format: str

    def __call__(self, sample: Sample) -> Sample:
        import torch
        from torchvision import tv_tensors

        canvas = get_image(sample, self.images[0]).shape[-2:]
        boxes = functools.partial(tv_tensors.BoundingBoxes, format=self.box_format, canvas_size=canvas)
        points = functools.partial(tv_tensors.KeyPoints, canvas_size=canvas)
        # Labels of boxes are thinned with them (SanitizeBoundingBoxes).
        tensors = map_arrays(
            sample, lambda array: torch.from_numpy(array) if array.dtype.kind in "biuf" else array
        )
        for name in self.images:
            tensors = _replace(tensors, name, tv_tensors.Image(torch.from_numpy(get_image(sample, name))))
        for names, make in ((self.masks, tv_tensors.Mask), (self.boxes, boxes), (self.keypoints, points)):
            for name in names:
                tensors = _replace(tensors, name, make(torch.from_numpy(np.asarray(get_value(sample, name)))))
        made = self.transform(tensors)
        if not isinstance(made, dict):
            raise PipelineError(f"the transform returned {type(made).__name__}, not the sample")
        return {name: _to_arrays(value) for name, value in made.items()}


def tv_transform(
    transform: Callable[[Any], Any],
    *,
    images: Names,
    masks: Names = (),
    boxes: Names = (),
    keypoints: Names = (),
    box_format: str = "XYXY",
) -> TvTransform:
    """Applies a transform of `torchvision.transforms.v2` to an image and its targets together.

    What the transform draws is drawn once for all of them: boxes and masks are cropped, flipped and turned with
    their image. Other fields are left as they are.

    Args:
        transform: a transform, usually a `v2.Compose`.
        images: names of fields that hold images [C, H, W]; the first gives the size that boxes refer to. A path
            such as "target.boxes" names a value inside another field.
        masks: names of fields with masks [H, W] or [masks, H, W].
        boxes: names of fields with bounding boxes [boxes, 4].
        keypoints: names of fields with points [..., 2], as (x, y).
        box_format: `"XYXY"` (corners), `"XYWH"`, `"CXCYWH"`, or another of `tv_tensors.BoundingBoxFormat`.

    Raises:
        PipelineError: no image is named, or the format is unknown.

    Example:
        >>> jitter = v2.Compose([v2.RandomHorizontalFlip(), v2.RandomResizedCrop(224), v2.ColorJitter(0.2)])
        >>> pipe = pipe.map(stages.tv_transform(jitter, images="image", masks="mask"))
    """
    if not images:
        raise PipelineError("tv_transform() needs the name of a field with an image: images=...")
    if box_format not in _FORMATS:
        raise PipelineError(f"box_format must be one of {', '.join(_FORMATS)}, got {box_format!r}")
    parts = [(names,) if isinstance(names, str) else tuple(names) for names in (images, masks, boxes, keypoints)]
    named = [name for part in parts for name in part]
    if len(set(named)) < len(named):
        raise PipelineError(f"tv_transform() takes each field once, got {', '.join(named)}")
    return TvTransform(transform, parts[0], parts[1], parts[2], parts[3], box_format)


def _replace(sample: Sample, name: str, value: Any) -> Sample:
    replaced: Sample = set_at(sample, require_path(sample, name), value)
    return replaced


def _to_arrays(value: Any) -> Any:
    """A value with its tensors and images as arrays, those inside dicts and tuples included."""
    if isinstance(value, dict):
        return {name: _to_arrays(inner) for name, inner in value.items()}
    if type(value) is tuple:
        return tuple(map(_to_arrays, value))
    if is_pil_image(value):
        return image_to_array(value)
    return value.detach().numpy() if hasattr(value, "detach") else value
