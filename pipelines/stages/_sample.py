"""What all stages share: looking into a sample, and the layout of images in memory.

To the user an image is `[C, H, W]`. Decoders write, and OpenCV reads, `[H, W, C]`. So the stages hand on
`[C, H, W]` *views* of `[H, W, C]` memory, which cost nothing to make, and OpenCV is given that memory again
without a copy. The one copy that puts channels first is made where the sample is stored, or by `scale`.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from pipelines.errors import PipelineError
from pipelines.samples.nested import Slot, get_at, require_path

if TYPE_CHECKING:
    from torch import nn

Sample = dict[str, Any]
Array = npt.NDArray[Any]
Side = Literal["end", "start"]
SIDES = ("end", "start")


class Transform:
    """Base of what our own stages call: frozen dataclasses of plain values, by which two are the same."""

    def __getstate__(self) -> dict[str, Any]:
        # Without what `cached_property` has derived from the values.
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}  # type: ignore[arg-type]

    def change_slots(self, slots: dict[str, Slot], within: str) -> dict[str, Slot]:
        """What is declared of the fields after this stage.

        Args:
            slots: path -> what is declared before it.
            within: the path of the sample that it is given, with a dot at its end; "" for the whole one.
        """
        return slots

    def as_module(self) -> nn.Module | None:
        """The stage as a torch module that maps a batch (field -> tensor [b, ...]) to a new one.

        Its results are bitwise equal to the stage's on the CPU. None: there is no such module.
        """
        from pipelines.stages._modules import find_twin

        return find_twin(self)


def get_value(sample: Sample, field: str) -> Any:
    """A field's value."""
    return get_at(sample, require_path(sample, field))


def get_image(sample: Sample, field: str) -> Array:
    """A field's value that is an image `[C, H, W]`."""
    value = sample[field] if field in sample else get_value(sample, field)
    if type(value) is not np.ndarray and hasattr(
        value, "detach"
    ):  # a tensor, as torchvision's transforms return it
        value = value.detach().numpy()
    if not isinstance(value, np.ndarray):
        if isinstance(value, bytes):
            raise PipelineError(f"field {field!r} holds bytes, not an image; decode it first")
        raise PipelineError(f"field {field!r} holds {type(value).__name__}, not an image [C, H, W]")
    if value.ndim != 3 or 0 in value.shape:
        raise PipelineError(f"field {field!r} has shape {list(value.shape)}, an image has [C, H, W]")
    return value


def check_size(what: str, size: int | tuple[int, int]) -> tuple[int, int]:
    """(height, width) in pixels; a number stands for both."""
    sides = (size, size) if isinstance(size, int | np.integer) else tuple(size)
    if len(sides) != 2 or not all(isinstance(n, int | np.integer) and n > 0 for n in sides):
        raise PipelineError(f"{what} must be (height, width) in pixels, got {size!r}")
    return int(sides[0]), int(sides[1])


# Both found once: an `import` statement in a stage costs more than the call it is for, in memory that the decoder
# has pushed out of the processor's cache.
@functools.cache
def load_opencv() -> Any:
    """OpenCV, told to keep to the calling thread: the cores are shared out among processes."""
    import cv2

    cv2.setNumThreads(0)
    return cv2


@functools.cache
def load_jpeg_decoder() -> Any:
    """simplejpeg's functions for a header and for a whole file."""
    import simplejpeg

    return simplejpeg.decode_jpeg_header, simplejpeg.decode_jpeg


# What OpenCV computes with; booleans and 64-bit integers it does not know.
OPENCV_DTYPES = frozenset(map(np.dtype, ("uint8", "uint16", "int16", "float32", "float64")))


def to_hwc(image: Array) -> Array:
    """`[H, W, C]` for OpenCV, at most 4 channels: the image's own memory where it lies like that, else a copy."""
    channels = image.shape[0]
    step = image.itemsize
    if image.strides[0] == step and image.strides[2] == channels * step and image.strides[1] > 0:
        return image.transpose(1, 2, 0)
    if channels == 1:
        return np.ascontiguousarray(image[0])[:, :, None]
    if image.dtype in OPENCV_DTYPES:
        merged: Array = load_opencv().merge([np.ascontiguousarray(plane) for plane in image])
        return merged
    return np.ascontiguousarray(image.transpose(1, 2, 0))


def to_chw(image: Array) -> Array:
    """`[C, H, W]` view of what OpenCV returned: `[H, W, C]`, or `[H, W]` for one channel."""
    return image[None] if image.ndim == 2 else image.transpose(2, 0, 1)
