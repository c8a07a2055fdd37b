"""Reads what a member printed, from its log file, as it grows.

A name in the event log is only a name: it must be one component of a path, and neither the member's directory nor
its file may be a symbolic link, so that no file outside the run directory is read.
"""

from __future__ import annotations

import codecs
import contextlib
import os
import stat
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, BinaryIO

from ensemble.reporting.text import visible

if TYPE_CHECKING:
    from ensemble.store.rundir import RunDir

#: Bytes at the end of a log that are shown at first, and of one message.
FIRST_BYTES = CHUNK_BYTES = 2**16
#: Of a log whose reader is further behind its end, the bytes between are left out.
MOST_BEHIND_BYTES = 2**24
EXCERPT_LINES = 12
REST_S = 5.0  # without growth, after which a line without an end is shown as it stands


@dataclass(frozen=True)
class Chunk:
    """A piece of a log.

    Attributes:
        text: as it was written; a progress bar that rests has an end of its line.
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


def excerpt(run_dir: RunDir, member: str) -> str:
    """Returns where a member's log says why it failed: of its last traceback, else of its end, some lines."""
    chunk = read_chunk(run_dir, member, None)
    lines = [] if chunk is None else tidy(chunk.text).strip().splitlines()
    begin = max((at for at, line in enumerate(lines) if line.startswith("Traceback (most")), default=None)
    if begin is None:
        return "\n".join(lines[-EXCERPT_LINES:])
    traceback, half = lines[begin:], EXCERPT_LINES // 2
    return "\n".join(
        traceback if len(traceback) <= EXCERPT_LINES else [*traceback[:half], "…", *traceback[-half:]]
    )


def tidy(text: str) -> str:
    """Returns text of a log without noise.

    Control sequences are left out; of a progress bar stays what it showed last, of repeated lines one, with
    `× 12`. Up to three lines that repeat together, as a warning and its source do, count as one.
    """
    lines = [visible(line.rstrip("\r").rpartition("\r")[2]) for line in text.split("\n")]
    tidied, at = list[str](), 0
    while at < len(lines):
        length, many = 1, 1
        for size in (1, 2, 3):
            block, end = lines[at : at + size], at + size
            if not any(block):
                continue  # else each of many empty lines would be compared with all that follow
            while lines[end : end + size] == block:
                end += size
            if (times := (end - at) // size) > 1:
                length, many = size, times
                break
        block = lines[at : at + length]
        tidied += block if many == 1 else [*block[:-1], f"{block[-1]}  (× {many})"]
        at += length * many
    return "\n".join(tidied)


def read_chunk(run_dir: RunDir, member: str, begin: int | None, *, whole_lines: bool = False) -> Chunk | None:
    """Returns what follows in a member's log; None if nothing does.

    Args:
        begin: byte; None: near the end. A log that has become shorter, or much longer, is continued near the end.
        whole_lines: leaves what follows the last line's end for later, until the log has not grown for `REST_S`. A
            progress bar gets an end of its line then: what follows replaces it no more.
    """
    file = open_log(run_dir, member)
    if file is None:
        return None
    with file:
        status = os.fstat(file.fileno())
        size = status.st_size
        if begin is None or begin > size or size - begin > MOST_BEHIND_BYTES:
            begin = max(0, size - FIRST_BYTES)
            if begin:
                file.seek(begin)
                begin += file.read(FIRST_BYTES).find(b"\n") + 1  # a whole line
        file.seek(begin)
        data = file.read(CHUNK_BYTES)
        rests = time.time() - status.st_mtime > REST_S
    if whole_lines and len(data) < CHUNK_BYTES:
        data = data[: data.rfind(b"\n") + 1 or (len(data) if rests else 0)]
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    text = decoder.decode(data)
    end = begin + len(data) - len(decoder.getstate()[0])
    if end == begin:
        return None
    if whole_lines and "\r" in text and "\n" not in text:
        text += "\n"
    return Chunk(text, begin, end)
