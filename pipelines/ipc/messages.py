"""The messages between feeders, consumers and preparation workers, and the Unix sockets that carry them.

The sockets are SOCK_SEQPACKET: a message arrives whole, and the end of a peer is an empty message at once. Rare
messages are JSON with a version; those for each batch or block are structs. Nothing is unpickled.

Consumer to feeder: one `hello`; then `LOOK` when the feeder may sleep and has to look at the consumer's words
(`pipelines.shm.words`), which take the place of a message for each batch. Feeder to consumer: `welcome` with the
descriptors of the ring, the consumer's words and the wake-up, or `refused`. When the ring continues in new memory:
`ring`, then `memory` with its descriptor.

Feeder to worker: `note` with the descriptor of the memory in which the worker notes its present sample, `cache`
with the descriptor of a sample cache, `target` with the descriptor of a buffer, `forget` for a buffer, `poison`
for a record that must not be prepared, `PREPARE` (target, start, stop). Worker to feeder: `ready` once, `DONE`
(target, start, stop, CPU nanoseconds so far, those in batch stages for this block), before it `skipped` with the
error of each record that could not be prepared and, with a cache, `CACHED` (samples of the block that were read
from it, were added to it, were invalid in it; bytes that were added).

Feeder and link (`pipelines.multinode.link_main`): `TRANSFERRED` (start, stop) for a block that is ready to be
sent, was received or was sent.
"""

from __future__ import annotations

import contextlib
import glob
import json
import logging
import os
import socket
import stat
import struct
import tempfile
import time
import weakref
from typing import Any, NoReturn

from pipelines.errors import PipelineError

log = logging.getLogger(__name__)

VERSION = 2
MAX_MESSAGE_BYTES = 64 * 1024
MAX_STRUCT_BYTES = 64  # no struct is larger

LOOK = b"L"
PREPARE = struct.Struct("<cqqq")
DONE = struct.Struct("<cqqqqq")
TRANSFERRED = struct.Struct("<cqq")
CACHED = struct.Struct("<cqqqq")

_PREFIX = "feeder-"
_MAX_PATH_BYTES = 107  # bytes of a socket's path; unix(7)
_MIN_ABANDONED_S = 60.0
_BACKLOG = 4096  # pending connections of a feeder that is still starting: all ranks of a node at once
_PEER_ENDED = "the peer is gone"


class ConnectionLost(Exception):
    """The peer has ended or closed its socket."""


class NothingReceived(TimeoutError):
    """No message arrived within the socket's timeout. A handler of signals may raise any other `TimeoutError`."""


def pack(kind: str, **fields: Any) -> bytes:
    """A JSON message."""
    return json.dumps({"v": VERSION, "kind": kind, **fields}).encode()


NEW_RING = pack("ring")


def unpack(message: bytes) -> dict[str, Any]:
    """The fields of a JSON message.

    Raises:
        ConnectionLost: the message is empty: the peer has ended.
        ValueError: it is not a message of this version.
    """
    if not message:
        raise ConnectionLost(_PEER_ENDED)
    fields = json.loads(message)
    if not isinstance(fields, dict) or fields.get("v") != VERSION:
        raise ValueError(
            f"a peer sent a message of version {fields.get('v') if isinstance(fields, dict) else fields!r}: "
            f"this process reads version {VERSION}"
        )
    return fields


def receive(connection: socket.socket, max_bytes: int = MAX_MESSAGE_BYTES) -> bytes:
    """Receive one message.

    Args:
        max_bytes: of the message; the rest is cut off. `MAX_STRUCT_BYTES` where a struct is expected: to allocate
            memory for a large message costs more than all else here.

    Raises:
        ConnectionLost: the peer has ended.
        NothingReceived: no message arrived within the socket's timeout.
    """
    try:
        message = connection.recv(max_bytes)
    except OSError as error:
        _raise_lost(error, NothingReceived if isinstance(error, TimeoutError) else ConnectionLost)
    if not message:
        raise ConnectionLost(_PEER_ENDED)
    return message


def receive_with_descriptors(connection: socket.socket, most: int) -> tuple[bytes, list[int]]:
    """Receive one message and the descriptors sent with it, so many at most; raises as `receive` does."""
    try:
        message, descriptors, _, _ = socket.recv_fds(connection, MAX_MESSAGE_BYTES, most)
    except OSError as error:
        _raise_lost(error, NothingReceived if isinstance(error, TimeoutError) else ConnectionLost)
    if not message:
        raise ConnectionLost(_PEER_ENDED)
    return message, descriptors


def receive_with_descriptor(connection: socket.socket) -> tuple[bytes, int | None]:
    """Receive one message and the descriptor sent with it, or None; raises as `receive` does."""
    message, descriptors = receive_with_descriptors(connection, 1)
    return message, descriptors[0] if descriptors else None


def receive_json(connection: socket.socket) -> tuple[dict[str, Any], int | None]:
    """Receive a JSON message and the descriptor sent with it, or None; raises as `receive` does."""
    message, descriptor = receive_with_descriptor(connection)
    return unpack(message), descriptor


def send(connection: socket.socket, message: bytes, *descriptors: int) -> None:
    """Send one message; raises `ConnectionLost` when the peer is gone."""
    try:
        if descriptors:
            socket.send_fds(connection, [message], descriptors)
        else:
            connection.send(message)
    except OSError as error:
        _raise_lost(error, ConnectionLost)


def _raise_lost(error: OSError, lost: type[Exception]) -> NoReturn:
    """Raise what an error of a socket means; what a signal handler has raised within the call stays as it is."""
    inner = error.__traceback__
    while inner is not None and inner.tb_next is not None:
        inner = inner.tb_next
    own = (_raise_lost.__code__.co_filename, socket.recv_fds.__code__.co_filename)
    if inner is not None and inner.tb_frame.f_code.co_filename not in own:
        raise error
    raise lost(str(error)) from error


def is_struct(message: bytes, form: struct.Struct, letter: bytes) -> bool:
    """Whether a message is the struct `form` marked with `letter`."""
    return len(message) == form.size and message[:1] == letter


_closed_in_children: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def close_in_children(connection: socket.socket) -> None:
    """Close a socket's copies in processes that are forked off this one.

    A copy would keep the connection open after this process has died, and its peer would not notice.
    """
    _closed_in_children.add(connection)


def _close_copies() -> None:
    for connection in list(_closed_in_children):
        connection.close()


os.register_at_fork(after_in_child=_close_copies)


def listen(address: str) -> socket.socket:
    """Open a listening socket at a path, for this user only; its directory is created with mode 0700.

    Raises:
        PipelineError: another process listens there, or the path cannot be used.
    """
    os.makedirs(os.path.dirname(address) or ".", mode=0o700, exist_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if is_listening(address):
        listener.close()
        raise PipelineError(f"a feeder is listening at {address} already")
    with contextlib.suppress(FileNotFoundError):
        if stat.S_ISSOCK(os.lstat(address).st_mode):  # of a process that was killed
            os.unlink(address)
    try:
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise PipelineError(f"cannot listen at {address}: {error}") from None
    os.chmod(address, 0o600)
    listener.listen(_BACKLOG)
    close_in_children(listener)
    return listener


def is_listening(address: str) -> bool:
    """Whether a process listens at an address."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
        probe.setblocking(False)
        try:
            probe.connect(address)
        except BlockingIOError:  # its queue of callers is full
            return True
        except OSError:
            return False
    return True


def create_directory() -> str:
    """Make a temporary directory for a feeder's socket, and remove those of killed feeders.

    A directory is removed if it is this user's, older than a minute, and contains only a socket at which no
    process listens.
    """
    root = tempfile.gettempdir()
    if len(os.fsencode(root)) + len(f"/{_PREFIX}12345678/socket") > _MAX_PATH_BYTES:
        log.warning(
            "%s is too long for a socket's path (%d bytes): the feeder's is in /tmp", root, _MAX_PATH_BYTES
        )
        root = "/tmp"
    for directory in glob.glob(os.path.join(glob.escape(root), _PREFIX + "*")):
        address = os.path.join(directory, "socket")
        with contextlib.suppress(OSError):  # another user's, or being removed by another process
            status = os.lstat(directory)
            if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
                continue
            if time.time() - status.st_mtime < _MIN_ABANDONED_S or os.listdir(directory) != ["socket"]:
                continue
            if stat.S_ISSOCK(os.lstat(address).st_mode) and not is_listening(address):
                os.unlink(address)
                os.rmdir(directory)
    return tempfile.mkdtemp(prefix=_PREFIX, dir=root)
