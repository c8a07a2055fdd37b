"""Writes files atomically: each is complete or absent.

POSIX `rename` replaces a name atomically, and data is on the disk only after `fsync` of the file *and* of the
directory that names it (rename(2), fsync(2)). So: write beside the target, fsync, rename, fsync the directory.
"""

from __future__ import annotations

import contextlib
import errno
import glob
import json
import os
import pwd
import shlex
import shutil
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from ensemble.store.digests import flush_and_digest
from ensemble.store.errors import OtherPythonError as OtherPythonError
from ensemble.store.errors import StoreError as StoreError
from ensemble.store.errors import WriteError as WriteError

#: What a process that was killed in the middle of a write left behind is swept by a later write after this time.
LEFTOVER_AGE_S = 600.0


def find_other_owner(path: Path) -> str | None:
    """Returns whose a path is, or the directory above it that hides it; None where it is this user's own."""
    for place in (path, *path.absolute().parents):
        with contextlib.suppress(OSError):  # it is hidden by what is above it, or does not exist
            uid = place.lstat().st_uid
            if uid == os.geteuid():
                return None
            try:
                return f"{pwd.getpwuid(uid).pw_name} (uid {uid})"
            except KeyError:  # no such user here
                return f"another user (uid {uid})"
    return None


def make_read_error(path: Path, error: OSError) -> StoreError:
    """Returns the error for a file of a run that cannot be read: why, and whose it is."""
    owner = find_other_owner(path) if isinstance(error, PermissionError) else None
    if owner is not None:
        return StoreError(f"cannot read {path}: the run belongs to {owner}; only they and root may")
    return StoreError(f"cannot read {path}: {error.strerror}")


_FULL = (errno.ENOSPC, errno.EDQUOT)


def fsync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_directory(path: Path, mode: int = 0o755) -> None:
    """Creates a directory of a run and its parents, each with this mode, as far as the umask lets it."""
    if path.is_dir():
        return
    make_directory(path.parent, mode)
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=mode)
        fsync_directory(path.parent)  # else what is flushed in it may be lost with its name


def is_disk_full(error: BaseException) -> bool:
    """Whether the error says that the disk or the user's quota is full."""
    return isinstance(error, OSError) and error.errno in _FULL


def make_write_error(path: Path, error: BaseException, needed_bytes: int | None = None) -> WriteError:
    """Returns the error for a write that failed: why it did, and what to do.

    Args:
        needed_bytes: for which there was no room; None: not known.
    """
    number = error.errno if isinstance(error, OSError) else None
    if is_disk_full(error) or "No space left" in str(error):
        free = shutil.disk_usage(path.parent).free / 2**20 if path.parent.is_dir() else 0.0
        needed = "" if needed_bytes is None else f", {max(needed_bytes / 2**20, 0.1):.1f} MiB needed"
        run = next((folder for folder in path.parents if has_begun(folder)), None)
        retry = "try again" if run is None else f"`ensemble resume {run}`"
        full = WriteError(
            f"cannot write {path}: the disk or quota is full ({free:.1f} MiB free{needed}); make room, "
            f"then {retry}"
        )
        full.is_for_room = True
        return full
    if number in (errno.EACCES, errno.EPERM, errno.EROFS):
        return WriteError(
            f"cannot write {path}: {os.strerror(number)}; choose a run directory that you may write to"
        )
    return WriteError(f"cannot write {path}: {error}")


def has_begun(folder: Path) -> bool:
    """Whether a run directory has a log with anything in it."""
    log = folder / "events.jsonl"
    return log.is_file() and log.stat().st_size > 0


def write_atomically(path: Path, write: Callable[[Path], None], needed_bytes: int | None = None) -> str:
    """Replaces `path` by what `write(temporary)` writes, or leaves it as it was.

    Args:
        needed_bytes: how long it will be, as far as that is known.

    Returns:
        The digest of the file (`ensemble.store.digests`).

    Raises:
        WriteError: it could not be written; nothing is left behind.
    """
    _remove_leftovers(path)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        write(temporary)
        descriptor = os.open(temporary, os.O_RDONLY)
        try:
            digest = flush_and_digest(temporary, descriptor)
        finally:
            os.close(descriptor)
        os.replace(temporary, path)
        fsync_directory(path.parent)
        return digest
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise make_write_error(path, error, needed_bytes) from None
        raise


def write_bytes(path: Path, content: bytes, like: Path | None = None, mode: int = 0o644) -> str:
    """`write_atomically` of bytes.

    Args:
        mode: of the file, as far as the umask lets it; a run directory lets in nobody else by itself.
        like: a file written by root gets the owner of this path.
    """

    def write(temporary: Path) -> None:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        with os.fdopen(descriptor, "wb") as file:
            if like is not None and os.geteuid() == 0:
                owner = os.stat(like)
                os.fchown(descriptor, owner.st_uid, owner.st_gid)
            file.write(content)

    return write_atomically(path, write, len(content))


def write_json(path: Path, value: Any) -> str:
    """`write_atomically` of JSON, indented for people."""
    return write_bytes(path, encode_json(value))


def encode_json(value: Any) -> bytes:
    """A value as `write_json` writes it."""
    text = json.dumps(value).encode()
    with contextlib.suppress(msgspec.DecodeError):  # JSON has no NaN and no infinity: with one it is a single line
        text = msgspec.json.format(text, indent=2)  # json.dumps takes three times as long to indent
    return text + b"\n"


def _remove_leftovers(path: Path) -> None:
    oldest = time.time() - LEFTOVER_AGE_S
    leftovers = list(path.parent.glob(f".{glob.escape(path.name)}.{'[0-9a-f]' * 32}.tmp"))
    if path.suffix == ".safetensors":  # it is written to a file of a random name first; users name no such file
        leftovers += path.parent.glob(".tmp??????")
    for leftover in leftovers:
        try:
            if leftover.stat().st_mtime < oldest:
                leftover.unlink()
        except FileNotFoundError:  # another process swept it
            continue


def format_command(*words: object) -> str:
    """A command of `ensemble` as a shell takes it, in backticks: for messages."""
    return f"`{shlex.join(['ensemble', *map(str, words)])}`"
