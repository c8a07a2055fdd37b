"""Stages that resize, crop and flip images [C, H, W] of any number of channels."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np

from pipelines.checks import check_integer
from pipelines.errors import PipelineError
from pipelines.fingerprint import known_as
from pipelines.stages._image_size import MAX_PIXELS
from pipelines.stages._sample import (
    OPENCV_DTYPES,
    Array,
    Sample,
    Transform,
    check_size,
    get_image,
    load_opencv,
    to_chw,
    to_hwc,
)

INTERPOLATIONS = ("linear", "area", "cubic", "nearest")
_UINT8 = np.dtype(np.uint8)


@known_as("pipelines.stages.resize")
@dataclass(frozen=True)
class Resize(Transform):
    """See `resize`."""

    field: str
    size: tuple[int, int] | None
    shorter: int | None
    interpolation: str

    def __call__(self, sample: Sample) -> Sample:
        image, size = _get_picture(sample, self.field), self.size
        if self.shorter is not None:
            factor = self.shorter / min(image.shape[1:])
            size = (round(image.shape[1] * factor), round(image.shape[2] * factor))
            if size[0] * size[1] > MAX_PIXELS:
                raise PipelineError(
                    f"field {self.field!r}: an image of {image.shape[1]} x {image.shape[2]} pixels would be made "
                    f"{size[0]} x {size[1]} by shorter={self.shorter}"
                )
        assert size is not None
        return {**sample, self.field: _resize(self.field, image, size, self.interpolation)}


class Crop(Transform):
    """Base of the stages that keep a part of an image: its place depends on the image's size alone.

    Attributes:
        draws: `Stage.random`.
        field: an image [C, H, W].
    """

    draws: ClassVar[Literal["numpy"] | None]
    field: str

    def find_part(self, rows: int, columns: int, rng: np.random.Generator) -> tuple[int, int, int, int] | None:
        """Top, left, height and width of the part of an image; None if it does not lie in the image."""
        raise NotImplementedError

    def finish(self, part: Array) -> Array:
        """What the stage makes of the part [C, H, W]."""
        return part


@known_as("pipelines.stages.center_crop")
@dataclass(frozen=True)
class CenterCrop(Crop):
    """See `center_crop`."""

    draws = None
    field: str
    size: tuple[int, int]

    def __call__(self, sample: Sample) -> Sample:
        image = _get_picture(sample, self.field)
        _check_fits(self.field, image, self.size, 0)
        top, column = self._center(*image.shape[1:])
        return {**sample, self.field: _cut_window(image, top, column, *self.size)}

    def find_part(self, rows: int, columns: int, rng: np.random.Generator) -> tuple[int, int, int, int] | None:
        top, column = self._center(rows, columns)
        return (top, column, *self.size) if min(top, column) >= 0 else None

    def _center(self, rows: int, columns: int) -> tuple[int, int]:
        return (rows - self.size[0]) // 2, (columns - self.size[1]) // 2


@known_as("pipelines.stages.random_crop")
@dataclass(frozen=True)
class RandomCrop(Crop):
    """See `random_crop`."""

    draws = "numpy"
    field: str
    size: tuple[int, int]
    padding: int

    def __call__(self, sample: Sample, rng: np.random.Generator) -> Sample:
        image = _get_picture(sample, self.field)
        _check_fits(self.field, image, self.size, self.padding)
        place = self._draw_place(image.shape[1], image.shape[2], rng)
        return {**sample, self.field: _cut_window(image, *place, *self.size)}

    def find_part(self, rows: int, columns: int, rng: np.random.Generator) -> tuple[int, int, int, int] | None:
        if self.padding or rows < self.size[0] or columns < self.size[1]:
            return None
        return (*self._draw_place(rows, columns, rng), *self.size)

    def _draw_place(self, rows: int, columns: int, rng: np.random.Generator) -> tuple[int, int]:
        height, width = self.size
        top = _draw_integer(rng, rows + 2 * self.padding - height + 1) - self.padding
        return top, _draw_integer(rng, columns + 2 * self.padding - width + 1) - self.padding


@known_as("pipelines.stages.random_resized_crop")
@dataclass(frozen=True)
class RandomResizedCrop(Crop):
    """See `random_resized_crop`."""

    draws = "numpy"
    field: str
    size: tuple[int, int]
    scale: tuple[float, float]
    ratio: tuple[float, float]
    interpolation: str

    def __call__(self, sample: Sample, rng: np.random.Generator) -> Sample:
        image = _get_picture(sample, self.field)
        top, column, height, width = self.find_part(image.shape[1], image.shape[2], rng)
        return {**sample, self.field: self.finish(image[:, top : top + height, column : column + width])}

    def finish(self, part: Array) -> Array:
        return _resize(self.field, part, self.size, self.interpolation)

    @functools.cached_property
    def _log_ratio(self) -> tuple[float, float]:
        return math.log(self.ratio[0]), math.log(self.ratio[1])

    def find_part(self, rows: int, columns: int, rng: np.random.Generator) -> tuple[int, int, int, int]:
        (low, high), (least, most), draw = self._log_ratio, self.scale, rng.random
        for _ in range(10):
            area = rows * columns * (least + (most - least) * draw())
            ratio = math.exp(low + (high - low) * draw())
            width, height = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
            if 0 < width <= columns and 0 < height <= rows:
                return int(draw() * (rows - height + 1)), int(draw() * (columns - width + 1)), height, width
        width = min(columns, max(1, round(rows * self.ratio[1])))
        height = min(rows, max(1, round(columns / self.ratio[0])))
        return (rows - height) // 2, (columns - width) // 2, height, width


@known_as("pipelines.stages.random_flip")
@dataclass(frozen=True)
class RandomFlip(Transform):
    """See `random_flip`."""

    field: str
    p: float

    def __call__(self, sample: Sample, rng: np.random.Generator) -> Sample:
        image = _get_picture(sample, self.field)
        if rng.random() >= self.p:
            return sample
        return {**sample, self.field: _flip(image)}


def resize(
    field: str,
    size: int | tuple[int, int] | None = None,
    *,
    shorter: int | None = None,
    interpolation: str = "linear",
) -> Resize:
    """Resizes an image with OpenCV; the dtype stays.

    Args:
        field: an image [C, H, W] of uint8, uint16, int16, float32 or float64.
        size: (height, width) in pixels; one number makes a square.
        shorter: instead of `size`: pixels of the shorter side of the result, which keeps the aspect ratio.
        interpolation: "linear", "area" (each pixel is the mean of those that it covers, which avoids aliasing when
            an image becomes much smaller), "cubic" or "nearest".

    Raises:
        PipelineError: not exactly one of `size` and `shorter` is given, or an argument is invalid.

    Examples:
        >>> resize("image", shorter=256)({"image": np.zeros((3, 512, 640), np.uint8)})["image"].shape
        (3, 256, 320)
    """
    if (size is None) == (shorter is None):
        raise PipelineError("resize: give either size=(height, width) or shorter=")
    if shorter is not None:
        shorter = check_integer("resize: shorter", shorter, 1)
    shape = None if size is None else check_size("resize: size", size)
    return Resize(field, shape, shorter, _check_interpolation("resize", interpolation))


def center_crop(field: str, size: int | tuple[int, int]) -> CenterCrop:
    """Crops the centre of an image, rounded up and left. A sample with a smaller image fails.

    Args:
        field: an image [C, H, W].
        size: (height, width) in pixels; one number makes a square.

    Raises:
        PipelineError: the size is invalid.
    """
    return CenterCrop(field, check_size("center_crop: size", size))


def random_crop(field: str, size: int | tuple[int, int], padding: int = 0) -> RandomCrop:
    """Crops an image at a uniformly random position. A sample with a smaller image (after padding) fails.

    Args:
        field: an image [C, H, W].
        size: (height, width) in pixels; one number makes a square.
        padding: pixels of zeros on each side of the image before it is cropped.

    Raises:
        PipelineError: an argument is invalid.
    """
    padding = check_integer("random_crop: padding", padding, 0)
    return RandomCrop(field, check_size("random_crop: size", size), padding)


def random_resized_crop(
    field: str,
    size: int | tuple[int, int],
    scale: tuple[float, float] = (0.08, 1.0),
    ratio: tuple[float, float] = (3 / 4, 4 / 3),
    *,
    interpolation: str = "linear",
) -> RandomResizedCrop:
    """Crops a part of random area, aspect ratio and position, and resizes it (Szegedy et al. 2015).

    Args:
        field: an image [C, H, W] of a dtype that `resize` accepts.
        size: (height, width) of the result in pixels; one number makes a square.
        scale: smallest and largest fraction of the image's area, drawn uniformly.
        ratio: smallest and largest width / height, its logarithm drawn uniformly. After ten draws that do not fit
            into the image, the largest central part within the ratios is used.
        interpolation: see `resize`.

    Raises:
        PipelineError: an argument is invalid.
    """
    for name, (low, high) in (("scale", scale), ("ratio", ratio)):
        if not 0 < low <= high:
            raise PipelineError(
                f"random_resized_crop: {name} must be (least, largest), above 0, got {(low, high)!r}"
            )
    bounds = (float(scale[0]), float(scale[1])), (float(ratio[0]), float(ratio[1]))
    method = _check_interpolation("random_resized_crop", interpolation)
    return RandomResizedCrop(field, check_size("random_resized_crop: size", size), *bounds, method)


def random_flip(field: str, p: float = 0.5) -> RandomFlip:
    """Mirrors an image left to right at random.

    Args:
        field: an image [C, H, W].
        p: probability, 0 to 1.

    Raises:
        PipelineError: `p` is not a probability.
    """
    if not 0 <= p <= 1:
        raise PipelineError(f"random_flip: p must be between 0 and 1, got {p!r}")
    return RandomFlip(field, float(p))


def _check_interpolation(stage: str, name: str) -> str:
    if name not in INTERPOLATIONS:
        raise PipelineError(f"{stage}: interpolation cannot be {name!r} (valid: {', '.join(INTERPOLATIONS)})")
    return name


def _draw_integer(rng: np.random.Generator, n: int) -> int:
    # Uniform to one part in 2**53 / n, at a quarter of the time of rng.integers.
    return int(rng.random() * n)


def _get_picture(sample: Sample, field: str) -> Array:
    """`get_image` of one whose rows and columns can be told from its channels."""
    image = get_image(sample, field)
    channels, rows, columns = image.shape
    if channels > 4 and rows > 4 and columns in (3, 4):  # patches of many bands are as small on both sides
        raise PipelineError(
            f"field {field!r} has shape {list(image.shape)}, which looks like [H, W, C]: an image has [C, H, W]; "
            "transpose it first"
        )
    return image


def _check_fits(field: str, image: Array, size: tuple[int, int], padding: int) -> None:
    _, rows, columns = image.shape
    if rows + 2 * padding < size[0] or columns + 2 * padding < size[1]:
        padded = f" with {padding} of padding around" if padding else ""
        raise PipelineError(
            f"field {field!r} has shape {list(image.shape)}{padded}, too small to cut out {size[0]} x {size[1]}"
        )


def _cut_window(image: Array, top: int, column: int, height: int, width: int) -> Array:
    """Cuts out the part that begins at (top, left), which may lie outside; zeros fill what is outside."""
    channels, rows, columns = image.shape
    if top >= 0 and column >= 0 and top + height <= rows and column + width <= columns:
        return image[:, top : top + height, column : column + width]
    if image.strides[0] == image.itemsize:
        window = np.zeros((height, width, channels), image.dtype).transpose(2, 0, 1)
    else:
        window = np.zeros((channels, height, width), image.dtype)
    first, last = max(0, top), min(rows, top + height)
    begin, end = max(0, column), min(columns, column + width)
    if first < last and begin < end:
        window[:, first - top : last - top, begin - column : end - column] = image[:, first:last, begin:end]
    return window


def _resize(field: str, image: Array, size: tuple[int, int], interpolation: str) -> Array:
    channels = image.shape[0]
    if image.shape[1:] == size:
        return image
    if image.dtype is not _UINT8 and image.dtype not in OPENCV_DTYPES:  # whose hash takes its time
        dtypes = ", ".join(sorted(str(dtype) for dtype in OPENCV_DTYPES))
        raise PipelineError(
            f"field {field!r} is of {image.dtype}, which cannot be resized (can be: {dtypes}); cast it"
        )
    resized, method = _load_opencv_resize(interpolation)
    shape = (size[1], size[0])
    if channels > 4:
        return np.stack([resized(np.ascontiguousarray(p), shape, interpolation=method) for p in image])
    return to_chw(resized(to_hwc(image), shape, interpolation=method))


@functools.cache
def _load_opencv_resize(interpolation: str) -> tuple[Any, int]:
    cv2 = load_opencv()
    return cv2.resize, getattr(cv2, f"INTER_{interpolation.upper()}")


def _flip(image: Array) -> Array:
    """Mirrors an image into memory with positive strides: torch.from_numpy refuses negative ones."""
    if image.shape[0] <= 4 and image.strides[0] == image.itemsize and image.dtype in OPENCV_DTYPES:
        return to_chw(load_opencv().flip(to_hwc(image), 1))
    return np.ascontiguousarray(image[:, :, ::-1])
