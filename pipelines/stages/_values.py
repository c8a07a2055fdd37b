"""Stages that scale, cast and pad values."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pipelines.checks import check_any_integer, check_choice, check_integer
from pipelines.errors import PipelineError
from pipelines.fingerprint import known_as
from pipelines.samples.exact import convert
from pipelines.samples.nested import Slot
from pipelines.stages._sample import (
    SIDES,
    Array,
    Sample,
    Side,
    Transform,
    get_image,
    get_value,
    load_opencv,
    to_hwc,
)

FLOATS = ("float16", "float32", "float64")
#: dtype of an image -> its largest value. Of other integers the dtype does not say what is white.
FULL = {"bool": 1, "uint8": 255, "uint16": 65535}
# Floats are from 0 to 1; interpolation and jitter of colours go so far beyond.
_LEAST, _MOST = -0.5, 1.5
# From this many values on it pays to part the channels by OpenCV before computing.
_LARGE = 16_384


@known_as("pipelines.stages.scale", version=2)
@dataclass(frozen=True)
class Scale(Transform):
    """See `scale`."""

    field: str
    mean: tuple[float, ...]
    std: tuple[float, ...]
    dtype: str

    def __call__(self, sample: Sample) -> Sample:
        image = get_image(sample, self.field)
        for name, numbers in (("mean", self.mean), ("std", self.std)):
            if len(numbers) not in (1, image.shape[0]):
                raise PipelineError(
                    f"field {self.field!r} has shape {list(image.shape)}, but {name} has {len(numbers)} channels"
                )
        mean, std = self._mean_and_std
        full = self._find_full(image)
        scaled = _as_float32(image)
        if full > 1:
            scaled /= np.float32(full)
        scaled -= mean
        scaled /= std
        return {**sample, self.field: scaled if self.dtype == "float32" else scaled.astype(self.dtype)}

    def _find_full(self, image: Array) -> int:
        """The number by which an image is divided, as its dtype says."""
        dtype, field = image.dtype.name, self.field
        wrong = None
        if image.dtype.kind == "f":
            low, high = image.min(), image.max()
            wrong = f"holds {high if high > _MOST else low}" if low < _LEAST or high > _MOST else None
        elif dtype not in FULL:
            wrong = f"is of {dtype}"
        if wrong is not None:
            raise PipelineError(
                f"scale: field {field!r} {wrong}: an image is uint8, uint16, bool, or floats from 0 to 1. Divide "
                f"it first by its largest possible value: .map(lambda image: image / LARGEST, field={field!r})"
            )
        return FULL.get(dtype, 1)

    @functools.cached_property
    def _mean_and_std(self) -> tuple[Array, Array]:
        shape = (-1, 1, 1)
        return np.array(self.mean, np.float32).reshape(shape), np.array(self.std, np.float32).reshape(shape)


@known_as("pipelines.stages.cast")
@dataclass(frozen=True)
class Cast(Transform):
    """See `cast`."""

    field: str
    dtype: str

    def __call__(self, sample: Sample) -> Sample:
        value = get_value(sample, self.field)
        if isinstance(value, bytes | bytearray | str):
            text = value if isinstance(value, str) else bytes(value).decode("utf-8", "replace")
            try:
                value = float(text) if np.dtype(self.dtype).kind == "f" else int(text)
            except ValueError:
                raise PipelineError(f"field {self.field!r} holds {text[:40]!r}, not a number") from None
        values = np.asarray(value)
        if values.dtype.kind in "mM":
            values = values.astype(np.int64)
        elif values.dtype.kind not in "biufc":
            try:
                values = values.astype(np.float64 if np.dtype(self.dtype).kind == "f" else np.int64)
            except (TypeError, ValueError, OverflowError) as error:
                raise PipelineError(f"field {self.field!r} holds no numbers: {error}") from None
        return {**sample, self.field: convert(values, self.dtype, f"field {self.field!r}")}


@known_as("pipelines.stages.pad")
@dataclass(frozen=True)
class Pad(Transform):
    """See `pad`."""

    field: str
    length: int
    value: float
    lengths: str | None
    mask: str | None
    axis: int
    side: Side
    truncate: Side | None

    def __call__(self, sample: Sample) -> Sample:
        values = np.asarray(get_value(sample, self.field))
        if not -values.ndim <= self.axis < values.ndim or values.dtype.kind not in "biuf":
            raise PipelineError(
                f"field {self.field!r} is of {values.dtype}{list(values.shape)}, which has no length along axis "
                f"{self.axis}"
            )
        axis = self.axis % values.ndim
        count = values.shape[axis]
        if count > self.length and self.truncate is None:
            raise PipelineError(
                f"field {self.field!r} has {count} entries, more than length={self.length}: take a larger length, "
                "or say where to cut with truncate='end' or 'start'"
            )
        kept = min(count, self.length)
        cut = count - kept if self.truncate == "start" else 0
        free = self.length - kept if self.side == "start" else 0
        before = (slice(None),) * axis
        fill = convert(np.asarray(self.value), values.dtype, f"pad: value, of the field {self.field!r},")
        padded = np.full((*values.shape[:axis], self.length, *values.shape[axis + 1 :]), fill, values.dtype)
        padded[(*before, slice(free, free + kept))] = values[(*before, slice(cut, cut + kept))]
        result = {**sample, self.field: padded}
        for name in (self.lengths, self.mask):
            if name is not None and name in sample:
                raise PipelineError(f"the sample has a field {name!r} already; give it another name")
        if self.lengths is not None:
            result[self.lengths] = np.int64(kept)
        if self.mask is not None:
            result[self.mask] = np.zeros(self.length, bool)
            result[self.mask][free : free + kept] = True
        return result

    def change_slots(self, slots: dict[str, Slot], within: str) -> dict[str, Slot]:
        return {path: slot for path, slot in slots.items() if path != within + self.field}


def scale(
    field: str,
    mean: float | Sequence[float] = 0.0,
    std: float | Sequence[float] = 1.0,
    dtype: str = "float32",
) -> Scale:
    """Normalizes an image to (x / 255 - mean) / std, per channel, or by what its dtype says instead of 255.

    uint8 is divided by 255 and uint16 by 65535; bool and floats are from 0 to 1 and are not divided. A sample with
    other integers, or with floats far outside of 0 to 1, fails: nothing says what is white.

    The arithmetic is float32 throughout, in the order written, each operation rounded once; mean and std are
    rounded to float32 first. So the result is bitwise equal on all machines. Its memory is in the order [C, H, W].

    Args:
        field: an image [C, H, W].
        mean: the mean of the image from 0 to 1; one number, or one for each channel.
        std: standard deviation of the image from 0 to 1, above 0; one number, or one for each channel.
        dtype: "float32", or "float16" or "float64", to which the result is converted.

    Raises:
        PipelineError: an argument is invalid.

    Examples:
        >>> normalize = scale("image", mean=(0.49, 0.48, 0.45), std=(0.25, 0.24, 0.26))
    """
    name = _check_dtype("scale", dtype)
    if name not in FLOATS:
        raise PipelineError(f"scale: dtype cannot be {dtype!r} (valid: {', '.join(FLOATS)})")
    means, deviations = _check_numbers("mean", mean), _check_numbers("std", std)
    if not all(np.float32(deviation) > 0 for deviation in deviations):
        raise PipelineError(f"scale: std must be above 0, got {std!r}")
    if max(means) > 1:
        raise PipelineError(
            f"scale: mean and std are of images from 0 to 1, got mean={mean!r}: divide both by the largest value "
            "of a pixel, such as 255"
        )
    return Scale(field, means, deviations, name)


def cast(field: str, dtype: str) -> Cast:
    """Converts a field to a dtype that holds its numbers; a sample with others fails.

    Nothing is cut off or wrapped: 1.5 is no integer, 300 no uint8, 2 no bool. Floats are rounded where they keep
    their digits before the point: up to 2**24 in float32.

    Args:
        field: an array or a number of any shape, or a number written as text or bytes.
        dtype: numpy's name of a boolean, integer or floating-point dtype, such as "float32".

    Raises:
        PipelineError: the dtype is unknown or not numeric.
    """
    name = _check_dtype("cast", dtype)
    if np.dtype(name).kind not in "biuf":
        raise PipelineError(f"cast: dtype must be of numbers, got {dtype!r}")
    return Cast(field, name)


def pad(
    field: str,
    length: int,
    value: float = 0,
    lengths: str | None = None,
    *,
    mask: str | None = None,
    axis: int = 0,
    side: Side = "end",
    truncate: Side | None = None,
) -> Pad:
    """Pads or truncates arrays to one length, so that they fit into a batch: texts, time series.

    Args:
        field: an array with n entries along `axis`: [n], [n, channels], or with `axis=-1` [channels, n].
        length: number of entries of the result along `axis`.
        value: fills missing entries.
        lengths: name of a new field for the number of original entries, int64 scalar: min(n, length).
        mask: name of a new field that is True at the original entries, bool [length].
        axis: the axis to pad; a negative one counts from the last.
        side: which side to fill, "end" or "start".
        truncate: which side of a longer array to cut, "end" or "start"; None fails the sample instead.

    Raises:
        PipelineError: an argument is invalid.

    Examples:
        >>> pad("x", 4, lengths="n")({"x": np.array([7, 8])})
        {'x': array([7, 8, 0, 0]), 'n': np.int64(2)}
    """
    length, axis = check_integer("pad: length", length, 1), check_any_integer("pad: axis", axis)
    check_choice("pad: side", side, SIDES)
    if truncate is not None:
        check_choice("pad: truncate", truncate, SIDES)
    names = [name for name in (field, lengths, mask) if name is not None]
    if len(set(names)) < len(names):
        raise PipelineError(f"pad: field, lengths and mask must be different fields, got {', '.join(names)}")
    return Pad(field, length, value, lengths, mask, axis, side, truncate)


def _check_dtype(stage: str, dtype: str) -> str:
    try:
        return np.dtype(dtype).name
    except TypeError:
        raise PipelineError(f"{stage}: dtype {dtype!r} is not known to numpy") from None


def _check_numbers(name: str, values: float | Sequence[float]) -> tuple[float, ...]:
    numbers = tuple(float(number) for number in np.atleast_1d(np.asarray(values, np.float64)).ravel())
    if not numbers or not np.isfinite(numbers).all():
        raise PipelineError(f"scale: {name} must be a number, or one for each channel, got {values!r}")
    return numbers


def _as_float32(image: Array) -> Array:
    """A copy as float32 that lies as `[C, H, W]`."""
    if image.size >= _LARGE and image.dtype == np.uint8 and image.strides[0] == 1 and 1 < image.shape[0] <= 4:
        copy = np.empty(image.shape, np.float32)
        for plane, target in zip(load_opencv().split(to_hwc(image)), copy, strict=True):
            target[...] = plane
        return copy
    return image.astype(np.float32, order="C")
