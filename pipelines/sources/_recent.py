"""What one process keeps for further reads: open files, decoded groups of records, readers of columns."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class OwnDict(dict[K, V]):
    """A dict of one process: pickled, it is empty."""

    def __reduce__(self) -> tuple[Any, ...]:
        return OwnDict, ()


class ThreadLock:
    """A lock for the threads of a process. A forked child, which lacks the holding thread, finds it free."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pid = os.getpid()

    def __enter__(self) -> None:
        if self._pid != os.getpid():
            self._lock, self._pid = threading.Lock(), os.getpid()
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


class RecentlyUsed(Generic[K, V]):
    """Values that are costly to make, by key; above a limit, the least recently used is dropped.

    Pickles to an empty instance. A forked child goes on with what it inherits: files are read at given positions
    (`os.pread`), which moves no shared file offset, and Arrow's arrays are read-only, so that their memory is
    shared. Thread-safe: whoever uses a value holds it, so a file that is dropped is closed after the read.

    Args:
        limit: of the sum of all sizes; one value is kept, however large.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._held: OrderedDict[K, tuple[V, int]] = OrderedDict()
        self._lock = ThreadLock()
        self._has_dropped = False

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._limit,)

    def get(self, key: K, make: Callable[[K], tuple[V, int]]) -> V:
        """Returns the value of a key, which is made if necessary: the function returns it with its size."""
        # As long as all values fit, nobody asks which was used last.
        if not self._has_dropped and (held := self._held.get(key)) is not None:
            return held[0]
        with self._lock:
            held = self._held.get(key)
            if held is not None:
                self._held.move_to_end(key)
                return held[0]
            value, size = make(key)
            self._held[key] = (value, size)
            while self.size > self._limit and len(self._held) > 1:
                self._held.popitem(last=False)
                self._has_dropped = True
            return value

    def drop(self, key: K) -> None:
        """Makes the value anew when it is wanted next: a file server may not know an open file any more."""
        with self._lock:
            self._held.pop(key, None)

    @property
    def size(self) -> int:
        """Size of the values; summed on each access, because a fork may interrupt any update of a sum."""
        return sum(size for _, size in list(self._held.values()))
