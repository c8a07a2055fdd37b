"""Starts and ends a feeder's link process (`pipelines.multinode.link_main`), and exchanges messages with it."""

from __future__ import annotations

import contextlib
import selectors
import socket
import subprocess
import sys
from collections.abc import Callable

from pipelines.ipc import messages
from pipelines.ipc.child_processes import child_environment


class LinkProcess:
    """At most one link process at a time.

    Args:
        selector: where its socket is registered.

    Attributes:
        is_blocked: whether its socket is full, because it has not read for long.
    """

    def __init__(self, selector: selectors.BaseSelector, on_message: Callable[[bytes | None], None]) -> None:
        self._selector = selector
        self._on_message = on_message
        self.is_blocked = False
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: socket.socket | None = None

    @property
    def is_running(self) -> bool:
        return self._process is not None

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    def start(self) -> None:
        """Start the process, which imports its modules while the feeder looks for other nodes."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        messages.close_in_children(ours)
        messages.close_in_children(theirs)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "pipelines.multinode.link_main", str(theirs.fileno())],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                env=child_environment(),
            )
        ours.setblocking(False)
        self._connection = ours
        self._selector.register(ours, selectors.EVENT_READ, self._handle_input)

    def terminate(self) -> None:
        """End the process; afterwards only this node's workers write into the ring."""
        self.is_blocked = False
        if self._connection is not None:
            with contextlib.suppress(KeyError, ValueError):
                self._selector.unregister(self._connection)
            self._connection.close()
            self._connection = None
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def send(self, message: bytes, *descriptors: int) -> None:
        """Send a message without waiting; the end of the process is noticed at its end-of-file."""
        if self._connection is not None:
            try:
                messages.send(self._connection, message, *descriptors)
            except messages.ConnectionLost as lost:
                self.is_blocked = isinstance(lost.__cause__, BlockingIOError)

    def _handle_input(self, connection: socket.socket) -> None:
        if connection is not self._connection:  # of a process that has just been ended
            return
        try:
            message = messages.receive(connection)
        except messages.ConnectionLost:
            self._on_message(None)
        else:
            self._on_message(message)
