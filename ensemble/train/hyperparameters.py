"""A member's hyperparameters, which note who of them is read: one that nobody reads is likely a mistake."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


class Hyperparameters(dict[str, Any]):
    """A dict that notes which of its keys were looked at; whoever goes over all of them has looked at all."""

    def __init__(self, given: dict[str, Any]) -> None:
        super().__init__(given)
        self._given = list(given)
        self._read: set[str] = set()

    @property
    def unread(self) -> list[str]:
        """The given keys that nobody has looked at, in their order."""
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
        """As a dict's."""
        self._read.add(key)
        return super().get(key, default)

    def pop(self, key: str, *default: Any) -> Any:
        """As a dict's."""
        self._read.add(key)
        return super().pop(key, *default)

    def setdefault(self, key: str, default: Any = None) -> Any:
        """As a dict's."""
        self._read.add(key)
        return super().setdefault(key, default)

    def keys(self) -> Any:
        """As a dict's."""
        self._read.update(super().keys())
        return super().keys()

    def values(self) -> Any:
        """As a dict's."""
        self._read.update(super().keys())
        return super().values()

    def items(self) -> Any:
        """As a dict's."""
        self._read.update(super().keys())
        return super().items()

    def copy(self) -> dict[str, Any]:
        """A plain dict."""
        return dict(self.items())

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (self.copy(),)
