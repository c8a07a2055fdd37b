"""What one field of every sample looks like."""

from __future__ import annotations

from typing import NamedTuple


class Field(NamedTuple):
    """Shape and dtype that every sample's value of a field has.

    Attributes:
        shape: of one sample, without the batch axis; `()` for a scalar.
        dtype: numpy's name of it, such as `"uint8"`.
    """

    shape: tuple[int, ...]
    dtype: str
