"""Reads what a member printed, from its log file, as it grows.

A name in the event log is only a name: it must be one component of a path, and neither the member's directory nor
its file may be a symbolic link, so that no file outside the run directory is read.
"""

from __future__ import annotations

import codecs
import contextlib
import os
import stat
from dataclasses import dataclass
from typing import TYPE_CHECKING, BinaryIO

from ensemble.reporting.text import visible
from ensemble.store.member_log import TAIL_BYTES

if TYPE_CHECKING:
    from ensemble.store.rundir import RunDir

#: Bytes at the end of a log that are shown at first, and of one message.
FIRST_BYTES = CHUNK_BYTES = 2**16


@dataclass(frozen=True)
class Chunk:
    """A piece of a log.

    Attributes:
        begin, end: bytes of the file.
    """

    text: str
    begin: int
    end: int


def open_log(run_dir: RunDir, member: str) -> BinaryIO | None:
    """Opens a member's log; None where there is none, or where it leads elsewhere."""
    if not member or member in (".", "..") or "/" in member or "\0" in member:
        return None
    with contextlib.ExitStack() as stack:
        directory: int | None = None
        try:
            for name in (run_dir.path, "members", member):
                flags = os.O_RDONLY | os.O_DIRECTORY | (0 if directory is None else os.O_NOFOLLOW)
                directory = os.open(name, flags, dir_fd=directory)
                stack.callback(os.close, directory)
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            file = os.fdopen(os.open("log.txt", flags, dir_fd=directory), "rb")
        except (OSError, UnicodeEncodeError):
            return None
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        return None
    return file


def read_chunk(run_dir: RunDir, member: str, begin: int | None) -> Chunk | None:
    """Returns what follows in a member's log; None if nothing does.

    Args:
        begin: byte; None: near the end. A log that has become shorter, and one whose next bytes are left out
            (`ensemble.store.member_log`), is continued near the end.
    """
    file = open_log(run_dir, member)
    if file is None:
        return None
    with file:
        size = os.fstat(file.fileno()).st_size
        if begin is None or begin > size or size - begin > TAIL_BYTES:
            begin = max(0, size - FIRST_BYTES)
            if begin:
                file.seek(begin)
                begin += file.read(FIRST_BYTES).find(b"\n") + 1  # a whole line
        file.seek(begin)
        data = file.read(CHUNK_BYTES)
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    text = decoder.decode(data)
    end = begin + len(data) - len(decoder.getstate()[0])
    if end == begin:
        return None
    return Chunk(visible(text.replace("\r\n", "\n").replace("\r", "\n")), begin, end)
