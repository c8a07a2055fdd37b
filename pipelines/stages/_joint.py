"""`tv_transform`: a transform of torchvision's for an image and its targets together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pipelines.errors import PipelineError
from pipelines.fingerprint import known_as
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

        given: Sample = {}
        for name in self.images:
            given[name] = tv_tensors.Image(torch.from_numpy(get_image(sample, name)))
        canvas = tuple(given[self.images[0]].shape[-2:])
        for name in self.masks:
            given[name] = tv_tensors.Mask(_to_tensor(sample, name))
        for name in self.boxes:
            found = _to_tensor(sample, name)
            given[name] = tv_tensors.BoundingBoxes(found, format=self.box_format, canvas_size=canvas)
        for name in self.keypoints:
            given[name] = tv_tensors.KeyPoints(_to_tensor(sample, name), canvas_size=canvas)
        for name, value in sample.items():  # labels of boxes are thinned with them (SanitizeBoundingBoxes)
            if name not in given and isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
                given[name] = torch.from_numpy(value)
        made = self.transform({**sample, **given})
        if not isinstance(made, dict):
            raise PipelineError(f"the transform returned {type(made).__name__}, not the sample")
        return {name: _to_array(value) for name, value in made.items()}


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
        images: names of fields that hold images [C, H, W]; the first gives the size that boxes refer to.
        masks: of fields with masks [H, W] or [masks, H, W].
        boxes: of fields with bounding boxes [boxes, 4].
        keypoints: of fields with points [..., 2], as (x, y).
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
    return TvTransform(
        transform, _to_tuple(images), _to_tuple(masks), _to_tuple(boxes), _to_tuple(keypoints), box_format
    )


def _to_tuple(names: Names) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else tuple(names)


def _to_tensor(sample: Sample, name: str) -> Any:
    import torch

    return torch.from_numpy(np.asarray(get_value(sample, name)))


def _to_array(value: Any) -> Any:
    if is_pil_image(value):
        return image_to_array(value)
    return value.detach().numpy() if hasattr(value, "detach") else value
