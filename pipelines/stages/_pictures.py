"""Images as torchvision's transforms take them, and as a pipeline carries them.

A pipeline's images are arrays `[C, H, W]`; torchvision's transforms take PIL images, or tensors `[..., C, H, W]`.
An array is `[H, W, C]` to them, and `ToTensor` transposes any other in silence. So they are given what they take.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pipelines.fingerprint import known_as

_CHANNELS = (1, 3, 4)  # L, RGB, RGBA


@known_as("pipelines.Imaged")
@dataclass(frozen=True)
class Imaged:
    """A transform of torchvision's as a stage of arrays.

    uint8 `[C, H, W]` of 1, 3 or 4 channels is given to it as a PIL image, an array that can only be `[H, W, C]` as
    it is, any other as a tensor; an image that it returns becomes uint8 `[C, H, W]` again.
    """

    transform: Callable[[Any], Any]

    def __call__(self, value: Any) -> Any:
        made = self.transform(_to_torchvision_input(value) if isinstance(value, np.ndarray) else value)
        return image_to_array(made) if is_pil_image(made) else made


def is_torchvision(call: Any) -> bool:
    """Whether something to call is torchvision's: a transform, a function, or a partial one."""
    if isinstance(call, functools.partial):
        return is_torchvision(call.func)
    return str(getattr(call, "__module__", "")).partition(".")[0] == "torchvision"


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


def _to_torchvision_input(array: npt.NDArray[Any]) -> Any:
    """What a transform of torchvision's takes for an array."""
    if array.ndim == 3 and array.shape[0] in _CHANNELS and array.dtype == np.uint8:
        import PIL.Image  # torchvision needs it, too

        return PIL.Image.fromarray(np.ascontiguousarray(array[0] if len(array) == 1 else array.transpose(1, 2, 0)))
    if array.ndim == 3 and array.shape[0] not in _CHANNELS and array.shape[2] in _CHANNELS:
        return array
    import torch

    return torch.from_numpy(array)
