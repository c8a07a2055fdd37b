"""Reads the log of a member, `log.txt`: everything that its processes print."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from ensemble.store.regular_files import open_regular

CHUNK_BYTES = 2**18
LARGE_BYTES = 2**26


def read_pieces(file: BinaryIO, begin: int = 0) -> Iterator[tuple[bytes, int]]:
    """A log from a position to its present end: pieces of at most `CHUNK_BYTES`, and the position after each."""
    end = os.fstat(file.fileno()).st_size
    file.seek(begin)
    while piece := file.read(max(0, min(CHUNK_BYTES, end - begin))):
        begin += len(piece)
        yield piece, begin


def find_last_lines(file: BinaryIO, lines: int) -> int:
    """The position of the last lines of a log, read from its end."""
    position = os.fstat(file.fileno()).st_size
    missing = lines + 1  # the last line ends with a newline, too
    while position > 0:
        step = min(CHUNK_BYTES, position)
        position -= step
        file.seek(position)
        data = file.read(step)
        if (newlines := data.count(b"\n")) >= missing:
            at = len(data)
            for _ in range(missing):
                at = data.rindex(b"\n", 0, at)
            return position + at + 1
        missing -= newlines
    return position


def read_text(path: Path, lines: int | None = None) -> str:
    """A log as text, "" if there is none; of more than `LARGE_BYTES` the first MiB and the last 16.

    Args:
        lines: only so many of the last lines; None: all.
    """
    try:
        with open_regular(path, follows_link=True) as file:
            begin, end = 0 if lines is None else find_last_lines(file, lines), os.fstat(file.fileno()).st_size
            is_large = end - begin > LARGE_BYTES
            parts = [(begin, begin + 2**20), (end - 2**24, end)] if is_large else [(begin, end)]
            texts = []
            for first, last in parts:
                file.seek(first)
                texts.append(file.read(last - first).decode(errors="replace"))
            return "\n(the middle is left out here; `ensemble logs` has it)\n".join(texts)
    except FileNotFoundError:
        return ""
