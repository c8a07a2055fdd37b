"""Files that are whole or absent.

POSIX `rename` replaces a name atomically, and data is on the disk only after `fsync` of the file *and* of the
directory that names it (rename(2), fsync(2)). So: write beside the target, fsync, rename, fsync the directory.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ensemble.store.errors import WriteError

#: What a process that was killed in the middle of a write left behind is swept by a later write after this time.
LEFTOVER_AGE_S = 600.0

_FULL = (errno.ENOSPC, errno.EDQUOT)


def fsync_directory(path: Path) -> None:
    """Put a directory's names on the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def no_room(error: BaseException) -> bool:
    """Whether this is the disk, or the user's quota, being full."""
    return isinstance(error, OSError) and error.errno in _FULL


def cannot_write(path: Path, error: BaseException) -> WriteError:
    """The one line for a write that failed: why, and what to do."""
    number = error.errno if isinstance(error, OSError) else None
    if no_room(error) or "No space left" in str(error):
        free = shutil.disk_usage(path.parent).free / 2**20 if path.parent.is_dir() else 0.0
        return WriteError(
            f"cannot write {path}: the disk or quota is full ({free:.0f} MiB free); make room, then resume"
        )
    if number in (errno.EACCES, errno.EPERM, errno.EROFS):
        return WriteError(
            f"cannot write {path}: {os.strerror(number)}; choose a run directory that you may write to"
        )
    return WriteError(f"cannot write {path}: {error}")


def write_atomically(path: Path, write: Callable[[Path], None]) -> None:
    """Give `path` the content that `write(temporary)` writes, or leave it as it was.

    Raises:
        WriteError: it could not be written; nothing is left behind.
    """
    _sweep(path)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        write(temporary)
        descriptor = os.open(temporary, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.replace(temporary, path)
        fsync_directory(path.parent)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise cannot_write(path, error) from None
        raise


@contextlib.contextmanager
def pinned(path: str | os.PathLike[str]) -> Iterator[str]:
    """A name for the file that `path` is now, whatever `path` is replaced by meanwhile.

    For libraries that take a name and open it more than once (safetensors does: header, then data), which would
    mix two versions of a file that is renamed over in between. Linux: proc_pid_fd(5).
    """
    with open(path, "rb") as file:
        yield f"/proc/self/fd/{file.fileno()}"


def write_bytes(path: Path, content: bytes) -> None:
    """`write_atomically` of bytes, readable by the user only."""

    def write(temporary: Path) -> None:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)

    write_atomically(path, write)


def write_json(path: Path, value: Any) -> None:
    """`write_atomically` of JSON, indented for people."""
    write_bytes(path, (json.dumps(value, indent=2) + "\n").encode())


def _sweep(path: Path) -> None:
    oldest = time.time() - LEFTOVER_AGE_S
    # The second are safetensors' own: it writes to a file of a random name beside the one that it was given.
    for leftover in (*path.parent.glob(f".{path.name}.*.tmp"), *path.parent.glob(".tmp??????")):
        try:
            if leftover.stat().st_mtime < oldest:
                leftover.unlink()
        except FileNotFoundError:  # another process swept it
            continue
