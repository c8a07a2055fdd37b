"""Mirrors a search into an Optuna storage, for people and dashboards, from a thread of its own.

Writing to a journal file takes a millisecond. A database may be locked, or its network may be down, and then one
statement takes as long as its driver waits: minutes, for PostgreSQL. Training never waits for it. What could not
be written is written when the storage answers again; the log has everything in any case.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ensemble.search.study import StudyMirror
from ensemble.store import StoreError

if TYPE_CHECKING:
    from optuna.trial import FrozenTrial

_log = logging.getLogger(__name__)

RETRY_S = 10.0
"""Seconds after which a storage that failed is tried again."""

LAST_WAIT_S = 20.0
"""Seconds for which the end of a run waits for a storage that does not answer."""


class Mirror:
    """The mirror of one study.

    Args:
        connect: makes the `StudyMirror`; called again after a failure.
        scrub: removes the password from a driver's message.
    """

    def __init__(self, connect: Callable[[], StudyMirror], scrub: Callable[[str], str]) -> None:
        self._connect, self._scrub = connect, scrub
        self._mirror: StudyMirror | None = None
        self._changed: dict[int, None] = {}
        self._writing: dict[int, None] = {}  # owned by the thread while it runs
        self._thread: threading.Thread | None = None
        self._retry_at = 0.0

    def mark_changed(self, number: int) -> None:
        """Note that a trial has changed; nothing is written yet."""
        self._changed[number] = None

    def open(self, trials: Sequence[FrozenTrial]) -> None:
        """Write all trials in this thread, at the start of a run. A storage that fails is tried again later.

        Raises:
            StoreError: the storage cannot be opened.
        """
        self._changed.clear()
        self._write(trials, None, at_start=True)

    def catch_up(self, trials: Sequence[FrozenTrial], within_s: float | None = None) -> None:
        """Write the trials that have changed.

        Args:
            trials: all trials, by number.
            within_s: about how many seconds the thread may spend on it; this returns at once. None: write
                everything and wait for it, at most `LAST_WAIT_S`.
        """
        last = within_s is None
        until = time.monotonic() + (LAST_WAIT_S if last else 0.0)
        if not self._join(until, warn=last):
            return
        if self._mirror is None and not last and time.monotonic() < self._retry_at:
            return
        self._writing = {**self._writing, **self._changed}
        self._changed.clear()
        if self._mirror is not None and not self._writing:
            return
        self._thread = threading.Thread(
            target=self._write, args=(trials, within_s), name="optuna storage", daemon=True
        )
        self._thread.start()
        if last:
            self._join(until, warn=True)

    def _join(self, until: float, *, warn: bool) -> bool:
        """Wait for the thread until a time (monotonic clock); returns whether it has ended."""
        if self._thread is not None:
            self._thread.join(max(0.0, until - time.monotonic()))
            if self._thread.is_alive():
                if warn:
                    _log.warning("the Optuna storage does not answer; it is behind, and the log has everything")
                return False
            self._thread = None
        return True

    def _write(self, trials: Sequence[FrozenTrial], within_s: float | None, at_start: bool = False) -> None:
        until = None if within_s is None else time.monotonic() + within_s
        try:
            if self._mirror is None:
                mirror = self._connect()
                mirror.sync(trials)
                self._mirror = mirror
                self._writing.clear()
            else:
                self._mirror.catch_up(trials, self._writing, until)
        except Exception as error:  # any error of the database's driver, or Optuna's for a deleted study
            if at_start and isinstance(error, StoreError):
                raise
            line = next(iter(str(error).strip().splitlines()), "") or type(error).__name__
            _log.warning(
                "the Optuna storage is behind: %s; the search goes on, and the log has everything",
                self._scrub(line),
            )
            self._mirror, self._retry_at = None, time.monotonic() + RETRY_S
