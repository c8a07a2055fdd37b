"""Optuna's journal in a file, to which operations can be appended together; it imports Optuna."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterator
from typing import Any

from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend, JournalFileSymlinkLock


class _File(JournalFileBackend):
    def __init__(self, path: str, grace_period_s: int) -> None:
        super().__init__(path, lock_obj=JournalFileSymlinkLock(path, grace_period_s))
        self.batch: list[dict[str, Any]] | None = None

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        """Append operations, or keep them until the end of the batch."""
        if self.batch is None:
            super().append_logs(logs)
        else:
            self.batch += logs

    def read_logs(self, log_number_from: int) -> Generator[dict[str, Any], None, None]:
        """The operations from one number on; nothing is read in a batch."""
        if self.batch is None:
            yield from super().read_logs(log_number_from)


class Journal(JournalStorage):
    """The journal in a file; a lock older than `grace_period_s` belongs to a process that was killed."""

    def __init__(self, path: str, grace_period_s: int) -> None:
        self._file = _File(path, grace_period_s)
        super().__init__(self._file)

    @contextlib.contextmanager
    def batch(self) -> Iterator[None]:
        """A context that changes trials by one write, at its end; none is created in it, and none is read.

        Raises:
            UpdateFinishedTrialError: one has ended; what the others get is written.
        """
        self._file.batch = []
        try:
            yield
        finally:
            operations, self._file.batch = self._file.batch, None
        if operations:
            self._file.append_logs(operations)
            self.get_all_studies()  # reads them
