"""Measures the CPU time of processes: of any by its id, and of the one that drives a run.

A process's CPU time is what the kernel has counted for it in user and in system mode, all threads together, in
steps of 10 ms on Linux. It is gone when the process is.
"""

from __future__ import annotations

import os
import time
from typing import Any

#: Seconds between two reports of a figure: this share of the age of what reports it, and at most so many.
SHARE, MOST_S = 0.02, 30.0


def report_interval_s(age_s: float) -> float:
    """Seconds from one report of a figure to the next, so that all that are ever made are few.

    Args:
        age_s: of the run or the process, in seconds.
    """
    return min(MOST_S, SHARE * age_s)


def cpu_seconds(pid: int) -> float | None:
    """User and system time of a process, all its threads, without its children; None where there is none."""
    import psutil

    try:
        times = psutil.Process(pid).cpu_times()
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return None
    return float(times.user + times.system)


def read_clocks() -> tuple[float, float, float]:
    """Seconds: on the wall, of this process on cores, and of this thread ready to run while others had them.

    The last is 0 from a kernel without scheduler statistics (proc(5), /proc/pid/schedstat).
    """
    try:
        with open("/proc/thread-self/schedstat", encoding="ascii") as file:
            queued_ns = int(file.read().split()[1])
    except (OSError, IndexError):
        queued_ns = 0
    return time.perf_counter(), time.process_time(), queued_ns / 1e9


_is_command = False


def count_whole_process() -> None:
    """Charges a run that this process drives for all of its CPU time, imports included: for a command's process.

    In a program of the user's own, only what is used from the run's beginning on is known to be the run's.
    """
    global _is_command
    _is_command = True


class DriverClock:
    """CPU time of the process that drives a run: role ``startup`` until it has begun, then ``orchestrate``."""

    def __init__(self) -> None:
        import psutil

        self._began = time.monotonic()
        self._base_s = time.process_time()
        if _is_command:
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
