"""A feeder's handle on its link process (`pipelines.multinode.link_main`): started, spoken to, ended."""

from __future__ import annotations

import contextlib
import selectors
import socket
import subprocess
import sys
from collections.abc import Callable

from pipelines import ipc
from pipelines.child_processes import child_environment


class LinkProcess:
    """At most one link process at a time.

    Args:
        transport: what it exchanges samples with (`rendezvous.Peers.transport`).
        selector: where its socket is registered.
        hear: called with each message, and with None when the process is gone.

    Attributes:
        jammed: it has not heard for so long that nothing more can be said to it.
    """

    def __init__(
        self, transport: str, selector: selectors.BaseSelector, hear: Callable[[bytes | None], None]
    ) -> None:
        self._transport = transport
        self._selector = selector
        self._hear_message = hear
        self.jammed = False
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: socket.socket | None = None

    @property
    def running(self) -> bool:
        """Whether there is one."""
        return self._process is not None

    @property
    def pid(self) -> int | None:
        """Of the process."""
        return self._process.pid if self._process is not None else None

    def start(self) -> None:
        """Start it; it makes itself ready while the other nodes are looked for."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ipc.keep_from_children(ours)
        ipc.keep_from_children(theirs)
        with theirs:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-P",
                    "-m",
                    "pipelines.multinode.link_main",
                    str(theirs.fileno()),
                    self._transport,
                ],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                env=child_environment(),
            )
        ours.setblocking(False)
        self.jammed = False
        self._connection = ours
        self._selector.register(ours, selectors.EVENT_READ, self._hear)

    def end(self) -> None:
        """End it; when this returns nobody writes into the ring but this node's workers."""
        if self._connection is not None:
            with contextlib.suppress(KeyError, ValueError):
                self._selector.unregister(self._connection)
            self._connection.close()
            self._connection = None
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def tell(self, message: bytes, descriptor: int | None = None) -> None:
        """Say something, without waiting; a link that has died is noticed at its end-of-file."""
        if self._connection is not None:
            try:
                ipc.send(self._connection, message, descriptor)
            except ipc.Lost as lost:
                self.jammed = isinstance(lost.__cause__, BlockingIOError)

    def _hear(self, connection: socket.socket) -> None:
        if connection is not self._connection:  # of a link that was ended a moment ago
            return
        try:
            message = ipc.receive(connection)
        except ipc.Lost:
            self._hear_message(None)
        else:
            self._hear_message(message)
