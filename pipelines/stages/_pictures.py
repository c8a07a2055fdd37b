"""Images as other libraries' transforms take them, and as a pipeline carries them.

A pipeline's images are arrays `[C, H, W]`. torchvision's transforms take PIL images, or tensors `[..., C, H, W]`;
some transpose an array in silence, others leave it as it is. albumentations takes arrays `[H, W, C]`, kornia
tensors. So each is given what it takes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pipelines.errors import PipelineError
from pipelines.fingerprint import known_as
from pipelines.stages._transforms import (
    is_albumentations,
    is_all_torchvision,
    is_kornia,
    is_torchvision,
    takes_tensors_only,
)

_CHANNELS = (1, 3, 4)  # L, RGB, RGBA
_IMAGES = ("image",)  # albumentations' name of it


@known_as("pipelines.Imaged")
@dataclass(frozen=True)
class Imaged:
    """A transform of torchvision's as a stage of arrays.

    uint8 `[C, H, W]` of 1, 3 or 4 channels is given to it as a PIL image, or as a tensor if a part of it leaves
    PIL images alone or refuses them (`ToDtype`, `Normalize`, `RandomErasing` ...); an array that can only be
    `[H, W, C]` as it is; any other as a tensor. An image that it returns becomes uint8 `[C, H, W]` again.
    """

    transform: Callable[[Any], Any]

    def __getstate__(self) -> dict[str, Any]:
        return {"transform": self.transform}

    def __call__(self, value: Any) -> Any:
        given = _to_torchvision_input(value, self._as_tensor) if isinstance(value, np.ndarray) else value
        made = self.transform(given)
        return image_to_array(made) if is_pil_image(made) else made

    @functools.cached_property
    def _as_tensor(self) -> bool:
        return takes_tensors_only(self.transform)


@known_as("pipelines.NoArrays")
@dataclass(frozen=True)
class NoArrays:
    """A transform of torchvision's as a stage of whole samples, which have to hold images or tensors.

    It would leave arrays as they are, and so do nothing, in silence.
    """

    transform: Callable[[Any], Any]

    def __call__(self, sample: Any) -> Any:
        if isinstance(sample, dict) and not any(is_pil_image(v) or hasattr(v, "detach") for v in sample.values()):
            raise PipelineError(
                "torchvision's transforms leave arrays as they are, so this one would do nothing: name the image, "
                'map(..., field="image"), or the parts of the sample, '
                'map(stages.tv_transform(..., images="image", masks="mask", boxes="boxes"))'
            )
        return self.transform(sample)


@known_as("pipelines.KorniaModule")
@dataclass(frozen=True)
class KorniaModule:
    """A module of kornia's as a stage of arrays: it is given a tensor; `[1, C, H, W]` is one image."""

    transform: Callable[[Any], Any]

    def __call__(self, value: Any) -> Any:
        import torch

        if not isinstance(value, np.ndarray):
            return self.transform(value)
        made = self.transform(torch.from_numpy(value))
        if not isinstance(made, torch.Tensor):
            return made
        alone = made.ndim == value.ndim + 1 and len(made) == 1
        return (made[0] if alone else made).detach().numpy()


@known_as("pipelines.Albumentation")
@dataclass(frozen=True)
class Albumentation:
    """A transform of albumentations' as a stage of one image, or of whole samples with its names for targets.

    It is given `[H, W, C]`. An array of 3 axes that it returns as the image becomes `[C, H, W]`, a tensor stays.
    """

    transform: Callable[..., Any]
    is_whole: bool = False

    def set_random_seed(self, seed: int) -> None:
        """Seeds the generators of the transform, and of all in it."""
        self.transform.set_random_seed(seed)  # type: ignore[attr-defined]

    def __call__(self, value: Any) -> Any:
        if not self.is_whole:
            return _from_hwc(self.transform(image=_to_hwc(value))["image"])
        given = {name: _to_hwc(each) if name in _IMAGES else each for name, each in value.items()}
        made = self.transform(**given)
        return {name: _from_hwc(each) if name in _IMAGES else each for name, each in made.items()}


def adapt(call: Callable[..., Any], field: str | None) -> Callable[..., Any]:
    """What a stage calls for a transform of another library, so that it gets what it takes; else `call` itself."""
    if is_torchvision(call):
        return Imaged(call) if field is not None else NoArrays(call) if is_all_torchvision(call) else call
    if is_albumentations(call):
        return Albumentation(call, is_whole=field is None)
    return KorniaModule(call) if field is not None and is_kornia(call) else call


def is_pil_image(value: Any) -> bool:
    """Whether a value is a PIL image."""
    return type(value).__module__.partition(".")[0] == "PIL" and hasattr(value, "getbands")


def image_to_array(picture: Any) -> npt.NDArray[Any]:
    """A PIL image as `[C, H, W]`: uint8 unless it has deeper pixels."""
    image = np.asarray(picture.convert("RGB") if picture.mode in ("P", "CMYK", "YCbCr") else picture)
    if image.dtype == bool:
        image = image.astype(np.uint8) * np.uint8(255)
    image = image[:, :, None] if image.ndim == 2 else image
    return image.transpose(2, 0, 1).copy()


def _to_torchvision_input(array: npt.NDArray[Any], as_tensor: bool) -> Any:
    """What a transform of torchvision's takes for an array."""
    if not as_tensor and array.ndim == 3 and array.shape[0] in _CHANNELS and array.dtype == np.uint8:
        import PIL.Image  # torchvision needs it, too

        return PIL.Image.fromarray(np.ascontiguousarray(array[0] if len(array) == 1 else array.transpose(1, 2, 0)))
    if array.ndim == 3 and array.shape[0] not in _CHANNELS and array.shape[2] in _CHANNELS:
        return array
    import torch

    return torch.from_numpy(array)


def _to_hwc(value: Any) -> Any:
    is_image = isinstance(value, np.ndarray) and value.ndim == 3
    return np.ascontiguousarray(value.transpose(1, 2, 0)) if is_image else value


def _from_hwc(value: Any) -> Any:
    if not isinstance(value, np.ndarray):
        return value
    return np.ascontiguousarray(value[None] if value.ndim == 2 else value.transpose(2, 0, 1))
