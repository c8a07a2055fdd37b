"""Labels of records: one value for each record of a source, and the number of its class.

Class-balanced orders, and stratified or grouped splits, need a value of every record before the first sample is
prepared. It is given as an array, or as the name of a field that is read once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Set
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from pipelines.errors import PipelineError

Array = npt.NDArray[Any]
#: A field's name, values [n], or a function that takes a record and returns its value.
Values = str | Array | Callable[[Mapping[str, Any]], Any] | Any

_CLASSES_SHOWN = 5


class Records(Protocol):
    """What labels are read of: the records of a `pipelines.sources.Source`."""

    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[dict[str, Any]]: ...
    def column(self, field: str) -> Array:
        """One field of all records, [n, ...]."""


def read_values(source: Records, values_of: Values, what: str) -> Array:
    """Returns the value of each record of a source, [n].

    Args:
        values_of: the name of a field, an array or sequence [n], or a function of a record.
        what: the argument that gave it, for error messages.
    """
    if isinstance(values_of, str):
        values: Array = source.column(values_of)
    elif callable(values_of):
        values = pack_values([values_of(record) for record in source])
    else:
        values = values_of if isinstance(values_of, np.ndarray) else pack_values(values_of)
    if values.shape != (len(source),):
        shape = list(values.shape)
        raise PipelineError(
            f"{what} must have one value for each of the {len(source)} records, got an array {shape}"
        )
    return values


def pack_values(values: Any) -> Array:
    """Packs a sequence of values into an array; texts, bytes and what numpy cannot hold stay objects."""
    if isinstance(values, bytes | Mapping | Set) or not hasattr(values, "__len__"):
        raise PipelineError(f"values of records must be an array or a sequence, got {values!r:.60}")
    if hasattr(values, "detach"):  # a tensor, perhaps of a float dtype that numpy has not
        values = values.detach().cpu()
        return np.asarray(values.double() if values.is_floating_point() else values)
    if not isinstance(values, list | tuple):
        return np.asarray(values)
    values = [value.item() if hasattr(value, "detach") and value.ndim == 0 else value for value in values]
    if values and all(isinstance(value, bool | int | float | np.generic) for value in values):
        return np.asarray(values)
    arrays = [value for value in values if isinstance(value, np.ndarray)]
    if len(arrays) == len(values) and all(array.shape == arrays[0].shape for array in arrays):
        return np.stack(arrays) if arrays else np.empty(0)
    packed = np.empty(len(values), object)
    packed[:] = values
    return packed


def encode_classes(values: Array, what: str) -> tuple[npt.NDArray[np.int64], list[Any]]:
    """Numbers the classes of values in sorted order.

    Args:
        values: [n], of integers, booleans, texts or bytes; floats that are whole numbers count as integers.
        what: the argument that gave them, for error messages.

    Returns:
        The number of each value's class, int64 [n], and the classes.
    """
    is_number, listed = values.dtype.kind in "biuf", values.tolist()
    if values.dtype.kind == "f":
        wrong = np.flatnonzero(~np.isfinite(values) | (values != np.floor(values))).tolist()
    else:
        wrong = (
            [] if is_number else [n for n, value in enumerate(listed) if not isinstance(value, str | bytes | int)]
        )
    if wrong:
        raise PipelineError(
            f"{what} must be classes (integers, booleans, texts or bytes), but record {wrong[0]} has "
            f"{values[wrong[0]]!r:.60}"
        )
    if is_number:
        classes, codes = np.unique(values, return_inverse=True)
        return codes.reshape(-1).astype(np.int64, copy=False), classes.tolist()
    names = list(dict.fromkeys(listed))
    if len({type(name) for name in names}) > 1:
        raise PipelineError(f"{what} must be classes of one type, got {format_classes(names)}")
    numbers = {name: number for number, name in enumerate(sorted(names))}
    return np.fromiter(map(numbers.__getitem__, listed), np.int64, len(listed)), list(numbers)


def encode_keys(source: Any, field: str, by_class: Mapping[Any, Any], what: str) -> tuple[Array, list[Any]]:
    """Numbers the classes of a field, each of which is a key of a mapping: by its label, or by its name.

    Args:
        what: the mapping has of each class, for error messages.

    Returns:
        The number of each record's class, int64 [n], and the keys.
    """
    codes, classes = encode_classes(read_values(source, field, f"the field {field!r}"), f"the field {field!r}")
    names = source.find_class_names(field)
    numbered = dict(enumerate(names.union)) if names is not None and names.which is None else {}
    keys = [label if label in by_class else numbered.get(label, label) for label in classes]
    if missing := [key for key in keys if key not in by_class]:
        raise PipelineError(
            f"the class {missing[0]!r} of the field {field!r} has no {what}, {list(by_class)} have"
        )
    if foreign := [key for key in by_class if key not in keys]:
        raise PipelineError(
            f"no record has the class {foreign[0]!r} in the field {field!r}; there are {format_classes(keys)}"
        )
    return codes, keys


def format_classes(classes: list[Any]) -> str:
    shown = ", ".join(f"{name!r:.40}" for name in classes[:_CLASSES_SHOWN])
    return shown if len(classes) <= _CLASSES_SHOWN else f"{shown}, ... ({len(classes)} in all)"
