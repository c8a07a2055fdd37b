"""Cache of decoded groups of records, for files whose least unit of reading holds many."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from pipelines.sources._files import ThreadLock

# Decoded groups that one process keeps, in bytes.
CACHE_BYTES = 512 << 20


class GroupCache:
    """Caches decoded groups of records by number; above a number of bytes, the least recently used is dropped.

    A forked child can use the groups that it inherits and shares their memory: Arrow's arrays are read-only.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._held: OrderedDict[int, tuple[Any, int]] = OrderedDict()
        self._lock = ThreadLock()
        self._has_dropped = False

    def get(self, group: int, decode: Callable[[int], tuple[Any, int]]) -> Any:
        # As long as all groups fit, nobody asks which was used last.
        if not self._has_dropped and (found := self._held.get(group)) is not None:
            return found[0]
        with self._lock:
            found = self._held.get(group)
            if found is not None:
                self._held.move_to_end(group)
                return found[0]
            value, size = decode(group)
            self._held[group] = (value, size)
            while self.bytes > self._limit and len(self._held) > 1:
                self._held.popitem(last=False)
                self._has_dropped = True
            return value

    @property
    def bytes(self) -> int:
        """Size of the cached groups; summed on each access, because a fork may interrupt any update of a sum."""
        return sum(size for _, size in list(self._held.values()))
