"""Where consumers come in: a listening socket whose owner lives on when the process has no descriptor left.

Without one accept(2) fails with EMFILE, and goes on failing as long as somebody calls. A descriptor is kept in
reserve for that: with it a caller is let in and sent away, works alone, and comes again later.
"""

from __future__ import annotations

import errno
import os
import selectors
import socket
import time
import warnings
from collections.abc import Callable

_RUN_OUT = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_AGAIN_S = 1.0


class Door:
    """Lets consumers in.

    Args:
        listener: a socket that listens.
        selector: where it is registered, with a function that takes who is there.
        enter: called with each new connection.
    """

    def __init__(
        self, listener: socket.socket, selector: selectors.BaseSelector, enter: Callable[[socket.socket], None]
    ) -> None:
        self._listener, self._selector, self._enter = listener, selector, enter
        self._reserve: int | None = None
        self._warned = False
        self._shut_until: float | None = None
        self._open()

    def _open(self) -> None:
        self._shut_until = None
        self._keep_reserve()
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)

    def tick(self) -> float | None:
        """Open again if it is time; the seconds until it will be, None where it is open."""
        if self._shut_until is None:
            return None
        left_s = self._shut_until - time.monotonic()
        if left_s > 0:
            return left_s
        self._open()
        return None

    def close(self) -> None:
        """Give the reserve back; the listener is its owner's to close."""
        if self._reserve is not None:
            os.close(self._reserve)
            self._reserve = None

    def _keep_reserve(self) -> None:
        if self._reserve is None:
            try:
                self._reserve = os.memfd_create("reserve", os.MFD_CLOEXEC)
            except OSError as error:
                if error.errno not in _RUN_OUT:
                    raise

    def _accept(self, listener: socket.socket) -> None:
        try:
            connection, _address = listener.accept()
        except OSError as error:
            if error.errno not in _RUN_OUT:
                raise
            self._refuse(listener, error)
            return
        self._enter(connection)

    def _refuse(self, listener: socket.socket, error: OSError) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"the feeder has no descriptor left for another consumer ({error.strerror}): it works alone and "
                "tries again from time to time; raise `ulimit -n`",
                stacklevel=2,
            )
        self.close()
        try:
            connection, _address = listener.accept()
        except OSError as again:
            if again.errno not in _RUN_OUT:
                raise
            self._selector.unregister(listener)  # it would be told of the same caller for ever
            self._shut_until = time.monotonic() + _AGAIN_S
            return
        connection.close()
        self._keep_reserve()
