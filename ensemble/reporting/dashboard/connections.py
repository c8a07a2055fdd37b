"""Bounds what connections can hold: their number, and how long one may be without a whole request.

aiohttp waits for the first request of a connection, and for the rest of one that has begun, as long as the peer
likes. Here a connection that has no request in progress is closed after `IDLE_S`, however many bytes trickle in,
and where there are too many, those go first that have waited longest.
"""

from __future__ import annotations

import asyncio
import contextlib
import resource
import socket
from collections.abc import Awaitable, Callable

from aiohttp import web

#: Seconds from one request to the end of the next one's head, and to the end of a body.
IDLE_S, BODY_S = 15.0, 10.0
MOST_CONNECTIONS = 512
#: Bytes of a line of a request's head; lines; bytes of what comes before a request is in progress.
MOST_LINE, MOST_HEADERS, MOST_WAITING = 8190, 64, 2**18
#: Seconds after which the kernel asks whether a silent peer is there, between such probes, and their number.
KEEPALIVE = ((socket.TCP_KEEPIDLE, 60), (socket.TCP_KEEPINTVL, 15), (socket.TCP_KEEPCNT, 4))


class Connections:
    """The connections of one server.

    Args:
        make: makes aiohttp's protocol of a connection.
    """

    def __init__(self, make: Callable[[], asyncio.Protocol], most: int = MOST_CONNECTIONS) -> None:
        self._make, self._most = make, most
        self._idle: dict[Connection, None] = {}  # in the order in which they began to wait
        self._by_protocol: dict[asyncio.BaseProtocol, Connection] = {}

    def __call__(self) -> Connection:
        return Connection(self, self._make())

    def add(self, connection: Connection) -> None:
        """Takes note of a new connection; closes the one that has waited longest if there are too many."""
        self._by_protocol[connection.inner] = connection
        self.wait(connection)
        if len(self._by_protocol) > self._most and self._idle:
            oldest = next(iter(self._idle))
            self.begin(oldest)  # it is lost a moment later only
            oldest.abort()

    def remove(self, connection: Connection) -> None:
        """Forgets a connection."""
        self._by_protocol.pop(connection.inner, None)
        self.begin(connection)

    def wait(self, connection: Connection) -> None:
        """A connection waits for a request."""
        self._idle[connection], connection.received = None, 0
        connection.timer = asyncio.get_running_loop().call_later(IDLE_S, connection.abort)

    def is_waiting(self, connection: Connection) -> bool:
        """Whether a connection has no request in progress."""
        return connection in self._idle

    def begin(self, connection: Connection) -> None:
        """A connection waits no longer."""
        self._idle.pop(connection, None)
        if connection.timer is not None:
            connection.timer.cancel()

    def add_to(self, app: web.Application) -> None:
        """Has an application tell which connections have a request in progress."""

        @web.middleware
        async def track(
            request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
        ) -> web.StreamResponse:
            connection = self._by_protocol.get(request.protocol)
            if connection is None:
                raise ConnectionResetError
            self.begin(connection)
            try:
                answer = await handler(request)
                await answer.prepare(request)  # here and not by aiohttp afterwards: a slow reader is not idle
                await answer.write_eof()
                return answer
            finally:
                if connection.inner in self._by_protocol:
                    self.wait(connection)

        app.middlewares.insert(0, track)


class Connection(asyncio.Protocol):
    """Passes what happens on a connection on to aiohttp."""

    def __init__(self, all: Connections, inner: asyncio.Protocol) -> None:
        self.inner, self._all = inner, all
        self.timer: asyncio.TimerHandle | None = None
        self.received = 0  # bytes since it waits for a request
        self._transport: asyncio.Transport | None = None

    def abort(self) -> None:
        """Closes the connection at once."""
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self.inner.connection_made(transport)
        self._all.add(self)

    def data_received(self, data: bytes) -> None:
        self.received += len(data)
        if self.received > MOST_WAITING and self._all.is_waiting(self):
            self.abort()
        else:
            self.inner.data_received(data)

    def eof_received(self) -> bool | None:
        return self.inner.eof_received()

    def pause_writing(self) -> None:
        self.inner.pause_writing()

    def resume_writing(self) -> None:
        self.inner.resume_writing()

    def connection_lost(self, error: Exception | None) -> None:
        self._all.remove(self)
        self.inner.connection_lost(error)


def raise_file_limit() -> None:
    """Lets this process have as many files open as its connections and runs need, where it may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 4 * MOST_CONNECTIONS
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def listen(address: str, port: int) -> socket.socket:
    """Returns a socket that listens on an IP address.

    Raises:
        OSError: the port is taken, or the address is not this machine's.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in KEEPALIVE:
            listening.setsockopt(socket.IPPROTO_TCP, option, value)
        listening.bind((address, port))
        listening.listen(1024)
    except BaseException:
        listening.close()
        raise
    return listening
