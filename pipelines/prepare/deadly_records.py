"""Finds *deadly* records, which crash or hang the process that prepares them.

A decoder that crashes ends its process, which then cannot report the record. So each process writes the index of
the sample that it is preparing to memory that outlives it. If it dies or exceeds its time limit, another process
tries that record alone (`pipelines.feeder.record_trial`). If that one does not return either, the record is
deadly: it is not prepared any more and counts as one that cannot be.
"""

from __future__ import annotations

import mmap
import os
import struct
from typing import Any

from pipelines.errors import SampleError

# What a ring's `_ok` says of such a record; `pipelines.prepare.preparer` has what it says of others.
KILLED, HUNG = 4, 8
_REASONS = {
    KILLED: "it ends every process that prepares it (a crash in a decoder or stage, or more memory than there is)",
    HUNG: "its preparation does not end within prepare_timeout_s",
}
_FAILED = bytes(0 if code in _REASONS else code for code in range(256))
_WORD = struct.Struct("q")
_WORDS = 2
_NOTES = 8  # in one file


class Note:
    """Which sample is being prepared: two words in a file, mapped, which whoever has the file can read.

    Args:
        fd: the file; this does not keep it open.
        place: which of the notes in the file.

    Attributes:
        words: index + 1, or 0 while none is being prepared; its epoch.

    Raises:
        OSError: there is no room for the file, or its file system lets nobody map it.
    """

    def __init__(self, fd: int, place: int = 0) -> None:
        size = _WORD.size * _WORDS * _NOTES
        os.posix_fallocate(fd, 0, size)  # to write where a file system has no room for it ends the process
        self.words = memoryview(mmap.mmap(fd, size)).cast("q")[_WORDS * place : _WORDS * (place + 1)]

    @property
    def at(self) -> tuple[int, int] | None:
        """Index and epoch of the sample; None where none is being prepared."""
        index, epoch = self.words
        return None if index == 0 else (index - 1, epoch)

    def clear(self) -> None:
        """No sample is being prepared."""
        self.words[0] = 0


def parse_note(file: bytes, place: int) -> tuple[int, int] | None:
    """What `Note.at` says, from the bytes of its file; None also where the file is shorter."""
    if len(file) < _WORD.size * _WORDS * (place + 1):
        return None
    index, epoch = (_WORD.unpack_from(file, _WORD.size * (_WORDS * place + word))[0] for word in range(_WORDS))
    return None if index == 0 else (index - 1, epoch)


class Hazards:
    """What this process knows of the deadly records of a pipeline; all copies of the pipeline have the same.

    It is not pickled: a pipeline that is kept or handed on says nothing of the data as it was once.

    Attributes:
        deadly: index -> KILLED or HUNG.
        note: where to note what is being prepared; None: nowhere.
    """

    def __init__(self) -> None:
        self.deadly: dict[int, int] = {}
        self.note: Note | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {"deadly": {}, "note": None}

    def error(self, index: int, where: str) -> SampleError:
        """The error of a deadly record."""
        return SampleError(index, where, _REASONS[self.deadly[index]])

    def learn(self, ok: bytes, indices: Any) -> bytes:
        """Take what a memory's `_ok` says of deadly records; returns it with these as any that failed.

        Args:
            indices: of the same samples.
        """
        for place, code in enumerate(ok):
            if code in _REASONS:
                self.deadly[int(indices[place])] = code
        return ok.translate(_FAILED)


def has_deadly(ok: bytes) -> bool:
    """Whether a memory's `_ok` says of any record that it is deadly."""
    return KILLED in ok or HUNG in ok
