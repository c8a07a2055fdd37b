"""How a node is: the free space that its processes need, and its clock beside the controller's.

A thread of its own looks, for a file system that does not answer keeps whoever asks. A node reports each minute;
what is logged of it is what has changed (`is_news`), so that the log of a long run stays small.

The clocks: a message that the controller has sent at `a` by its clock, and that arrives at `b` by the node's, says
that the node's clock is ahead by `b - a` at most; a message to the controller says in the same way by how much at
least. No message is sent for that: the commands and events that there are carry the times.
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
_CLOCK_CHANGE_S = 0.5


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
        found, self._found = self._found, None
        return found

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
    found = {}
    for name, path in places.items():
        with contextlib.suppress(OSError):
            known = os.statvfs(path)
            found[name] = round(known.f_bavail * known.f_frsize / 2**30, 3)
    return found


def settle_clock(report: Report, received: float) -> Report:
    """A report of a node, with the difference of the clocks in place of the times that it is computed from.

    Args:
        report: `sent`: when it was sent, by the node's clock; `ahead_s`: by how much that is ahead at most.
        received: by the controller's clock.
    """
    known = {name: value for name, value in report.items() if name not in ("sent", "ahead_s")}
    if (most := report.get("ahead_s")) is not None:
        least = report["sent"] - received
        known |= {"clock_s": round((most + least) / 2, 3), "clock_error_s": round(abs(most - least) / 2, 3)}
    return known


def is_news(before: NodeHealth | None, report: Report) -> bool:
    """Whether a report says something else than what was logged last."""
    if before is None:
        return True
    free, was = report.get("free_gb", {}), before.free_gb
    if free.keys() != was.keys():
        return True
    if any(min(free[name], was[name]) < _FREE_CHANGE * max(free[name], was[name]) for name in free):
        return True
    clock_s: float | None = report.get("clock_s")
    error_s: float = report.get("clock_error_s") or 0.0
    if clock_s is None or before.clock_s is None:
        return clock_s is not None
    known_s = before.clock_error_s or 0.0
    if known_s > max(_CLOCK_CHANGE_S, 2 * error_s):  # it is known much better now
        return True
    return abs(clock_s - before.clock_s) > _CLOCK_CHANGE_S + error_s + known_s
