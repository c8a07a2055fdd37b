"""What feeder, consumers and preparation workers say to each other over Unix sockets.

The sockets are SOCK_SEQPACKET: a message arrives whole, and the death of a peer is an empty message, at
once. What is said rarely is JSON with a version; what is said for every batch is a struct. Nothing is
unpickled.

Consumer to feeder: one `hello`, then `WANT` for each batch: (everything below `released` is mine no more, tell me
when everything below `want` is there; 0: do not tell). Feeder to consumer: `welcome` with the ring's descriptor,
or `refused`; then one `READY` for each want; `ring`, and `memory` with a descriptor, when the ring goes on in new
memory. Feeder to worker: `note` with the descriptor of where to say which sample it is at, `target` with a
memory's descriptor, `forget`, `deadly` (a record that nobody is to prepare), `PREPARE` (target, start, stop);
worker to feeder: `ready` once, `DONE` (target, start, stop, CPU nanoseconds so far), before it `skipped` with the
error of each record that could not be prepared and, where it was given a `cache` with the descriptor of one,
`CACHED` (samples of the run that were read from it, were added to it, were wrong there). Feeder and link
(`pipelines.multinode.link_main`) speak of runs that are here, came or were sent in `TRANSFERRED` (start, stop).
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
from typing import Any

from pipelines.errors import PipelineError

log = logging.getLogger(__name__)

VERSION = 1
MAX_MESSAGE_BYTES = 64 * 1024
MAX_STRUCT_BYTES = 64  # no struct is larger

WANT = struct.Struct("<cqq")
READY = struct.Struct("<cq")
PREPARE = struct.Struct("<cqqq")
DONE = struct.Struct("<cqqqq")
TRANSFERRED = struct.Struct("<cqq")
CACHED = struct.Struct("<cqqq")

_PREFIX = "feeder-"
_MAX_PATH_BYTES = 107  # bytes of a socket's path; unix(7)
_ABANDONED_S = 60.0
_BACKLOG = 4096  # pending connections of a feeder that is still starting: all ranks of a node at once
_PEER_ENDED = "the peer is gone"


class ConnectionLost(Exception):
    """The peer has ended or closed its socket."""


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
            f"a peer speaks version {fields.get('v') if isinstance(fields, dict) else fields!r}, not {VERSION}"
        )
    return fields


def receive(connection: socket.socket, max_bytes: int = MAX_MESSAGE_BYTES) -> bytes:
    """Receive one message.

    Args:
        max_bytes: of the message; the rest is cut off. `MAX_STRUCT_BYTES` where a struct is expected: to allocate
            memory for a large message costs more than all else here.

    Raises:
        ConnectionLost: the peer has ended.
        TimeoutError: no message arrived within the socket's timeout, or the kernel's (`set_receive_timeout`).
    """
    try:
        message = connection.recv(max_bytes)
    except OSError as error:
        raise _receive_error(error) from error
    if not message:
        raise ConnectionLost(_PEER_ENDED)
    return message


def _receive_error(error: OSError) -> TimeoutError | ConnectionLost:
    """The error that `receive` raises for an error of the socket; the kernel's timeout is a `BlockingIOError`."""
    return TimeoutError() if isinstance(error, TimeoutError | BlockingIOError) else ConnectionLost(str(error))


def set_receive_timeout(connection: socket.socket, timeout_s: float) -> None:
    """Set the kernel's timeout for `receive`: one system call, where a Python timeout takes two."""
    seconds, rest = divmod(timeout_s, 1)
    connection.settimeout(None)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("@ll", int(seconds), int(rest * 1e6)))


def receive_with_descriptor(connection: socket.socket) -> tuple[bytes, int | None]:
    """One message and the descriptor sent with it, or None; raises as `receive` does."""
    try:
        message, descriptors, _, _ = socket.recv_fds(connection, MAX_MESSAGE_BYTES, 1)
    except OSError as error:
        raise _receive_error(error) from error
    if not message:
        raise ConnectionLost(_PEER_ENDED)
    return message, descriptors[0] if descriptors else None


def receive_json(connection: socket.socket) -> tuple[dict[str, Any], int | None]:
    """A JSON message and the descriptor sent with it, or None; raises as `receive` does."""
    message, descriptor = receive_with_descriptor(connection)
    return unpack(message), descriptor


def send(connection: socket.socket, message: bytes, descriptor: int | None = None) -> None:
    """Send one message; raises `ConnectionLost` when the peer is gone."""
    try:
        if descriptor is None:
            connection.send(message)
        else:
            socket.send_fds(connection, [message], [descriptor])
    except OSError as error:
        raise ConnectionLost(str(error)) from error


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
    """Open a listening socket at a path, for this user only; its directory is made with mode 0700.

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
            "%s is too long for a socket's path (%d bytes): the feeder's lies in /tmp", root, _MAX_PATH_BYTES
        )
        root = "/tmp"
    for own in glob.glob(os.path.join(glob.escape(root), _PREFIX + "*")):
        left = os.path.join(own, "socket")
        with contextlib.suppress(OSError):  # another user's, or being removed by another process
            found = os.lstat(own)
            if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
                continue
            if time.time() - found.st_mtime < _ABANDONED_S or os.listdir(own) != ["socket"]:
                continue
            if stat.S_ISSOCK(os.lstat(left).st_mode) and not is_listening(left):
                os.unlink(left)
                os.rmdir(own)
    return tempfile.mkdtemp(prefix=_PREFIX, dir=root)
