"""Accepts consumers' connections.

A descriptor is held in reserve: where no other is left, a caller is accepted with it and its connection closed.
The consumer then works alone and tries again later, instead of waiting for an answer.
"""

from __future__ import annotations

import errno
import os
import selectors
import socket
import time
import warnings
from collections.abc import Callable

_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_PAUSE_S = 1.0


class Listener:
    """Accepts the connections of a listening socket.

    Args:
        selector: where the socket is registered.
        on_connection: called with each new connection.
    """

    def __init__(
        self,
        listener: socket.socket,
        selector: selectors.BaseSelector,
        on_connection: Callable[[socket.socket], None],
    ) -> None:
        self._listener, self._selector, self._on_connection = listener, selector, on_connection
        self._reserve: int | None = None
        self._has_warned = False
        self._resume()

    def _resume(self) -> None:
        self._paused_until: float | None = None
        self._hold_reserve()
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)

    def tick(self) -> float | None:
        """Resume accepting after a pause; returns the seconds until then, None if there is no pause."""
        if self._paused_until is None:
            return None
        left_s = self._paused_until - time.monotonic()
        if left_s > 0:
            return left_s
        self._resume()
        return None

    def close(self) -> None:
        """Close the descriptor held in reserve."""
        if self._reserve is not None:
            os.close(self._reserve)
            self._reserve = None

    def _hold_reserve(self) -> bool:
        """Hold a descriptor in reserve, if one is left."""
        try:
            self._reserve = os.memfd_create("reserve", os.MFD_CLOEXEC)
        except OSError as error:
            if error.errno not in _EXHAUSTED:
                raise
            self._warn(error)
        return self._reserve is not None

    def _warn(self, error: OSError) -> None:
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"the feeder has no descriptor left for another consumer ({error.strerror}): the consumer works "
                "alone and tries again from time to time; raise `ulimit -n`",
                stacklevel=2,
            )

    def _accept(self, listener: socket.socket) -> None:
        self.close()
        try:
            connection, _ = listener.accept()
        except OSError as error:  # another thread has taken the reserve's place
            if error.errno not in _EXHAUSTED:
                raise
            self._warn(error)
            self._selector.unregister(listener)  # it would report the same caller for ever
            self._paused_until = time.monotonic() + _PAUSE_S
            return
        if self._hold_reserve():
            self._on_connection(connection)
        else:
            connection.close()
            self._hold_reserve()
