"""What values become: scaling, dtype, length."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pipelines.errors import PipelineError
from pipelines.stages._sample import Array, Sample, Stage, image_of, opencv, to_hwc, value_of

FLOATS = ("float16", "float32", "float64")
# From this many values on it pays to part the channels by OpenCV before computing.
_LARGE = 16_384


@dataclass(frozen=True)
class Scale(Stage):
    """See `scale`."""

    field: str
    mean: tuple[float, ...]
    std: tuple[float, ...]
    dtype: str

    def __call__(self, sample: Sample) -> Sample:
        image = image_of(sample, self.field)
        for name, given in (("mean", self.mean), ("std", self.std)):
            if len(given) not in (1, image.shape[0]):
                raise PipelineError(
                    f"field {self.field!r} has shape {list(image.shape)}, but {name} has {len(given)} channels"
                )
        mean, std = self._arrays
        scaled = _as_float32(image)
        scaled /= np.float32(255)
        scaled -= mean
        scaled /= std
        return {**sample, self.field: scaled if self.dtype == "float32" else scaled.astype(self.dtype)}

    @functools.cached_property
    def _arrays(self) -> tuple[Array, Array]:
        shape = (-1, 1, 1)
        return np.array(self.mean, np.float32).reshape(shape), np.array(self.std, np.float32).reshape(shape)


@dataclass(frozen=True)
class Cast(Stage):
    """See `cast`."""

    field: str
    dtype: str

    def __call__(self, sample: Sample) -> Sample:
        value = value_of(sample, self.field)
        if isinstance(value, bytes | bytearray | str):
            text = value if isinstance(value, str) else bytes(value).decode("utf-8", "replace")
            try:
                value = float(text) if np.dtype(self.dtype).kind == "f" else int(text)
            except ValueError:
                raise PipelineError(f"field {self.field!r} holds {text[:40]!r}, not a number") from None
        return {**sample, self.field: np.asarray(value).astype(self.dtype)}


@dataclass(frozen=True)
class Pad(Stage):
    """See `pad`."""

    field: str
    length: int
    value: float
    lengths: str | None

    def __call__(self, sample: Sample) -> Sample:
        values = np.asarray(value_of(sample, self.field))
        if values.ndim == 0 or values.dtype.kind not in "biuf":
            raise PipelineError(
                f"field {self.field!r} is of {values.dtype}{list(values.shape)}, which has no length"
            )
        kept = min(len(values), self.length)
        padded = np.full((self.length, *values.shape[1:]), self.value, values.dtype)
        padded[:kept] = values[:kept]
        if self.lengths is None:
            return {**sample, self.field: padded}
        if self.lengths in sample:
            raise PipelineError(f"the sample has a field {self.lengths!r} already; give lengths= another name")
        return {**sample, self.field: padded, self.lengths: np.int64(kept)}


def scale(
    field: str,
    mean: float | Sequence[float] = 0.0,
    std: float | Sequence[float] = 1.0,
    dtype: str = "float32",
) -> Scale:
    """Map an image's values to (x / 255 - mean) / std, per channel.

    The arithmetic is float32 throughout, in the order written, each operation rounded once: x as float32, divided
    by 255, less the mean, divided by the standard deviation, the latter two rounded to float32 before. So the
    result is the same to the last bit everywhere. It lies as `[C, H, W]` in memory.

    Args:
        field: an image.
        mean, std: of the values between 0 and 1; one number, or one for each channel.
        dtype: float32, or float16 or float64, to which the result is converted.
    """
    name = _dtype("scale", dtype)
    if name not in FLOATS:
        raise PipelineError(f"scale: dtype cannot be {dtype!r} (valid: {', '.join(FLOATS)})")
    means, deviations = _numbers("mean", mean), _numbers("std", std)
    if not all(np.float32(deviation) > 0 for deviation in deviations):
        raise PipelineError(f"scale: std must be above 0, got {std!r}")
    return Scale(field, means, deviations, name)


def cast(field: str, dtype: str) -> Cast:
    """Convert a field to a dtype, as numpy's `astype` does; digits (text or bytes) become their number."""
    name = _dtype("cast", dtype)
    if np.dtype(name).kind not in "biuf":
        raise PipelineError(f"cast: dtype must be of numbers, got {dtype!r}")
    return Cast(field, name)


def pad(field: str, length: int, value: float = 0, lengths: str | None = None) -> Pad:
    """Bring an array to `length` along its first axis: cut what is beyond, fill what is missing.

    Args:
        field: an array `[n, ...]`, then `[length, ...]`.
        length: entries of the result.
        value: what missing entries are filled with.
        lengths: a new field that receives, as int64, how many entries are the array's own: min(n, length).
    """
    if not isinstance(length, int) or length < 1:
        raise PipelineError(f"pad: length must be a positive integer, got {length!r}")
    return Pad(field, length, value, lengths)


def _dtype(stage: str, dtype: str) -> str:
    try:
        return np.dtype(dtype).name
    except TypeError:
        raise PipelineError(f"{stage}: dtype {dtype!r} is not known to numpy") from None


def _numbers(name: str, given: float | Sequence[float]) -> tuple[float, ...]:
    numbers = tuple(float(each) for each in np.atleast_1d(np.asarray(given, np.float64)).ravel())
    if not numbers or not np.isfinite(numbers).all():
        raise PipelineError(f"scale: {name} must be a number, or one for each channel, got {given!r}")
    return numbers


def _as_float32(image: Array) -> Array:
    """A copy as float32 that lies as `[C, H, W]`."""
    if image.size >= _LARGE and image.dtype == np.uint8 and image.strides[0] == 1 and 1 < image.shape[0] <= 4:
        copy = np.empty(image.shape, np.float32)
        for plane, target in zip(opencv().split(to_hwc(image)), copy, strict=True):
            target[...] = plane
        return copy
    return image.astype(np.float32, order="C")
