"""Shows a search in an Optuna storage, for people and dashboards, from a thread of its own.

A journal file takes a millisecond; a database may be locked by somebody else, or lie behind a network that has
gone, and then one statement takes as long as its driver is patient: minutes, for PostgreSQL. Nobody who trains
waits for that. What could not be written is written when the storage is back; the log has everything anyway.
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
"""How long a storage that failed is left alone."""

LAST_WAIT_S = 20.0
"""How long the end of a run waits for a storage that does not answer."""


class Mirror:
    """One study, brought up to date now and then.

    Args:
        connect: makes the `StudyMirror`; called again after a failure.
        scrub: takes the password out of what a driver says.
    """

    def __init__(self, connect: Callable[[], StudyMirror], scrub: Callable[[str], str]) -> None:
        self._connect, self._scrub = connect, scrub
        self._mirror: StudyMirror | None = None
        self._changed: dict[int, None] = {}
        self._writing: dict[int, None] = {}  # the thread's while there is one
        self._thread: threading.Thread | None = None
        self._retry_at = 0.0

    def changed(self, number: int) -> None:
        """A trial is not what it was; costs nothing."""
        self._changed[number] = None

    def open(self, trials: Sequence[FrozenTrial]) -> None:
        """Write all trials, here and now: at the start of a run, which a storage that is away does not stop.

        Raises:
            StoreError: the storage holds a study of the same name that belongs to another run.
        """
        self._changed.clear()
        self._write(trials, None)

    def catch_up(self, trials: Sequence[FrozenTrial], within_s: float | None = None) -> None:
        """Write what has changed.

        Args:
            trials: all of them, by number.
            within_s: about how much time may be spent on it meanwhile; this returns at once. None: all of it is to
                be written, and this waits for that, but not for a storage that does not answer.
        """
        last = within_s is None
        until = time.monotonic() + LAST_WAIT_S
        if self._thread is not None:
            self._thread.join(LAST_WAIT_S if last else 0)
            if self._thread.is_alive():
                if last:
                    _log.warning("the Optuna storage does not answer; it is behind, and the log has everything")
                return
            self._thread = None
        if self._mirror is None and not last and time.monotonic() < self._retry_at:
            return
        self._writing = {**self._writing, **self._changed}
        self._changed.clear()
        if self._mirror is not None and not self._writing:
            return
        self._thread = threading.Thread(
            target=self._try, args=(trials, within_s), name="optuna storage", daemon=True
        )
        self._thread.start()
        if last:
            self._thread.join(max(0.0, until - time.monotonic()))
            if self._thread.is_alive():
                _log.warning("the Optuna storage does not answer; it is behind, and the log has everything")

    def _try(self, trials: Sequence[FrozenTrial], within_s: float | None) -> None:
        try:
            self._write(trials, within_s)
        except StoreError as error:  # while it was away somebody else took its name
            self._failed(error)

    def _write(self, trials: Sequence[FrozenTrial], within_s: float | None) -> None:
        until = None if within_s is None else time.monotonic() + within_s
        try:
            if self._mirror is None:
                mirror = self._connect()
                mirror.sync(trials)
                self._mirror = mirror
                self._writing.clear()
            else:
                self._mirror.catch_up(trials, self._writing, until)
        except StoreError:
            raise
        except Exception as error:  # whatever the database's driver raises, or Optuna for a study that was deleted
            self._failed(error)

    def _failed(self, error: Exception) -> None:
        line = next(iter(str(error).strip().splitlines()), "") or type(error).__name__
        _log.warning(
            "the Optuna storage is behind: %s; the search goes on, and the log has everything", self._scrub(line)
        )
        self._mirror, self._retry_at = None, time.monotonic() + RETRY_S
