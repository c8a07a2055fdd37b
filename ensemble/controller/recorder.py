"""What happens in a run, put on record: thinned, logged, folded, told to whoever listens, kept as a snapshot."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

from ensemble.controller.thinning import Thinning
from ensemble.store import EventLog, RunDir, RunState, RunStatus, StoreError, apply_event

log = logging.getLogger(__name__)

KEEP_EVERY_S = 5.0  # the log is looked at whether it has grown by a snapshot's worth


class Record:
    """The run's log and the state that is its fold.

    Args:
        lock: held while the state changes.
        on_event: called with each event of the log after it has been folded.
    """

    def __init__(
        self,
        run_dir: RunDir,
        events: EventLog,
        state: RunState,
        lock: threading.RLock,
        on_event: Callable[[dict[str, Any]], None] | None,
    ) -> None:
        self._events, self._state, self._lock, self._on_event = events, state, lock, on_event
        self._thinning, self._status = Thinning(time.monotonic()), RunStatus(run_dir)
        self._keep_at = 0.0

    def emit(self, kind: str, **fields: Any) -> None:
        """Something has happened; figures that come every second may be logged later, or within a later one."""
        for event in self._thinning.take({"type": kind, **fields}, time.monotonic()):
            self._append(event)

    def tick(self, now: float) -> None:
        """Log what was held back for long enough."""
        for event in self._thinning.due(now):
            self._append(event)
        if now >= self._keep_at:
            self._keep_at = now + KEEP_EVERY_S
            self.keep()

    def flush(self) -> None:
        """Log all that was held back."""
        for event in self._thinning.rest():
            self._append(event)

    def keep(self) -> None:
        """Write a snapshot where the log has grown so much that it is worth it."""
        try:
            self._status.save_if_grown()
        except (StoreError, OSError) as error:  # it is a cache: the run goes on without
            log.warning("no snapshot of the log is kept: %s", error)

    def _append(self, fields: dict[str, Any]) -> None:
        event = self._events.append(**fields)
        with self._lock:
            apply_event(self._state, event)
        if self._on_event is not None:
            try:
                self._on_event(event)
            except Exception:
                log.exception("on_event failed and is not called any more")
                self._on_event = None
