"""Accepts consumers' connections, also when the process has no file descriptor left.

accept(2) then fails with EMFILE as long as a caller waits. A descriptor is kept in reserve for that case: with it
the caller's connection is accepted and closed; the consumer works alone and tries again later.
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
        listener: the listening socket; its owner closes it.
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
        self._paused_until: float | None = None
        self._resume()

    def _resume(self) -> None:
        self._paused_until = None
        self._open_reserve()
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
        """Close the reserve descriptor."""
        if self._reserve is not None:
            os.close(self._reserve)
            self._reserve = None

    def _open_reserve(self) -> None:
        if self._reserve is None:
            try:
                self._reserve = os.memfd_create("reserve", os.MFD_CLOEXEC)
            except OSError as error:
                if error.errno not in _EXHAUSTED:
                    raise

    def _accept(self, listener: socket.socket) -> None:
        try:
            connection, _ = listener.accept()
        except OSError as error:
            if error.errno not in _EXHAUSTED:
                raise
            self._refuse_connection(listener, error)
        else:
            self._on_connection(connection)

    def _refuse_connection(self, listener: socket.socket, error: OSError) -> None:
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"the feeder has no descriptor left for another consumer ({error.strerror}): the consumer works "
                "alone and tries again from time to time; raise `ulimit -n`",
                stacklevel=2,
            )
        self.close()
        try:
            connection, _ = listener.accept()
        except OSError as second:
            if second.errno not in _EXHAUSTED:
                raise
            self._selector.unregister(listener)  # it would report the same caller for ever
            self._paused_until = time.monotonic() + _PAUSE_S
            return
        connection.close()
        self._open_reserve()
