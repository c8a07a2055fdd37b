"""Copies the run to an object store: one of its observers."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from ensemble.events import Event
from ensemble.reporting.loggers.base import RunObserver
from ensemble.store import RunDir, StoreError
from ensemble.store.mirror import Copier, TakenOverError
from ensemble.store.mirror_status import MirrorOptions

#: At the end of the run, between two attempts; doubled with each one that fails.
RETRY_S, LONGEST_RETRY_S = 0.5, 30.0


class MirrorFollower(RunObserver):
    """Follows a run as a logger does, but by its files."""

    may_wait = True
    missing = "the mirror is not complete"
    follow_s = 5.0

    def __init__(self, run_dir: RunDir, options: Mapping[str, Any]) -> None:
        self._copier = Copier(run_dir, MirrorOptions(**options))

    def catch_up(self) -> None:
        self._copier.copy()

    def end(self, last: Event | None) -> None:
        """Copy all of the run, which has ended; tries until it is done, or this process is ended.

        Raises:
            TakenOverError: the run is copied from elsewhere.
        """
        pause_s = RETRY_S
        while True:
            try:
                return self._copier.copy(is_last=True)
            except TakenOverError:
                raise
            except (StoreError, OSError):
                time.sleep(pause_s)
                pause_s = min(LONGEST_RETRY_S, 2 * pause_s)

    def lose(self) -> None:
        """Copy what is there: the run's controller is gone."""
        self._copier.copy(is_now=True)
