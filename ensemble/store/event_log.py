"""Writes the event log: what happened in a run, one JSON object a line, append-only. All else is derived from it.

The types and fields are those of `ensemble.events`. The time `t` is in Unix seconds by the clock when the log was
opened, and goes on from there by a clock that nobody sets; nor is it ever less than before, whoever opens the
log again with whatever clock. So differences of `t` within one start of a run are true durations, and none is
negative. The controller alone writes the log, under an advisory lock (flock(2)). A line counts
once its newline is there: what a dying process or a power failure left torn at the end is dropped on reading and
cut off on opening. It ends with a checksum: a damaged line that others follow is an error. Within one version of
the format, fields and types are only ever added, and a reader ignores what it does not know; a log of another
version is refused.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import tempfile
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ensemble.events as events
from ensemble.events import VERSION, Event, encode_event, make_event, settle
from ensemble.store.files import (
    StoreError,
    format_command,
    fsync_directory,
    make_write_error,
    share_file_with_group,
)
from ensemble.store.log_lines import BATCH_BYTES, add_crc, end_of_events, read_batches

log = logging.getLogger(__name__)

READER_S = 0.001  # for a reader's lock to be gone
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)

#: Events that a power failure must not undo: what a resume would otherwise do again or differently.
DURABLE = (
    *(events.MemberDeclared, events.Checkpoint, events.Finished, events.Pruned, events.Stopped, events.Cancelled),
    *(events.Failed, events.SampleDifference, events.Cost, events.Paused, events.Resumed, events.RequestAnswered),
    *(events.CodeSaved, events.RunStarted, events.Combined, events.RunFinished, events.RunStopped),
)


def encode_line(event: Event, t: float) -> tuple[Event, bytes]:
    """Returns an event as its readers will have it, and its line without the newline.

    Args:
        t: its time, as `EventLog.read_clock` gives it.
    """
    event.v, event.t = VERSION, t
    text = encode_event(event)
    return settle(event, text), add_crc(text)


class EventLog:
    """A run's log, open for appending by one controller.

    Attributes:
        has_locks: whether its file system has the locks of flock(2).

    Raises:
        StoreError: another controller is writing it, its format is newer, or it cannot be written.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path, self.has_locks = Path(path), True
        try:
            self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        except OSError as error:
            raise make_write_error(self.path, error) from None
        try:
            self._lock()
            share_file_with_group(self.path.parent, self._descriptor)
            self._size, last_t = self._cut_torn_end()
            self._ahead_s = max(time.time(), last_t) - time.clock_gettime(time.CLOCK_BOOTTIME)
            fsync_directory(self.path.parent)
        except BaseException:
            self.close()
            raise

    def _lock(self) -> None:
        while True:
            try:
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                pass
            except OSError as error:
                if error.errno not in _NO_LOCKS:
                    raise
                self.has_locks = False
                text = "this file system has no locks (flock); start no second controller"
                warnings.warn(
                    f"{self.path}: {text}, and feeders of several nodes will share nothing", stacklevel=4
                )
                return
            try:  # the shared lock of an `is_locked` call ends within milliseconds
                fcntl.flock(self._descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
                fcntl.flock(self._descriptor, fcntl.LOCK_UN)
            except BlockingIOError:
                raise StoreError(
                    f"{self.path} is being written by another controller; wait for that run to end, stop it with "
                    f"{format_command('stop', self.path.parent)}, or choose another run directory"
                ) from None
            time.sleep(READER_S)

    def _cut_torn_end(self) -> tuple[int, float]:
        """Removes what follows the last whole line. Returns the log's bytes and the time of its last event."""
        size, last_t = os.fstat(self._descriptor).st_size, 0.0
        next(read_batches(self.path), None)  # refused where it is of another version
        since = whole = end_of_events(self.path, size - BATCH_BYTES)
        for batch, offset in read_batches(self.path, since):
            last_t, whole = max(last_t, batch[-1].t), offset
        if whole < size:
            log.info("%s: its last %d bytes are torn, and are cut off", self.path, size - whole)
            os.ftruncate(self._descriptor, whole)
        return whole, last_t

    def append(self, type: str, **fields: Any) -> Event:
        """Writes one event and returns it as it was written.

        NaN and infinities become null.

        Raises:
            StoreError: see `write`.
        """
        event, line = encode_line(make_event(type, **fields), self.read_clock())
        self.write([(event, line)])
        return event

    def write(self, lines: Sequence[tuple[Event, bytes]]) -> None:
        """Writes events that `encode_line` has made, together, with at most one fsync.

        They reach the operating system before this returns, and the disk if the type of one is in `DURABLE`. A
        crash meanwhile leaves the first of them or none, as one between two events would.

        Raises:
            StoreError: they could not be written (disk full); the log is as it was before.
        """
        if not lines:
            return
        data = b"".join(line + b"\n" for _, line in lines)
        try:
            if not os.fstat(self._descriptor).st_nlink:
                raise OSError(errno.ENOENT, "the log was removed while the run goes on")
            written = os.write(self._descriptor, data)
            if written != len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            if any(isinstance(event, DURABLE) for event, _ in lines):
                os.fsync(self._descriptor)
        except OSError as error:
            os.ftruncate(self._descriptor, self._size)
            raise make_write_error(self.path, error, len(data)) from None
        self._size += written

    def read_clock(self) -> float:
        """Returns the `t` of an event that is logged now."""
        return self._ahead_s + time.clock_gettime(time.CLOCK_BOOTTIME)

    def make_event(self, type: str, **fields: Any) -> Event:
        """Returns the event that `append` would write now, without writing it."""
        return encode_line(make_event(type, **fields), self.read_clock())[0]

    def close(self) -> None:
        """Closes the file and releases its lock; harmless when called twice."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> EventLog:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def has_locks(directory: str | os.PathLike[str]) -> bool:
    """Whether files in a directory can be locked by flock(2): on Lustre only where it is mounted with `-o flock`.

    Raises:
        OSError: no file can be made there.
    """
    with tempfile.TemporaryFile(dir=directory) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            return False
    return True


def is_locked(path: str | os.PathLike[str]) -> bool | None:
    """Whether a controller has locked a log; False where there is no log, None where files cannot be locked."""
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
