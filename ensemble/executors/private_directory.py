"""Makes private directories for temporary files: mode 0700, with an unpredictable name, locked while in use.

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
_FALLBACK = Path("/tmp")
_LOCK = ".in-use"
_RANDOM = 8  # characters that mkdtemp appends
_HANDOVER_S = 10.0

log = logging.getLogger(__name__)


class PrivateDirectory:
    """A new directory for temporary files; directories that killed processes left are removed.

    Args:
        prefix: of its name.
        room: length in bytes of the longest path of a socket below the directory. If TMPDIR is too long for that,
            the directory is made in /tmp, with a warning. None: no socket lies there.
        clear: called with each directory that was left, before it is removed.

    Raises:
        SpecError: no directory can be made.
    """

    def __init__(
        self,
        prefix: str,
        room: int | None,
        clear: Callable[[Path], object] = lambda stale: None,
    ) -> None:
        self._lock: int | None = None
        try:
            root = _choose_root(0 if room is None else len(prefix) + 1 + _RANDOM + room)
            _remove_stale(root, prefix, clear)
            self._make(root, prefix)
        except OSError as error:
            raise SpecError(f"no private directory can be made: {error}; point TMPDIR to another place") from None

    def _make(self, root: Path, prefix: str) -> None:
        while True:
            self.path = Path(tempfile.mkdtemp(prefix=prefix, dir=root))
            self._lock = _lock(self.path)
            if self.path.exists():  # else another process removed it before it was locked
                return
            self._unlock()

    @property
    def lock(self) -> int | None:
        """The descriptor that holds the lock. A process that inherits it keeps the directory in use."""
        return self._lock

    def close(self) -> None:
        """Remove the directory and all files in it."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._unlock()

    def _unlock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def _choose_root(length: int) -> Path:
    """The directory for temporary files, or /tmp if `length` more bytes are too many for a socket's path."""
    usual = Path(tempfile.gettempdir())
    if not length or len(os.fsencode(usual)) + 1 + length <= LONGEST_SOCKET:
        return usual
    text = "the directory for temporary files, %s, is too long for the paths of sockets (%d bytes): they lie in %s"
    log.warning(text, usual, LONGEST_SOCKET, _FALLBACK)
    return _FALLBACK


def is_in_use(directory: Path) -> bool:
    """Whether another process has locked a private directory, or its file system has no locks."""
    held = _lock(directory, make=False)
    if held is not None:
        os.close(held)
    return held is None and directory.exists()


def remove_stale(prefix: str, clear: Callable[[Path], object] = lambda stale: None) -> None:
    """Remove this user's directories with that prefix that killed processes left, wherever they may lie."""
    for root in {Path(tempfile.gettempdir()), _FALLBACK}:
        _remove_stale(root, prefix, clear)


def _remove_stale(root: Path, prefix: str, clear: Callable[[Path], object]) -> None:
    """Remove this user's directories with that prefix that no process has locked."""
    for stale in root.glob(f"{prefix}*"):
        held = _lock(stale, make=False)
        if held is not None:
            with contextlib.suppress(OSError):  # such as a process in it that this user may not inspect
                clear(stale)
            shutil.rmtree(stale, ignore_errors=True)
            os.close(held)


def _lock(directory: Path, *, make: bool = True) -> int | None:
    """Lock a directory; returns the lock's descriptor or None. `make`: the file, too; waits for a release."""
    until = time.monotonic() + (_HANDOVER_S if make else 0.0)
    try:
        status = directory.lstat()
        if status.st_uid != os.geteuid() or not stat.S_ISDIR(status.st_mode):
            return None
        flags = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | (os.O_CREAT if make else 0)
        descriptor = os.open(directory / _LOCK, flags, 0o600)
    except OSError:
        return None
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return descriptor
        except OSError as error:  # another error on file systems without locks: the directory is left alone
            if not isinstance(error, BlockingIOError) or time.monotonic() >= until:
                os.close(descriptor)
                return None
        time.sleep(0.02)
