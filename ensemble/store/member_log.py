"""The log of a member, `log.txt`: everything that its processes print. It is bounded on disk and when it is read.

Any process of a member may hold a descriptor of the file, which leads to the same file under any name. Therefore a
log that has become large is not renamed, and not truncated, by which lines would be lost: while a member runs, the
middle of its log is freed on the disk (fallocate(2), FALLOC_FL_PUNCH_HOLE). What processes append is never
touched, and offsets stay what they are. When the run has ended, a log that is still large is replaced by a plain
file that has its beginning, one line about what is left out, and its end.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

from ensemble.store.regular_files import open_regular

HEAD_BYTES = 2**20
"""Bytes at the beginning of a log that are always kept."""

TAIL_BYTES = 2**24
"""Bytes at the end of a log that are always kept."""

LIMIT_BYTES = 2**26
"""Bytes of a log on the disk from which on its middle is left out."""

CHUNK_BYTES = 2**18

_UNSUPPORTED = (errno.EOPNOTSUPP, errno.ENOSYS)
_LEFT_OUT = "\n({:,} bytes of output are left out here)\n"
_FOUND_LEFT_OUT = re.compile(rb"\n\(([\d,]+) bytes of output are left out here\)\n")

log = logging.getLogger(__name__)

_KEEP_SIZE, _PUNCH_HOLE = 1, 2
_BLOCK_BYTES = 512  # of `st_blocks`, on any file system
_PAGE_BYTES = 4096


def free_middle(path: Path) -> None:
    """Free the middle of a log that takes more than `LIMIT_BYTES` of the disk; processes may write to it.

    Raises:
        OSError: the file cannot be opened, or its file system does not free parts of files.
    """
    if os.stat(path).st_blocks * _BLOCK_BYTES <= LIMIT_BYTES:
        return
    with open(path, "r+b") as file:
        end = (os.fstat(file.fileno()).st_size - TAIL_BYTES) // _PAGE_BYTES * _PAGE_BYTES
        if end <= HEAD_BYTES:
            return
        libc = ctypes.CDLL(None, use_errno=True)
        begin, length = ctypes.c_int64(HEAD_BYTES), ctypes.c_int64(end - HEAD_BYTES)
        if libc.fallocate(file.fileno(), _KEEP_SIZE | _PUNCH_HOLE, begin, length):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), str(path))


class LogBounds:
    """Keeps logs of members that run within their bounds, as far as their file system can."""

    def __init__(self) -> None:
        self._is_supported = True
        self._said = set[int | None]()

    def keep(self, logs: Iterable[Path]) -> None:
        """`free_middle` of each; an error is said once, and what it prevented is tried again at the next call."""
        for path in logs if self._is_supported else ():
            try:
                free_middle(path)
            except (FileNotFoundError, InterruptedError):  # it has printed nothing yet, or a signal came
                continue
            except OSError as error:
                self._is_supported = error.errno not in _UNSUPPORTED
                if error.errno not in self._said:
                    self._said.add(error.errno)
                    log.warning("logs of members can grow without bound %s: %s", self._describe(), error)
                if not self._is_supported:
                    return

    def _describe(self) -> str:
        return "until this passes" if self._is_supported else "while these run"


def shorten(path: Path) -> None:
    """Replace a log larger than `LIMIT_BYTES`, to which nobody writes any more, by what `read_pieces` gives of it.

    Raises:
        OSError: it cannot be read or written.
    """
    with open(path, "rb") as file:
        status = os.fstat(file.fileno())
        if status.st_size <= LIMIT_BYTES:
            return
        written = path.with_suffix(".new")
        with open(written, "wb") as shortened:
            os.fchmod(shortened.fileno(), status.st_mode & 0o777)
            for piece, _ in read_pieces(file):
                shortened.write(piece)
    os.replace(written, path)


def read_pieces(file: BinaryIO, begin: int = 0) -> Iterator[tuple[bytes, int]]:
    """A log from a position on: pieces of at most `CHUNK_BYTES`, and the position after each.

    A log larger than `LIMIT_BYTES` is read without its middle, in whose place there is a line that says so.
    """
    size = os.fstat(file.fileno()).st_size
    end_of_head, tail = (HEAD_BYTES, size - TAIL_BYTES) if size > LIMIT_BYTES else (size, 0)
    while begin < size:
        if end_of_head <= begin < tail:
            yield _LEFT_OUT.format(tail - begin).encode(), tail
            begin = tail
        file.seek(begin)
        data = file.read(min(CHUNK_BYTES, (end_of_head if begin < end_of_head else size) - begin))
        if not data:
            return
        begin += len(data)
        yield data.replace(b"\0", b""), begin  # freed while it is read


def find_position(file: BinaryIO, inode: int, position: int) -> int:
    """Where to read on in a log that was read up to a position, and may have been shortened or replaced since.

    Args:
        inode: of the file that was read.
    """
    status = os.fstat(file.fileno())
    if status.st_ino == inode and position <= status.st_size:
        return position
    file.seek(HEAD_BYTES)
    found = _FOUND_LEFT_OUT.match(file.read(100))
    if found is None:
        return 0  # another log
    if position <= HEAD_BYTES:
        return position
    shift = int(found[1].replace(b",", b"")) - len(found[0])
    return min(status.st_size, max(HEAD_BYTES, position - shift))


def find_last_lines(file: BinaryIO, lines: int) -> int:
    """The position of the last lines of a log, at most `TAIL_BYTES` before its end; read from the end."""
    position = size = os.fstat(file.fileno()).st_size
    missing = lines + 1  # the last line ends with a newline, too
    while position > max(0, size - TAIL_BYTES):
        step = min(CHUNK_BYTES, position)
        position -= step
        file.seek(position)
        data = file.read(step)
        if (found := data.count(b"\n")) >= missing:
            return position + _find_nth_last(data, missing) + 1
        missing -= found
    return position


def _find_nth_last(data: bytes, n: int) -> int:
    at = len(data)
    for _ in range(n):
        at = data.rindex(b"\n", 0, at)
    return at


def read_text(path: Path, lines: int | None = None) -> str:
    """A log as text, "" if there is none: see `read_pieces`.

    Args:
        lines: only so many of the last lines, read from the end; None: all that is kept.
    """
    try:
        with open_regular(path, follows_link=True) as file:
            begin = 0 if lines is None else find_last_lines(file, lines)
            return b"".join(piece for piece, _ in read_pieces(file, begin)).decode(errors="replace")
    except FileNotFoundError:
        return ""
