"""What feeder, consumers and preparation workers say to each other over Unix sockets.

The sockets are SOCK_SEQPACKET: a message arrives whole, and the death of a peer is an empty message, at
once. What is said rarely is JSON with a version; what is said for every batch is a struct. Nothing is
unpickled.

Consumer to feeder: one `hello`, then `WANT` for each batch: (everything below `released` is mine no more,
tell me when everything below `want` is there; 0: do not tell).
Feeder to consumer: `welcome` with the ring's descriptor, or `refused`; then one `READY` for each want; `ring`,
and `memory` with a descriptor, when the ring goes on in new memory.
Feeder to worker: `note` with the descriptor of where to say which sample it is at, `target` with a memory's
descriptor, `forget`, `deadly` (a record that nobody is to prepare), `RUN` (target, start, stop); worker to feeder:
`ready` once, `DONE` (target, start, stop, CPU nanoseconds so far), before it `skipped` with the error of each
record that could not be prepared and, where it was given a `cache` with the descriptor of one, `CACHED` (samples
of the run that were read from it, were added to it, were wrong there).
Feeder and link (`pipelines.multinode.link_main`) speak of runs that are here, came or were sent in `MOVED`
(start, stop).
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
LARGEST = 64 * 1024
STRUCT = 64  # no struct is larger

WANT = struct.Struct("<cqq")
READY = struct.Struct("<cq")
RUN = struct.Struct("<cqqq")
DONE = struct.Struct("<cqqqq")
MOVED = struct.Struct("<cqq")
CACHED = struct.Struct("<cqqq")

_OWN = "feeder-"
_LONGEST = 107  # bytes of a socket's path; unix(7)
_DESERTED_S = 60.0
_CALLERS = 4096  # who may call a feeder that still starts: all ranks of a node at once


class Lost(Exception):
    """The peer is gone."""


def pack(kind: str, **said: Any) -> bytes:
    """A JSON message."""
    return json.dumps({"v": VERSION, "kind": kind, **said}).encode()


RING = pack("ring")


def unpack(message: bytes) -> dict[str, Any]:
    """The JSON message; raises `Lost` for the empty one that stands for the peer's end.

    Raises:
        ValueError: it is of another version or no message of ours.
    """
    if not message:
        raise Lost("the peer is gone")
    said = json.loads(message)
    if not isinstance(said, dict) or said.get("v") != VERSION:
        raise ValueError(
            f"a peer speaks version {said.get('v') if isinstance(said, dict) else said!r}, not {VERSION}"
        )
    return said


def receive(connection: socket.socket, largest: int = LARGEST) -> bytes:
    """One message; raises `Lost` when the peer is gone.

    Args:
        largest: bytes of it; more are cut off. `STRUCT` where a struct is awaited: memory for a large message
            costs more than all else here.

    Raises:
        Lost: the peer is gone.
        TimeoutError: nothing came within the socket's timeout, or patience (`set_patience`).
    """
    try:
        message = connection.recv(largest)
    except TimeoutError:
        raise
    except BlockingIOError as error:
        raise TimeoutError from error
    except OSError as error:
        raise Lost(str(error)) from error
    if not message:
        raise Lost("the peer is gone")
    return message


def set_patience(connection: socket.socket, patience_s: float) -> None:
    """Let the kernel give up `receive` after that time: one system call where a Python timeout takes two."""
    seconds, rest = divmod(patience_s, 1)
    connection.settimeout(None)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("@ll", int(seconds), int(rest * 1e6)))


def receive_any(connection: socket.socket) -> tuple[bytes, int | None]:
    """One message and the descriptor that came with it, if one did; raises as `receive` does."""
    try:
        message, descriptors, _, _ = socket.recv_fds(connection, LARGEST, 1)
    except TimeoutError:
        raise
    except BlockingIOError as error:
        raise TimeoutError from error
    except OSError as error:
        raise Lost(str(error)) from error
    if not message:
        raise Lost("the peer is gone")
    return message, descriptors[0] if descriptors else None


def receive_with_descriptor(connection: socket.socket) -> tuple[dict[str, Any], int | None]:
    """A JSON message and the descriptor that came with it, if one did; raises as `receive` does."""
    message, descriptor = receive_any(connection)
    return unpack(message), descriptor


def send(connection: socket.socket, message: bytes, descriptor: int | None = None) -> None:
    """Send one message; raises `Lost` when the peer is gone."""
    try:
        if descriptor is None:
            connection.send(message)
        else:
            socket.send_fds(connection, [message], [descriptor])
    except (ConnectionError, OSError) as error:
        raise Lost(str(error)) from error


def is_struct(message: bytes, form: struct.Struct, letter: bytes) -> bool:
    """Whether a message is the struct `form` marked with `letter`."""
    return len(message) == form.size and message[:1] == letter


_kept_from_children: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def keep_from_children(connection: socket.socket) -> None:
    """Let processes that are forked off this one close their copy of a socket.

    A copy would hold the connection open after this process has died: its peer would never learn of that.
    """
    _kept_from_children.add(connection)


def _close_copies() -> None:
    for connection in list(_kept_from_children):
        connection.close()


os.register_at_fork(after_in_child=_close_copies)


def listen(address: str) -> socket.socket:
    """A listening socket at a path, only for this user; its directory is made with mode 0700.

    Raises:
        PipelineError: another process listens there, or nobody can.
    """
    os.makedirs(os.path.dirname(address) or ".", mode=0o700, exist_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if listening(address):
        listener.close()
        raise PipelineError(f"a feeder is listening at {address} already")
    with contextlib.suppress(FileNotFoundError):
        if stat.S_ISSOCK(os.lstat(address).st_mode):  # left behind by one that was killed
            os.unlink(address)
    try:
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise PipelineError(f"cannot listen at {address}: {error}") from None
    os.chmod(address, 0o600)
    listener.listen(_CALLERS)
    keep_from_children(listener)
    return listener


def listening(address: str) -> bool:
    """Whether some process listens at an address."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
        probe.setblocking(False)
        try:
            probe.connect(address)
        except BlockingIOError:  # it is behind with its callers
            return True
        except OSError:
            return False
    return True


def new_directory() -> str:
    """A new directory for a feeder's socket, among the temporary files; those of killed feeders are cleared away.

    Cleared away is what is this user's, older than a minute, and has nothing in it but a socket at which nobody
    listens.
    """
    root = tempfile.gettempdir()
    if len(os.fsencode(root)) + len(f"/{_OWN}12345678/socket") > _LONGEST:
        log.warning("%s is too long for a socket's path (%d bytes): the feeder's lies in /tmp", root, _LONGEST)
        root = "/tmp"
    for own in glob.glob(os.path.join(glob.escape(root), _OWN + "*")):
        left = os.path.join(own, "socket")
        with contextlib.suppress(OSError):  # of somebody else, or another clears it away at this moment
            found = os.lstat(own)
            if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
                continue
            if time.time() - found.st_mtime < _DESERTED_S or os.listdir(own) != ["socket"]:
                continue
            if stat.S_ISSOCK(os.lstat(left).st_mode) and not listening(left):
                os.unlink(left)
                os.rmdir(own)
    return tempfile.mkdtemp(prefix=_OWN, dir=root)
