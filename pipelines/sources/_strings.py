"""A sequence of many short texts in memory that processes can share."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any, Generic, TypeVar, overload

import numpy as np

T = TypeVar("T", str, bytes)


class Strings(Sequence[T], Generic[T]):
    """A sequence of texts, or of bytes, stored in two arrays.

    A list of `str` needs about 100 bytes per entry, in each process that it is sent to. The arrays need the size
    of the texts and 8 bytes per entry, and the preparation processes of a feeder map them without a copy.
    """

    def __init__(self, values: Sequence[T]) -> None:
        self._text = not values or isinstance(values[0], str)
        raw = [value.encode("utf-8", "surrogatepass") if isinstance(value, str) else value for value in values]
        self._data = np.frombuffer(b"".join(raw), np.uint8)
        self._ends = np.cumsum(np.fromiter(chain((0,), map(len, raw)), np.int64, len(raw) + 1))

    @classmethod
    def join(cls, parts: Sequence[tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]]) -> Strings[str]:
        """The texts of several sequences, each given by its `parts`."""
        joined = Strings[str]([])
        joined._data = np.concatenate([data for data, _ in parts])
        before = np.cumsum([0, *(len(data) for data, _ in parts)])
        ends: list[np.ndarray[Any, Any]] = [
            own[1:] + start for (_, own), start in zip(parts, before[:-1], strict=True)
        ]
        joined._ends = np.concatenate([before[:1], *ends])
        return joined

    @property
    def parts(self) -> list[np.ndarray[Any, Any]]:
        """The arrays that hold the texts."""
        return [self._data, self._ends]

    def __len__(self) -> int:
        return len(self._ends) - 1

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> list[T]: ...
    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        count = len(self._ends) - 1
        if not -count <= index < count:
            raise IndexError(index)
        index %= count
        value = self._data[self._ends[index] : self._ends[index + 1]].tobytes()
        return value.decode("utf-8", "surrogatepass") if self._text else value
