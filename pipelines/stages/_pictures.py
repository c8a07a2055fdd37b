"""Images as other libraries' transforms take them, and as a pipeline carries them.

A pipeline's images are arrays `[C, H, W]`. torchvision's transforms take PIL images, or tensors `[..., C, H, W]`;
some transpose an array in silence, others leave it as it is. albumentations takes arrays `[H, W, C]`.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pipelines.errors import PipelineError
from pipelines.fingerprint import known_as
from pipelines.samples.nested import iterate_leaves
from pipelines.stages._transforms import (
    converts_arrays,
    find_library,
    is_all_torchvision,
    takes_tensors,
)

# What PIL's modes of pictures have that are seen in colours.
_NO_COLORS = {"P": "indices of its palette", "PA": "indices of its palette, and alpha", "CMYK": "four inks"}
_CHANNELS = (1, 3, 4)  # L, RGB, RGBA
_CHANNELED = {"image": 3, "mask": 3, "images": 4}  # albumentations' names -> axes of arrays that have channels


@known_as("pipelines.Imaged")
@dataclass(frozen=True)
class Imaged:
    """A transform of torchvision's as a stage of arrays.

    uint8 `[C, H, W]` of 1, 3 or 4 channels is given to it as a PIL image, or as a tensor if a part of it leaves
    PIL images alone or refuses them (`ToDtype`, `Normalize`, `RandomErasing` ...); any other as a tensor. An array
    that looks like `[H, W, C]` is given to those alone that begin by converting it. Images that it returns become
    uint8 `[C, H, W]` again.
    """

    transform: Callable[[Any], Any]

    def __getstate__(self) -> dict[str, Any]:
        return {"transform": self.transform}

    def __call__(self, value: Any) -> Any:
        made = self.transform(self._convert(value) if isinstance(value, np.ndarray) else value)
        if isinstance(made, tuple):  # FiveCrop
            return tuple(image_to_array(part) if is_pil_image(part) else part for part in made)
        return image_to_array(made) if is_pil_image(made) else made

    def _convert(self, array: npt.NDArray[Any]) -> Any:
        """What the transform takes for an array."""
        if array.ndim == 3 and array.shape[0] not in _CHANNELS and array.shape[2] in _CHANNELS:
            if converts_arrays(self.transform):
                return array
            raise PipelineError(
                f"torchvision's transforms take an image [C, H, W] and leave an array {list(array.shape)} as it "
                "is: if it is [H, W, C], begin with v2.ToImage(); else make a tensor of it first"
            )
        if array.ndim == 3 and array.shape[0] in _CHANNELS and array.dtype == np.uint8 and not self._as_tensor:
            import PIL.Image  # torchvision needs it, too

            return PIL.Image.fromarray(
                np.ascontiguousarray(array[0] if len(array) == 1 else array.transpose(1, 2, 0))
            )
        import torch

        return torch.from_numpy(array)

    @functools.cached_property
    def _as_tensor(self) -> bool:
        return takes_tensors(self.transform)


@known_as("pipelines.NoArrays")
@dataclass(frozen=True)
class NoArrays:
    """A transform of torchvision's as a stage of whole samples, which have to hold images or tensors.

    It would leave arrays as they are, in silence: all of them, or a mask beside its image.
    """

    transform: Callable[[Any], Any]

    def __call__(self, sample: Any) -> Any:
        values = [(".".join(map(str, path)), value) for path, value in iterate_leaves(sample)]
        arrays = [name for name, value in values if isinstance(value, np.ndarray) and value.ndim > 1]
        if arrays or not any(is_pil_image(value) or hasattr(value, "detach") for _, value in values):
            what = f"the array {arrays[0]!r}" if arrays else "this sample"
            raise PipelineError(
                f"torchvision's transforms leave arrays as they are, so this one would do nothing to {what}: name "
                'the image, map(..., field="image"), or the parts of the sample, '
                'map(stages.tv_transform(..., images="image", masks="mask", boxes="boxes"))'
            )
        return self.transform(sample)


@known_as("pipelines.Albumentation")
@dataclass(frozen=True)
class Albumentation:
    """A transform of albumentations' as a stage of one image, or of whole samples with its names for targets.

    Images and masks `[C, H, W]` are given to it as `[H, W, C]`, and become `[C, H, W]` again; a tensor that it
    returns stays.

    Attributes:
        is_whole: whether it is given whole samples.
        is_still: whether it does the same to each image, although it may draw whether it is applied.
    """

    transform: Callable[..., Any]
    is_whole: bool = False
    is_still: bool = False

    def set_random_seed(self, seed: int) -> None:
        """Seeds the generators of the transform, and of all in it."""
        self.transform.set_random_seed(seed)  # type: ignore[attr-defined]

    def __call__(self, value: Any) -> Any:
        if self.is_still:
            self.set_random_seed(0)
        inputs = value if self.is_whole else {"image": value}
        made = self.transform(**{name: self._to_last(name, part) for name, part in inputs.items()})
        outputs = {name: self._to_first(name, part, inputs.get(name)) for name, part in made.items()}
        return outputs if self.is_whole else outputs["image"]

    def _to_last(self, name: str, value: Any) -> Any:
        if not isinstance(value, np.ndarray) or value.ndim != self._count_axes(name):
            return value
        return np.ascontiguousarray(np.moveaxis(value, -3, -1))

    def _to_first(self, name: str, value: Any, raw: Any) -> Any:
        """What has been made of an array with channels, which may have lost them, as `[..., C, H, W]`."""
        axes = self._count_axes(name)
        if not isinstance(value, np.ndarray) or axes is None or getattr(raw, "ndim", axes) != axes:
            return value
        return np.ascontiguousarray(np.moveaxis(value, -1, -3) if value.ndim == axes else value[..., None, :, :])

    def _count_axes(self, name: str) -> int | None:
        targets: dict[str, str] = getattr(self.transform, "additional_targets", {})
        return _CHANNELED.get(targets.get(name, name))


def adapt(call: Callable[..., Any], field: str | None, *, is_still: bool) -> Callable[..., Any]:
    """What a stage calls for a transform of another library, so that it gets what it takes; else `call` itself.

    Args:
        is_still: whether it does the same to each image.
    """
    match find_library(call):
        case "torchvision" if field is not None:
            return Imaged(call)
        case "torchvision" if is_all_torchvision(call):
            return NoArrays(call)
        case "albumentations" if hasattr(call, "set_random_seed"):
            return Albumentation(call, is_whole=field is None, is_still=is_still)
    return call


def is_pil_image(value: Any) -> bool:
    return type(value).__module__.partition(".")[0] == "PIL" and hasattr(value, "getbands")


def image_to_array(picture: Any) -> npt.NDArray[Any]:
    """A PIL image as `[C, H, W]`, its bands as they are: a palette gives indices, one bit bool."""
    if picture.mode in _NO_COLORS:
        warnings.warn(
            f"an image of PIL's mode {picture.mode} gives {_NO_COLORS[picture.mode]}, as it holds them: for "
            'colours, let the Dataset return image.convert("RGB")',
            stacklevel=2,
        )
    image = np.asarray(picture)
    image = image[:, :, None] if image.ndim == 2 else image
    return image.transpose(2, 0, 1).astype(image.dtype.newbyteorder("="), order="C")
