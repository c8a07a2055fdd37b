"""An Optuna journal file to which many operations can be appended at once.

Optuna writes each operation by itself (lock, append, fsync(2), read back, unlock: about 0.4 ms). A search with
thousands of reports a second needs batches. Imported only where Optuna is in use.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Generator, Iterator
from typing import Any

from optuna.storages import JournalStorage
from optuna.storages.journal import BaseJournalBackend, JournalFileBackend, JournalFileSymlinkLock


class _File(BaseJournalBackend):
    """The file; during a batch, operations are kept in memory and read back from there."""

    def __init__(self, path: str, grace_period_s: int) -> None:
        self.lock = JournalFileSymlinkLock(path, grace_period=grace_period_s)
        self._path = path
        self._file = JournalFileBackend(path, lock_obj=self.lock)
        self._read = 0  # operations of the file that were read: of these it knows where they lie
        self._kept: list[bytes] | None = None
        self._first = 0  # number in the file of the first that is kept

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        """Append operations; see Optuna."""
        if self._kept is None:
            self._file.append_logs(logs)
        else:
            self._kept += [json.dumps(log, separators=(",", ":")).encode() + b"\n" for log in logs]

    def read_logs(self, log_number_from: int) -> Generator[dict[str, Any], None, None]:
        """The operations from one number on; see Optuna."""
        if self._kept is None or log_number_from < self._first:
            for number, log in enumerate(self._file.read_logs(log_number_from), start=log_number_from):
                self._read = max(self._read, number + 1)
                yield log
        if self._kept is not None:
            yield from (json.loads(line) for line in self._kept[max(0, log_number_from - self._first) :])

    def begin_batch(self) -> None:
        """Keep operations in memory from now on; the file is locked."""
        self._read_all()
        self._kept, self._first = [], self._read

    def write_batch(self) -> None:
        """Append the operations of the batch and sync the file.

        Raises:
            OSError: they could not be written; the file is unchanged.
        """
        lines, self._kept = self._kept or [], None
        if not lines:
            return
        with open(self._path, "ab") as file:
            size = file.tell()
            try:
                file.write(b"".join(lines))
                file.flush()
                os.fsync(file.fileno())
            except OSError:
                os.ftruncate(file.fileno(), size)  # a journal cannot be read after a torn line
                raise
        self._read_all()  # otherwise the next read would begin at the file's first line

    def _read_all(self) -> None:
        for _ in self.read_logs(self._read):
            pass


class Journal(JournalStorage):
    """Optuna's journal in a file, with `batch`.

    Args:
        path: of the file.
        grace_period_s: a lock that is older belongs to a process that was killed.
    """

    def __init__(self, path: str, grace_period_s: int) -> None:
        self._file = _File(path, grace_period_s)
        super().__init__(self._file)

    @contextlib.contextmanager
    def batch(self) -> Iterator[None]:
        """A context in which operations take effect in memory, and are appended to the locked file at its end.

        Raises:
            OSError: they could not be appended; the storage then has the file's content again.
        """
        self._file.lock.acquire()
        try:
            self._file.begin_batch()
            try:
                yield
            finally:
                self._end()
        finally:
            self._file.lock.release()

    def _end(self) -> None:
        try:
            self._file.write_batch()
        except OSError:
            with contextlib.suppress(OSError, ValueError):  # it is read at the next use
                super().__init__(self._file)
            raise
