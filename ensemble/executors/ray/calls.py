"""Counts the calls to Ray that are in progress, so that none is cut off by `ray.shutdown`."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

_LIMIT_S = 5.0


class Calls:
    """Calls of a connection.

    Attributes:
        are_over: whether `end` was called; who makes a long call looks twice a second.
    """

    def __init__(self) -> None:
        self.are_over = False
        self._count, self._changed = 0, threading.Condition()

    @contextlib.contextmanager
    def calling(self) -> Iterator[None]:
        """Within, `end` waits for a moment."""
        with self._changed:
            self._count += 1
        try:
            yield
        finally:
            with self._changed:
                self._count -= 1
                self._changed.notify_all()

    def end(self) -> None:
        """Wait until no call is in progress; one that does not look at `are_over` is not waited for."""
        self.are_over = True
        with self._changed:
            self._changed.wait_for(lambda: not self._count, _LIMIT_S)


def identify_connection() -> tuple[str, str] | None:
    """What tells the present connection of this process from any other; None: there is none."""
    import ray

    if not ray.is_initialized():
        return None
    try:
        context = ray.get_runtime_context()
        return context.get_node_id(), context.get_worker_id()
    except Exception:  # of several kinds, while it is closed
        return None
