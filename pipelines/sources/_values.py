"""Items of other libraries as records; values as arrays, numbers, texts, bytes, and nestings of these."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from pipelines.errors import PipelineError

#: What the two values of an item are called that has no names.
NAMES = ("image", "label")


class UnnamedValues(PipelineError):
    """An item has values without names, and `names=` has another number."""


def make_record(item: Any, names: tuple[str, ...] | None) -> dict[str, Any]:
    """Returns an item as a record.

    Args:
        item: a mapping, an object of a dataclass or a named tuple, which have names; a tuple or list of values, or
            one value.
        names: of the values. None: the item's own, or `NAMES` for two values.

    Raises:
        UnnamedValues: the item is None, or has another number of values; says what to give.
    """
    if item is None:
        raise UnnamedValues("it is None, which is no item")
    if isinstance(item, Mapping):
        return {name: copy_value(value) for name, value in item.items()}
    own = get_field_names(item)
    if own is not None:
        values: Sequence[Any] = [getattr(item, name) for name in own]
        called = own if names is None else names
    else:
        values = item if isinstance(item, tuple | list) else (item,)
        called = NAMES if names is None else names
    if len(values) == len(called):
        return {name: copy_value(value) for name, value in zip(called, values, strict=True)}
    example = ", ".join(f"'field{i}'" for i in range(1, len(values) + 1))
    has = ", ".join(called) + (" (the default)" if names is None else "")
    count = f"{len(values)} values" if len(values) != 1 else f"1 value ({type(values[0]).__name__})"
    raise UnnamedValues(
        f"an item of {count}, but names= has {len(called)}: {has}; say what they are called, as in "
        f"names=({example}{',' if len(values) == 1 else ''})"
    )


def copy_value(value: Any) -> Any:
    """Converts a value and copies its memory: a stage that writes into it must not change the original.

    Tensors become numpy arrays, PIL images [C, H, W] of the same bands, objects of dataclasses and named tuples
    dicts. Dicts, lists and tuples stay what they are, with their values converted; everything else stays as it is.
    """
    if isinstance(value, np.ndarray):
        return value.copy()
    if isinstance(value, str | bytes | int | float | None):
        return value
    if isinstance(value, Mapping):
        return {name: copy_value(part) for name, part in value.items()}
    if (fields := get_field_names(value)) is not None:
        return {name: copy_value(getattr(value, name)) for name in fields}
    if type(value) in (list, tuple):
        return type(value)(map(copy_value, value))
    home = type(value).__module__.partition(".")[0]
    if home == "torch" and hasattr(value, "detach"):
        return tensor_to_array(value).copy()
    if home == "PIL":
        from pipelines.stages._pictures import image_to_array, is_pil_image

        return image_to_array(value) if is_pil_image(value) else value
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
