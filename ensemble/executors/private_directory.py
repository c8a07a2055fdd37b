"""Makes private directories for sockets: mode 0700, with an unpredictable name, locked while in use.

A predictable name would let another user create the directory first. Directories of killed processes, of any run,
are recognized by the prefix of their name and by the lock file in them that no process holds any more (flock(2)).
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from ensemble.spec import SpecError

LONGEST_SOCKET = 107  # bytes of a path; unix(7)
FALLBACK = Path("/tmp")
_LOCK = ".in-use"
_RANDOM = 8  # characters that mkdtemp appends
_HANDOVER_S = 10.0

log = logging.getLogger(__name__)


class PrivateDirectory:
    """A new directory among the temporary files; those like it that killed processes left are removed.

    Args:
        prefix: of its name.
        room: bytes that the longest path of a socket in it takes beyond the directory's own. Where the directory
            for temporary files is too long for that, it lies in /tmp, and that is said.
        clear: called with each directory that was left, before it is removed.
        takes_over: the path of one whose process has ended, and which is used on under its name.

    Raises:
        SpecError: there is none to be had.
    """

    def __init__(
        self,
        prefix: str,
        room: int,
        clear: Callable[[Path], object] = lambda left: None,
        takes_over: Path | None = None,
    ) -> None:
        self._lock: int | None = None
        try:
            if takes_over is not None:
                self._take_over(takes_over)
                return
            root = choose_socket_root(len(prefix) + 1 + _RANDOM + room)
            remove_stale(root, prefix, clear)
            self._make(root, prefix)
        except OSError as error:
            raise SpecError(
                f"no directory for sockets can be made: {error}; point TMPDIR to another place"
            ) from None

    def _make(self, root: Path, prefix: str) -> None:
        while True:
            self.path = Path(tempfile.mkdtemp(prefix=prefix, dir=root))
            self._lock = lock(self.path)
            if self.path.exists():  # else it was taken to be left behind before it was locked
                return
            self._unlock()

    def _take_over(self, path: Path) -> None:
        self.path = path
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=0o700)
        found = path.lstat()
        if found.st_uid != os.geteuid() or found.st_mode & 0o077 or not stat.S_ISDIR(found.st_mode):
            raise SpecError(f"{path} is not a directory of yours alone (mode 0700); remove it")
        self._lock = lock(path)

    def close(self) -> None:
        """Remove it with all that is in it."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._unlock()

    def _unlock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def choose_socket_root(length: int) -> Path:
    """Where temporary files lie, or /tmp where `length` more bytes would be too many for a socket's path."""
    usual = Path(tempfile.gettempdir())
    if len(os.fsencode(usual)) + 1 + length <= LONGEST_SOCKET:
        return usual
    log.warning(
        "the directory for temporary files, %s, is too long for the paths of sockets (at most %d bytes): "
        "they lie in %s",
        *(usual, LONGEST_SOCKET, FALLBACK),
    )
    return FALLBACK


def remove_stale(root: Path, prefix: str, clear: Callable[[Path], object]) -> None:
    """Remove this user's directories of that beginning that no process holds any more."""
    for left in root.glob(f"{prefix}*"):
        held = lock(left, make=False)
        if held is not None:
            with contextlib.suppress(OSError):  # such as a process in it that this user may not look at
                clear(left)
            shutil.rmtree(left, ignore_errors=True)
            os.close(held)


def lock(directory: Path, *, make: bool = True) -> int | None:
    """A descriptor that keeps a directory of this user's locked; None where another process does, or none can.

    Args:
        make: whether it is to be locked by this process for its use: what is not there yet is made, and one that
            is just letting go is waited for.
    """
    until = time.monotonic() + (_HANDOVER_S if make else 0.0)
    try:
        found = directory.lstat()
        if found.st_uid != os.geteuid() or not stat.S_ISDIR(found.st_mode):
            return None
        flags = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | (os.O_CREAT if make else 0)
        descriptor = os.open(directory / _LOCK, flags, 0o600)
    except OSError:
        return None
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return descriptor
        except OSError as error:  # another than this on file systems without locks: what lies there is left alone
            if not isinstance(error, BlockingIOError) or time.monotonic() >= until:
                os.close(descriptor)
                return None
        time.sleep(0.02)
