"""The free space on a node that its processes need.

A thread of its own looks, for a file system that does not answer keeps whoever asks. A node reports each minute;
what is logged of it is what has changed (`is_news`), so that the log of a long run stays small.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from ensemble.events import Report

if TYPE_CHECKING:
    from ensemble.events import NodeHealth

LOOK_S = 60.0
_FREE_CHANGE = 0.8  # what is free now over what was logged, or the other way round


class HealthWatch:
    """Looks at the free space of a node while a run is on it.

    Args:
        run_dir: None: it is not looked at.
    """

    def __init__(self, run_dir: Path | None) -> None:
        named = {"run directory": run_dir, "/tmp": Path(tempfile.gettempdir()), "/dev/shm": Path("/dev/shm")}
        self._places = {name: path for name, path in named.items() if path is not None}
        self._closed = threading.Event()
        self._found: dict[str, float] | None = None
        self._thread = threading.Thread(target=self._watch, name="health", daemon=True)
        self._thread.start()

    def take(self) -> dict[str, float] | None:
        """What has been found since the last call, GiB by place; None: nothing."""
        free_gb, self._found = self._found, None
        return free_gb

    def close(self) -> None:
        """End the thread, unless a file system keeps it; what it has found can still be taken."""
        self._closed.set()
        self._thread.join(1.0)

    def _watch(self) -> None:
        while True:
            self._found = find_free_gb(self._places)
            if self._closed.wait(LOOK_S):
                return


def find_free_gb(places: Mapping[str, Path]) -> dict[str, float]:
    """GiB that a process of ours can still write to each place; one that is not there is left out."""
    free_gb = {}
    for name, path in places.items():
        with contextlib.suppress(OSError):
            space = os.statvfs(path)
            free_gb[name] = round(space.f_bavail * space.f_frsize / 2**30, 3)
    return free_gb


def is_news(before: NodeHealth | None, report: Report) -> bool:
    """Whether a report says something else than what was logged last."""
    if before is None:
        return True
    free, was = report.get("free_gb", {}), before.free_gb
    if free.keys() != was.keys():
        return True
    return any(min(free[name], was[name]) < _FREE_CHANGE * max(free[name], was[name]) for name in free)
