"""Writes and reads the event log, one JSON object a line, append-only; all else of a run is derived from it.

The controller alone writes it, under an advisory lock (flock(2)). Its times `t` never go back. What a dying
process left torn at the end is cut off; a damaged line that others follow is an error. `ensemble.events` has the
types.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import logging
import os
import shlex
import tempfile
import time
import warnings
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import ensemble.events as events
from ensemble.events import (
    VERSION,
    CodeSaved,
    Event,
    RunStarted,
    decode_event,
    encode_event,
    explain_line,
    make_event,
    settle,
)
from ensemble.store.errors import DamagedError, explain_format
from ensemble.store.files import (
    StoreError,
    format_command,
    fsync_directory,
    make_read_error,
    make_write_error,
)
from ensemble.store.regular_files import open_regular

log = logging.getLogger(__name__)

READER_S = 0.001  # for a reader's lock to be gone
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)

#: Events that a power failure must not undo: what a resume would otherwise do again or differently.
DURABLE = (
    *(events.MemberDeclared, events.Checkpoint, events.Finished, events.Pruned, events.Stopped, events.RunStopped),
    *(events.Failed, events.SampleDifference, events.Cost, events.Paused, events.Resumed, events.RequestAnswered),
    *(events.CodeSaved, events.BaseMade, events.RunStarted, events.Combined, events.RunFinished, events.Cancelled),
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
            self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        except OSError as error:
            raise make_write_error(self.path, error) from None
        try:
            self._lock()
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
                text = "this file system has no locks (flock); do not start a second controller"
                warnings.warn(f"{self.path}: {text}; feeders of several nodes will not share", stacklevel=4)
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


# -- reading ---------------------------------------------------------------------------------------------------

#: Bytes that are read and parsed together.
BATCH_BYTES = 2**20

_CRC = b',"crc":"'


def add_crc(line: bytes) -> bytes:
    """Returns a line with a last field `crc`: the CRC-32 of what stands before it, as eight hexadecimal digits.

    A figure in which a bit has changed may well be JSON: it is known by this alone. Readers leave the field out.
    """
    body = line[:-1]
    return b'%b%b%08x"}' % (body, _CRC, zlib.crc32(body))


def _is_whole(line: bytes) -> bool:
    """Whether a line is as it was written, by its checksum."""
    return line[-18:-10] == _CRC and b"%08x" % zlib.crc32(line[:-18]) == line[-10:-2]


def read_events(path: str | os.PathLike[str]) -> list[Event]:
    """Returns all complete events of a log.

    Raises:
        StoreError: see `read_batches`.
    """
    return [event for batch, _ in read_batches(path) for event in batch]


class SavedFiles(NamedTuple):
    """What a log says of the declarations of its run.

    Attributes:
        files: see `RunState.files`.
        arrays: digest of a declaration -> names of the files in `data` that it is read with, kept or in memory.
        info: what run.json says; empty where that was not logged.
    """

    files: dict[str, list[str]]
    arrays: dict[str, list[str]]
    info: dict[str, Any]


def read_files(path: str | os.PathLike[str]) -> SavedFiles:
    """Returns which files the declarations and the code of a run are, by its log, without reading the rest.

    Raises:
        OSError: it is unreadable.
    """
    saved = SavedFiles({}, {}, {})
    with contextlib.suppress(FileNotFoundError, NotADirectoryError), open(path, "rb") as file:
        for line in file:
            if b'"files":{' in line and _is_whole(line[:-1]) and (event := decode_event(line[:-1])) is not None:
                add_files(saved.files, event)
                if isinstance(event, CodeSaved):
                    saved.info.update(event.info or {})
                    if event.arrays is not None:
                        saved.arrays[event.files["ensemble.pkl"]] = event.arrays
    return saved


def add_files(digests: dict[str, list[str]], event: Event) -> None:
    """Updates the digests of the declaration and the code by an event.

    `code_saved` comes before files are written, so that those of before are as good until a run has begun with the
    new ones, as its `run_started` says.
    """
    if not isinstance(event, RunStarted | CodeSaved):
        return
    if isinstance(event, RunStarted) and event.files:
        digests.clear()
    for name, digest in event.files.items():
        digests[name] = [earlier for earlier in digests.get(name, ()) if earlier != digest] + [digest]


def identify_log(path: str | os.PathLike[str]) -> str:
    """Returns a digest of a log's first line, which has the time and the id of the run.

    It tells a log from another one in its place: a file that is removed and made anew often gets the same inode.

    Raises:
        OSError: there is no log, or it is unreadable.
    """
    with open(path, "rb") as file:
        return hashlib.sha256(file.readline()).hexdigest()


def end_of_events(path: str | os.PathLike[str], before: int | None = None) -> int:
    """Returns the offset behind the last complete line of a log, where its next event will begin.

    Args:
        before: of the lines that end by that byte only.
    """
    with contextlib.suppress(FileNotFoundError), open(path, "rb") as file:
        end = file.seek(0, os.SEEK_END) if before is None else max(0, before)
        while end:
            begin = max(0, end - BATCH_BYTES)
            file.seek(begin)
            newline = file.read(end - begin).rfind(b"\n")
            if newline >= 0:
                return begin + newline + 1
            end = begin
    return 0


def read_batches(path: str | os.PathLike[str], offset: int = 0) -> Iterator[tuple[list[Event], int]]:
    """Yields events in batches that are never empty, each with the offset behind it, from the beginning of a
    line on.

    What follows the last whole line is left out: a process or a machine that died has left it torn.

    Raises:
        DamagedError: a line is damaged, and whole ones follow it; the message names file and line.
        StoreError: there is no log, it cannot be read, it is another program's, or its format is another.
    """
    log, torn = Path(path), b""
    try:
        with open_regular(log, follows_link=True) as file:
            file.seek(offset)
            while block := file.read(BATCH_BYTES):
                end = block.rfind(b"\n") + 1
                if not end:
                    torn += block
                    continue
                lines = (torn + block[: end - 1]).split(b"\n")
                torn = block[end:]
                events = [decode_event(line) if _is_whole(line) else None for line in lines]
                count = events.index(None) if None in events else len(events)
                if whole := cast(list[Event], events[:count]):
                    _check_version(log, next((event.v for event in whole if event.v != VERSION), VERSION))
                    offset += sum(map(len, lines[:count])) + count
                    yield whole, offset
                if count < len(events):
                    _check_tail(log, offset, lines[count:] + (torn + file.read()).split(b"\n")[:-1])
                    return
    except FileNotFoundError:
        raise StoreError(f"no run here: {log} does not exist; give a run directory (such as runs/NAME)") from None
    except OSError as error:
        raise make_read_error(log, error) from None


def _check_version(log: Path, version: int) -> None:
    if version != VERSION:
        raise StoreError(explain_format(log, version, VERSION))


def _check_tail(log: Path, offset: int, lines: Sequence[bytes]) -> None:
    """Raises for lines from the first one on that is no event, unless they are a torn end.

    Args:
        offset: bytes of the log before them.
    """
    _check_version(log, _find_version(lines[0]))
    if not any(map(_is_whole, lines)):
        if offset == 0 and not log.with_name("run.json").exists():
            raise StoreError(f"no run here: {log} is of another program; give a run directory")
        return
    with open(log, "rb") as file:
        number = file.read(offset).count(b"\n") + 1
    why = explain_line(lines[0]) if _is_whole(lines[0]) else "its checksum does not fit"
    raise DamagedError(
        f"{log}, line {number} is damaged: {why}; bring back a copy of the file, or cut it there "
        f"and what came after is done again: `truncate -s {offset} {shlex.quote(str(log))}`"
    )


def _find_version(line: bytes) -> int:
    """The version of the format of a line whose checksum is missing, as other versions have none."""
    try:
        version = json.loads(line)["v"]
    except (ValueError, LookupError, TypeError, RecursionError):
        return VERSION
    return version if isinstance(version, int) else VERSION
