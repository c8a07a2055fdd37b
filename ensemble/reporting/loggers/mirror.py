"""Mirrors the run to an object store, in a process like that of a logger."""

from __future__ import annotations

import contextlib
import resource
import time
from collections.abc import Mapping
from typing import Any, ClassVar

from ensemble.events import Event
from ensemble.store import RunDir, StoreError
from ensemble.store.mirror import FencedError, MirrorOptions, MirrorWriter

#: At the end of the run, between two attempts; doubled with each one that fails.
RETRY_S, LONGEST_RETRY_S = 0.5, 30.0


class MirrorFollower:
    """Follows a run as a logger does, but by its files."""

    may_wait: ClassVar[bool] = True
    missing: ClassVar[str] = "the mirror is not complete"
    follow_s: ClassVar[float] = 5.0
    longest_retry_s: ClassVar[float] = 60.0

    def __init__(self, run_dir: RunDir, options: Mapping[str, Any]) -> None:
        self._writer = MirrorWriter(run_dir, MirrorOptions(**options))
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))

    @classmethod
    def identify(cls, options: Mapping[str, Any]) -> dict[str, Any]:
        """Nothing: how far it is, the mirror says."""
        return {}

    def catch_up(self) -> None:
        """Copy what is new."""
        self._writer.sync()

    def end(self, last: Event | None) -> None:
        """Copy all of the run, which has ended; tries until it is done, or this process is ended.

        Raises:
            FencedError: another start of the run has taken over.
        """
        pause_s = RETRY_S
        while True:
            try:
                return self._writer.sync(is_last=True)
            except FencedError:
                raise
            except (StoreError, OSError):
                time.sleep(pause_s)
                pause_s = min(LONGEST_RETRY_S, 2 * pause_s)

    def lose(self) -> None:
        """Copy what is there: the run's controller is gone."""
        self._writer.sync()


LOGGER = MirrorFollower
