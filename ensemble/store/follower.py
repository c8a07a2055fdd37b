"""Follows the log of a run while it grows, and notices that another log has taken its place."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

from ensemble.events import Event
from ensemble.store.errors import StoreError
from ensemble.store.event_log import read_batches
from ensemble.store.files import make_read_error
from ensemble.store.rundir import RunDir

#: At the beginning of a log and before the offset: they tell whether it still is the log that was read. The first
#: line has the time and the id of the run; a file that is removed and made anew often gets the same inode.
MARK_BYTES = 512

#: Device, inode, size in bytes and time of the last change in nanoseconds.
Stamp = tuple[int, int, int, int]


class LogReplacedError(StoreError):
    """The log that was followed has been replaced or cut."""


class LogFollower:
    """Reads what is new in a log.

    Attributes:
        offset: bytes that have been read; the beginning of a line.

    Args:
        offset: where to begin; the beginning of a line.
    """

    def __init__(self, run_dir: RunDir, offset: int = 0) -> None:
        self.offset = offset
        self._path = run_dir.events
        self._stamp: Stamp | None = None
        self._mark = (0, b"")  # an offset, and its `_read_mark`

    def read(self) -> Iterator[tuple[list[Event], int]]:
        """Yields the new events in batches that are never empty, each with the offset behind it.

        Raises:
            LogReplacedError: another log has taken the place of the one that was read, or that was cut. The next
                call begins with the present log.
            StoreError: there is no log, or it is unreadable.
        """
        try:
            stamp = find_stamp(self._path)
            is_replaced = self._is_replaced(stamp)
        except FileNotFoundError:
            next(read_batches(self._path), None)  # says so
            return
        except OSError as error:
            raise make_read_error(self._path, error) from None
        if is_replaced:
            self.offset, self._stamp, self._mark = 0, None, (0, b"")
            raise LogReplacedError(f"another log has taken the place of {self._path}, or it was cut")
        if stamp == self._stamp:
            return
        for batch in read_batches(self._path, self.offset):
            self.offset = batch[1]
            yield batch
        self._stamp = stamp
        self._mark = self.offset, _read_mark(self._path, self.offset)

    def _is_replaced(self, stamp: Stamp) -> bool:
        """Whether the present file is not the log that was read."""
        if self._stamp is None or stamp == self._stamp:
            return False
        is_other = stamp[:2] != self._stamp[:2] or stamp[2] < self.offset
        return is_other or _read_mark(self._path, self._mark[0]) != self._mark[1]


def find_stamp(path: Path) -> Stamp:
    """Returns what tells a file, and whether it has changed.

    Raises:
        OSError: it is unreadable.
        StoreError: it is not a regular file.
    """
    # It is opened, as on NFS that alone shows what another machine has written; a named pipe is not waited for.
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        status = os.fstat(file.fileno())
    if not stat.S_ISREG(status.st_mode):
        raise StoreError(f"{path} is not a regular file")
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _read_mark(path: Path, offset: int) -> bytes:
    """The first bytes of a log, and the last ones before an offset."""
    with open(path, "rb") as file:
        first = file.read(min(MARK_BYTES, offset))
        file.seek(max(0, offset - MARK_BYTES))
        return first + file.read(min(MARK_BYTES, offset))
