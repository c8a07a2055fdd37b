"""The event log: what happened in a run, one JSON object a line, append-only. It is the truth about the run.

Every event has `v` (the version of this format), `t` (Unix seconds) and `type`. The controller alone writes it,
under an advisory lock (flock(2)). A line counts once its newline is there: one that a dying process left torn is
dropped on reading and cut off on opening. Within one version, fields and types are only ever added, and a reader
ignores what it does not know; a log of a newer version is refused.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import math
import os
import time
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ensemble.store.errors import StoreError
from ensemble.store.files import cannot_write, fsync_directory

VERSION = 1

#: Events that a power failure must not undo: what a resume would otherwise do again or differently.
DURABLE = frozenset(("member", "checkpoint", "finished", "pruned", "stopped", "cancelled", "failed")) | frozenset(
    ("paused", "resumed", "asked", "run_started", "combined", "run_finished", "run_stopped")
)


def _plain(value: Any) -> Any:
    """JSON for what is nearly JSON: numpy and torch scalars, arrays, paths, sets."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, set | frozenset):
        return sorted(value)
    for name in ("item", "tolist"):
        convert = getattr(value, name, None)
        if convert is not None and (name == "tolist" or getattr(value, "size", 1) == 1):
            return convert()
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"an event cannot hold {value!r} ({type(value).__name__}); give plain JSON values")


def _finite(value: Any) -> Any:
    """The value with null for each number that JSON has no word for (NaN, infinities)."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value if value is None or isinstance(value, str | int) else _finite(_plain(value))


_encode = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False, allow_nan=False, default=_plain).encode


class EventLog:
    """A run's log, open for appending by one controller.

    Raises:
        StoreError: another controller is writing it, its format is newer, or it cannot be written.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._held: list[bytes] | None = None
        self._durable = False
        try:
            self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        except OSError as error:
            raise cannot_write(self.path, error) from None
        try:
            self._lock()
            self._size = self._cut_torn_line()
            fsync_directory(self.path.parent)
        except BaseException:
            self.close()
            raise

    def _lock(self) -> None:
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise StoreError(
                f"{self.path} is being written by another controller; wait for that run to end, stop it with "
                f"`ensemble stop {self.path.parent}`, or choose another run directory"
            ) from None
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
                raise
            warnings.warn(f"{self.path}: this file system has no locks; start no second controller", stacklevel=3)

    def _cut_torn_line(self) -> int:
        size = os.fstat(self._descriptor).st_size
        content = os.pread(self._descriptor, size, 0) if size else b""
        _, whole = _parse(content, self.path)
        if whole < size:
            os.ftruncate(self._descriptor, whole)
        return whole

    def append(self, type: str, **fields: Any) -> dict[str, Any]:
        """Write one event and hand it back as it was written.

        It reaches the operating system before this returns, and the disk if its type is in `DURABLE`; within
        `together` at the end of that. NaN and infinities become null.

        Raises:
            StoreError: it could not be written (disk full); the log is as it was before.
        """
        event = {"v": VERSION, "t": time.time(), "type": type, **fields}
        try:
            line = _encode(event)
        except ValueError:
            event = _finite(event)
            line = _encode(event)
        self._durable |= type in DURABLE
        if self._held is None:
            self._write(line.encode() + b"\n")
        else:
            self._held.append(line.encode())
        return event

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Within, events are gathered; at the end they are written at once, and put on the disk at most once.

        What is decided from them must not be acted upon before. A crash meanwhile leaves the first of them or
        none, as one between two events would. May be nested: the outermost end counts.

        Raises:
            StoreError: they could not be written; none of them is in the log.
        """
        if self._held is not None:
            yield
            return
        self._held = []
        try:
            yield
        finally:
            held, self._held = self._held, None
            if held:
                self._write(b"\n".join(held) + b"\n")

    def _write(self, data: bytes) -> None:
        durable, self._durable = self._durable, False
        try:
            written = os.write(self._descriptor, data)
            if written != len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            if durable:
                os.fsync(self._descriptor)
        except OSError as error:
            os.ftruncate(self._descriptor, self._size)
            raise cannot_write(self.path, error) from None
        self._size += written

    def close(self) -> None:
        """Give up the file and its lock; harmless when done twice."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> EventLog:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def is_locked(path: str | os.PathLike[str]) -> bool | None:
    """Whether a controller holds a log; False where there is none, None where the file system has no locks."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return None
    finally:
        os.close(descriptor)  # gives the lock back
    return False


def read_events(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """All whole events of a log.

    Raises:
        StoreError: there is no log, a line that is not the last is unreadable, or its format is newer.
    """
    return read_events_from(path, 0)[0]


def read_events_from(path: str | os.PathLike[str], offset: int) -> tuple[list[dict[str, Any]], int]:
    """The whole events from a byte offset on, and the offset to go on from: follows a log that grows.

    Raises:
        StoreError: as `read_events`.
    """
    log = Path(path)
    try:
        with open(log, "rb") as file:
            file.seek(offset)
            content = file.read()
    except FileNotFoundError:
        raise StoreError(f"no run here: {log} does not exist; give a run directory (such as runs/NAME)") from None
    except OSError as error:
        raise StoreError(f"cannot read {log}: {error.strerror}") from None
    events, whole = _parse(content, log)
    return events, offset + whole


def _parse(content: bytes, path: Path) -> tuple[list[dict[str, Any]], int]:
    """Events of whole lines, and how many bytes these take; pure."""
    whole = content.rfind(b"\n") + 1
    lines = content[:whole].split(b"\n")[:-1]
    events: list[dict[str, Any]] = []
    for number, line in enumerate(lines, start=1):
        try:
            event = json.loads(line)
            version = event["v"]
        except (ValueError, KeyError, TypeError):
            if number == len(lines):  # a newline can reach the disk before the blocks that lie before it
                return events, whole - len(line) - 1
            raise StoreError(f"{path}: line {number} is not an event; restore the file from a backup") from None
        if version > VERSION:
            raise StoreError(
                f"{path} was written by a newer ray-ensemble (log format {version}, this one reads {VERSION}); "
                "upgrade ray-ensemble to read it"
            )
        events.append(event)
    return events, whole
