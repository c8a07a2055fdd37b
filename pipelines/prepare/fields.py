"""What one field of every sample looks like."""

from __future__ import annotations

from typing import Any, NamedTuple


class Field(NamedTuple):
    """Shape and dtype that every sample's value of a field has.

    Attributes:
        shape: of one sample, without the batch axis; `()` for a scalar.
        dtype: numpy's name of it, such as `"uint8"`.
    """

    shape: tuple[int, ...]
    dtype: str


def described(fields: dict[str, Field]) -> list[Any]:
    """Fields as a JSON value that is equal for equal fields, in whichever order."""
    return [[name, list(shape), dtype] for name, (shape, dtype) in sorted(fields.items())]
