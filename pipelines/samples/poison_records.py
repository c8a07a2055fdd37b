"""Finds *poison* records, which crash or hang the process that prepares them.

A decoder that crashes ends its process, which then cannot report the record. So each process writes the index of
the sample that it is preparing to memory that outlives it. A record at which several workers of a feeder have died
or hung is poison (`pipelines.workers.worker_pool`): it is not prepared any more and counts as one that cannot be.
A member without a feeder tries it in a process of its own (`pipelines.workers.record_trial`).
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


class PreparationNote:
    """The sample that a process is preparing: two words in a mapped file, which other processes can read.

    Args:
        fd: the file; it may be closed afterwards.
        place: the number of the note within the file.

    Attributes:
        words: the sample's index + 1, or 0 while none is being prepared; its epoch.

    Raises:
        OSError: the file system has no room for the file, or does not support mapping.
    """

    def __init__(self, fd: int, place: int = 0) -> None:
        size = _WORD.size * _WORDS * _NOTES
        os.posix_fallocate(fd, 0, size)  # else a write to a full file system would end the process
        self.words = memoryview(mmap.mmap(fd, size)).cast("q")[_WORDS * place : _WORDS * (place + 1)]

    @property
    def at(self) -> tuple[int, int] | None:
        """Index and epoch of the sample; None while none is being prepared."""
        index, epoch = self.words
        return None if index == 0 else (index - 1, epoch)

    def clear(self) -> None:
        """Record that no sample is being prepared."""
        self.words[0] = 0


def parse_note(file: bytes, place: int) -> tuple[int, int] | None:
    """Index and epoch of a note, from the bytes of its file; None where no sample is being prepared."""
    if len(file) < _WORD.size * _WORDS * (place + 1):
        return None
    index, epoch = (_WORD.unpack_from(file, _WORD.size * (_WORDS * place + word))[0] for word in range(_WORDS))
    return None if index == 0 else (index - 1, epoch)


class PoisonRecords:
    """The poison records of a pipeline that this process knows; all copies of the pipeline share them.

    They are not pickled, because the data may change.

    Attributes:
        codes: index -> KILLED or HUNG.
        suspects: indices that were noted when a worker ended or hung, of samples that may have been computed with
            others (`Pipeline.map_batches`): each sample of such a batch is computed alone, which finds the one.
        note: where the sample in preparation is recorded; None: nowhere.
        reads_alone: whether records are not to be copied many at once: a process has died while it did, of which
            nobody knows at which record.
    """

    def __init__(self) -> None:
        self.codes: dict[int, int] = {}
        self.suspects: set[int] = set()
        self.reads_alone = False
        self.note: PreparationNote | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {"codes": {}, "suspects": set(), "note": None, "reads_alone": False}

    def error(self, index: int, where: str) -> SampleError:
        """The error of a poison record."""
        return SampleError(index, where, _REASONS[self.codes[index]])

    def learn(self, ok: bytes, indices: Any) -> bytes:
        """Record the poison records in a status column.

        Args:
            ok: the status of samples, as in a ring's `_ok`.
            indices: of the same samples.

        Returns:
            The column with poison records marked as failed ones.
        """
        for place, code in enumerate(ok):
            if code in _REASONS:
                self.codes[int(indices[place])] = code
        return ok.translate(_FAILED)


def has_poison(ok: bytes) -> bool:
    """Whether a status column marks any record as poison."""
    return KILLED in ok or HUNG in ok
