"""Conversions of numbers that lose no digits."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import numpy.typing as npt

from pipelines.errors import PipelineError


def convert(
    values: npt.NDArray[Any], to: npt.DTypeLike, what: str, way_out: str | None = None
) -> npt.NDArray[Any]:
    """Return numbers in another dtype, in memory of their own.

    Integers and booleans stay equal. Floats are rounded where the dtype still has all their digits before the
    point: it has them up to 2**24 in float32, 2**11 in float16.

    Args:
        what: has the numbers, for the error.
        way_out: what to do about it, for the error; None: a stage before.

    Raises:
        PipelineError: the dtype cannot hold a number.
    """
    dtype, own = np.dtype(to), values.dtype
    with np.errstate(invalid="ignore", over="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore", np.exceptions.ComplexWarning)
        made = values.astype(dtype)
        has_long = own.kind in "iu" and own.itemsize == 8
        if np.can_cast(own, dtype) and not (has_long and dtype.kind in "fc"):
            return made
        wide: Any = np.longdouble if has_long or (dtype.kind in "iu" and dtype.itemsize == 8) else np.float64
        wide = np.result_type(wide, np.complex64) if "c" in (own.kind, dtype.kind) else wide
        numbers, kept = values.astype(wide), made.astype(wide)
    wrong = kept != numbers
    if dtype.kind == "c" or (dtype.kind == "f" and own.kind != "c"):
        wrong &= np.isfinite(numbers) & (np.abs(numbers) > 2.0 ** (np.finfo(dtype).nmant + 1))
    if wrong.any():
        value = values[wrong].flat[0] if values.ndim else values[()]
        raise PipelineError(f"{what} holds {value}, which {dtype} cannot hold: {way_out or _advise(value, dtype)}")
    return made


def _advise(value: Any, dtype: np.dtype[Any]) -> str:
    """The stage before which such numbers fit."""
    if dtype.kind == "b":
        change = "lambda x: x != 0"
    elif dtype.kind == "f":
        change = f"lambda x: x - {value}"
    elif np.isfinite(value) and value != np.rint(value):
        change = "numpy.rint"
    else:
        limits = np.iinfo(dtype) if dtype.kind in "iu" else np.finfo(dtype)
        change = f"lambda x: numpy.clip(x, {limits.min}, {limits.max})"
    return f"first .map({change}, field=...), or another dtype"
