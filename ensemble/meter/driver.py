"""Measures the CPU time of the process that drives a run.

A command's process works for its run alone: all that it uses counts, its imports included. In a program of the
user's own, only what is used from the run's beginning on is known to be the run's.
"""

from __future__ import annotations

import os
import time
from typing import Any

_whole = False


def count_whole_process() -> None:
    """Charges a run that this process drives for all of its CPU time, imports included: for a process that is a
    command.
    """
    global _whole
    _whole = True


class DriverClock:
    """The driver's CPU time: role ``startup`` until the run has begun, then ``orchestrate``."""

    def __init__(self) -> None:
        import psutil

        self._began = time.monotonic()
        self._base_s = time.process_time()
        if _whole:
            self._began -= max(0.0, time.time() - psutil.Process().create_time())
            self._base_s = 0.0

    def begin(self, node: str) -> dict[str, Any]:
        """Returns the fields of the `usage` event for the start of the run, with its duration (`for_s`).

        Args:
            node: where the driver runs.
        """
        now, used_s = time.monotonic(), time.process_time() - self._base_s
        fields = _fields(node, "startup", used_s, now - self._began)
        self._began, self._base_s = now, self._base_s + used_s
        return fields

    def sample(self, node: str, elsewhere_s: float = 0.0) -> dict[str, Any]:
        """Fields of a `usage` event: what it has used since.

        Args:
            elsewhere_s: CPU-seconds of this process that were a member's.
        """
        used_s = max(0.0, time.process_time() - self._base_s - elsewhere_s)
        return _fields(node, "orchestrate", used_s, time.monotonic() - self._began)


def _fields(node: str, role: str, cpu_s: float, for_s: float) -> dict[str, Any]:
    who = {"node": node, "role": role, "member": None, "rank": None, "pid": os.getpid()}
    return {**who, "cpu_s": cpu_s, "origin": "measured", "for_s": for_s}
