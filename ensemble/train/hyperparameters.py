"""A member's hyperparameters, which record the keys that are read: an unread one is probably a mistake."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


class Hyperparameters(dict[str, Any]):
    """A dict that records which of its keys were read; iterating reads all of them."""

    def __init__(self, given: dict[str, Any]) -> None:
        super().__init__(given)
        self._given = list(given)
        self._read: set[str] = set()

    @property
    def unread(self) -> list[str]:
        """The given keys that were not read, in order."""
        return [key for key in self._given if key not in self._read]

    def __getitem__(self, key: str) -> Any:
        self._read.add(key)
        return super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        if isinstance(key, str):
            self._read.add(key)
        return super().__contains__(key)

    def __iter__(self) -> Iterator[str]:
        self._read.update(super().keys())
        return super().__iter__()

    def get(self, key: str, default: Any = None) -> Any:
        """See `dict`."""
        self._read.add(key)
        return super().get(key, default)

    def pop(self, key: str, *default: Any) -> Any:
        """See `dict`."""
        self._read.add(key)
        return super().pop(key, *default)

    def setdefault(self, key: str, default: Any = None) -> Any:
        """See `dict`."""
        self._read.add(key)
        return super().setdefault(key, default)

    def keys(self) -> Any:
        """See `dict`."""
        self._read.update(super().keys())
        return super().keys()

    def values(self) -> Any:
        """See `dict`."""
        self._read.update(super().keys())
        return super().values()

    def items(self) -> Any:
        """See `dict`."""
        self._read.update(super().keys())
        return super().items()

    def copy(self) -> dict[str, Any]:
        """A plain dict."""
        return dict(self.items())

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (self.copy(),)
