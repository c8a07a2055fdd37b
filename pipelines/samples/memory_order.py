"""Normalizes and reproduces the memory layout of arrays, which determines the last bits of sums over them.

A sum over a [C, H, W] view of [H, W, C] memory has other last bits than a sum over the same numbers in C order.
A sample that another process has prepared up to some stage must therefore reach the next stage in the same
layout as here. So between two stages every array is *normalized*: dense (no gaps, no negative strides, no
elements that share memory) and writable. Its axes keep their order in memory, which is its `MemoryLayout`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from pipelines.samples.nested import map_arrays

#: Axes from the outermost in memory to the innermost, those of length 1 first; None: a numpy scalar, no array.
AxisOrder = tuple[int, ...] | None
#: The order of an array, or the name of the type of a Python number, which a ring holds as a numpy one.
MemoryLayout = AxisOrder | str

NUMBERS = {bool: "bool", int: "int", float: "float", complex: "complex"}

_LARGE = 16_384
# What every OpenCV can split and merge.
_MERGED = frozenset(map(np.dtype, ("uint8", "uint16", "int16", "float32", "float64")))
_NATURAL = [tuple(range(ndim)) for ndim in range(65)]


def normalize_layout(value: Any) -> Any:
    """An array as the next stage gets it: dense, writable, its axes in their order; all else as it is."""
    if type(value) is not np.ndarray:
        return value
    flags = value.flags
    if flags.behaved and (flags.c_contiguous or is_channels_last(value) or _is_dense(value)):
        return value
    return value.copy(order="K")


def normalize_sample(sample: Any, field: str | None) -> Any:
    """Normalizes the memory layout of a sample's arrays for the next stage, or only that of one field."""
    if not isinstance(sample, dict):
        return sample
    normalized = sample
    for name, value in sample.items() if field is None else ((field, sample[field]),):
        kind = type(value)
        if kind is np.ndarray:
            new = normalize_layout(value)
        elif kind is dict or kind is tuple:
            new = map_arrays(value, normalize_layout)
        else:
            continue
        if new is not value:
            normalized = {**normalized, name: new}
    return normalized


def layout_of(value: npt.NDArray[Any] | np.generic) -> AxisOrder:
    """The order that the axes of an array have once it is normalized."""
    if isinstance(value, np.generic):
        return None
    if value.flags.c_contiguous:
        return _NATURAL[value.ndim]
    if is_channels_last(value) and 1 not in value.shape:
        return (1, 2, 0)
    wide = [axis for axis, length in enumerate(value.shape) if length != 1]
    strides = {axis: abs(value.strides[axis]) for axis in wide}
    if 0 in strides.values() or len(set(strides.values())) < len(wide):
        return layout_of(value.copy(order="K"))  # elements share memory: numpy says where they go
    order = sorted(wide, key=lambda axis: -strides[axis])
    if order == wide:
        return _NATURAL[value.ndim]
    return (*(axis for axis, length in enumerate(value.shape) if length == 1), *order)


def has_layout(value: Any, layout: MemoryLayout) -> bool:
    """Whether a value is an array, scalar or number that has this layout once it is normalized."""
    if type(value) is np.ndarray:
        if value.flags.c_contiguous:
            return layout is not None and layout == _NATURAL[value.ndim]
        return layout_of(value) == layout
    return isinstance(value, np.generic) if layout is None else layout == NUMBERS.get(type(value))


def copy_in_layout(value: npt.NDArray[Any], layout: MemoryLayout) -> Any:
    """A copy of an array that lies in C order, in a form."""
    if isinstance(layout, str):
        return value.item()
    if layout is None:
        return value[()]
    if layout == _NATURAL[value.ndim]:
        return np.array(value)
    if layout == (1, 2, 0) and value.shape[0] <= 4 and value.size >= _LARGE and value.dtype in _MERGED:
        import cv2  # its copy takes a tenth of numpy's time

        return cv2.merge(list(value)).transpose(2, 0, 1)
    copied = allocate(value.shape, value.dtype, layout)
    copied[...] = value
    return copied


def allocate(shape: tuple[int, ...], dtype: Any, layout: tuple[int, ...]) -> npt.NDArray[Any]:
    """A new array of that form."""
    memory: npt.NDArray[Any] = np.empty([shape[axis] for axis in layout], dtype)
    return memory.transpose(np.argsort(layout)) if layout else memory


def is_channels_last(value: npt.NDArray[Any]) -> bool:
    """Whether a [C, H, W] array is a view of contiguous [H, W, C] memory, as decoders leave it."""
    if value.ndim != 3:
        return False
    channels, height, width = value.shape
    size = value.itemsize
    return 1 < channels <= 4 and value.strides == (size, width * channels * size, channels * size) and height > 0


def _is_dense(value: npt.NDArray[Any]) -> bool:
    if value.flags.f_contiguous:
        return True
    expected = value.itemsize
    for stride, length in sorted(zip(value.strides, value.shape, strict=True)):
        if length == 1:
            continue
        if stride != expected:
            return False
        expected *= length
    return True
