"""An Optuna journal file to which many operations are appended in one go.

Optuna writes each operation by itself: lock, append, fsync(2), read back, unlock; some 0.4 ms. A search whose
trials report thousands of times a second needs them together. Imported only where Optuna is in use.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Generator, Iterator
from typing import Any

from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend, JournalFileSymlinkLock
from optuna.storages.journal._storage import JournalStorageReplayResult


class _File(JournalFileBackend):
    """The file; while it is held, operations are kept in memory and read back from there."""

    def __init__(self, path: str, grace_period_s: int) -> None:
        self.lock = JournalFileSymlinkLock(path, grace_period=grace_period_s)
        super().__init__(path, lock_obj=self.lock)
        self._lines: list[bytes] | None = None
        self._first = 0

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        """Append operations; see Optuna."""
        if self._lines is None:
            super().append_logs(logs)
        else:
            self._lines += [json.dumps(log, separators=(",", ":")).encode() + b"\n" for log in logs]

    def read_logs(self, log_number_from: int) -> Generator[dict[str, Any], None, None]:
        """The operations from one number on; see Optuna."""
        if self._lines is None:
            yield from super().read_logs(log_number_from)
        else:
            yield from (json.loads(line) for line in self._lines[log_number_from - self._first :])

    def hold(self, first: int) -> None:
        """From here on keep operations, the first of which has this number in the file."""
        self._lines, self._first = [], first

    def release(self) -> None:
        """Append what was kept, and put it on the disk.

        Raises:
            OSError: it could not be written; the file is as it was.
        """
        lines, self._lines = self._lines or [], None
        if not lines:
            return
        with open(self._file_path, "ab") as file:
            size = file.tell()
            try:
                file.write(b"".join(lines))
                file.flush()
                os.fsync(file.fileno())
            except OSError:
                os.ftruncate(file.fileno(), size)  # a torn line that is appended to is unreadable for ever
                raise
        for number, line in enumerate(lines, start=self._first):
            self._log_number_offset[number + 1] = self._log_number_offset[number] + len(line)

    def forget(self) -> None:
        """Nothing of the file is known any more."""
        self._log_number_offset = {0: 0}


class Journal(JournalStorage):
    """Optuna's journal in a file, with `together`.

    Args:
        path: of the file.
        grace_period_s: a lock that is older belongs to a process that was killed.
    """

    def __init__(self, path: str, grace_period_s: int) -> None:
        self._file = _File(path, grace_period_s)
        super().__init__(self._file)

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Within, operations take effect here at once; they are appended to the file, which is locked, at the end.

        Raises:
            OSError: they could not be appended; the storage is then what the file says again.
        """
        self._file.lock.acquire()
        try:
            with self._thread_lock:
                self._sync_with_backend()
                self._file.hold(self._replay_result.log_number_read)
            try:
                yield
            finally:
                self._end()
        finally:
            self._file.lock.release()

    def _end(self) -> None:
        try:
            self._file.release()
        except OSError:
            self._replay_result = JournalStorageReplayResult(self._worker_id_prefix)
            self._file.forget()
            raise
