"""Values of records: what other libraries give, converted to arrays, numbers, texts, bytes, and nestings of
these."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from pipelines.stages._pictures import image_to_array, is_pil_image


def copy_value(value: Any) -> Any:
    """Converts a value and copies its memory: a stage that writes into it must not change the original.

    Tensors become numpy arrays, PIL images uint8 [C, H, W], objects of dataclasses and named tuples dicts. Dicts,
    lists and tuples stay what they are, with their values converted; everything else stays as it is.
    """
    if isinstance(value, np.ndarray):
        return value.copy()
    if isinstance(value, str | bytes | int | float | None):
        return value
    if isinstance(value, Mapping):
        return {name: copy_value(each) for name, each in value.items()}
    if (fields := get_field_names(value)) is not None:
        return {name: copy_value(getattr(value, name)) for name in fields}
    if type(value) in (list, tuple):
        return type(value)(map(copy_value, value))
    home = type(value).__module__.partition(".")[0]
    if home == "torch" and hasattr(value, "detach"):
        return tensor_to_array(value).copy()
    if is_pil_image(value):
        return image_to_array(value)
    return value


def tensor_to_array(tensor: Any) -> np.ndarray[Any, Any]:
    """A torch tensor as an array; of a float dtype that numpy has not, such as bfloat16, as float32."""
    tensor = tensor.detach().cpu()
    try:
        array: np.ndarray[Any, Any] = tensor.numpy()
    except TypeError:
        if not tensor.is_floating_point() or tensor.is_sparse:
            raise
        array = tensor.float().numpy()
    return array


def get_field_names(value: Any) -> tuple[str, ...] | None:
    """The names of the fields of a named tuple or of a dataclass's object; None for anything else."""
    if isinstance(value, tuple) and isinstance(names := getattr(value, "_fields", None), tuple):
        return names
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return tuple(field.name for field in dataclasses.fields(value))
    return None


def copy_element(value: Any) -> Any:
    """Copies one element of an array, or a part of one: of native byte order, texts and bytes as Python's.

    An element of a structured dtype becomes a dict.
    """
    dtype = value.dtype
    if type(value) is np.ndarray and dtype.isnative and dtype.names is None and value.ndim:
        return value.copy()
    if dtype.names is not None:
        return {name: copy_element(value[name]) for name in dtype.names}
    if value.ndim == 0 and dtype.kind in "USV":
        return value.item() if dtype.kind != "V" else bytes(value)
    if isinstance(value, np.generic):
        return value
    return np.array(value, dtype.newbyteorder("="), subok=False)
