"""Measures the CPU time of processes: of any by its id, and of this one by what it was used for.

A process's CPU time is what the kernel has counted for it in user and in system mode, all threads together. It is
gone when the process is.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from pipelines.ipc.child_processes import read_waited_cpu_s

#: Seconds between two reports of a figure: this share of the age of what reports it, and at most so many.
SHARE, MOST_S = 0.02, 30.0
_SCHEDULED = 2  # of the clocks of a process, the one that its scheduler keeps


def report_interval_s(age_s: float) -> float:
    """Seconds from one report of a figure to the next, so that all that are ever made are few.

    Args:
        age_s: of the run or the process, in seconds.
    """
    return min(MOST_S, SHARE * age_s)


class ReportPace:
    """Says when a figure is reported again.

    Args:
        least_s: seconds between two reports, at least.
        clock: seconds of a clock that does not go back.
    """

    def __init__(self, least_s: float = 0.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._least_s, self._clock = least_s, clock
        self._began = self._next = clock()

    def is_due(self) -> bool:
        """Whether it is reported now; then the next interval begins."""
        now_s = self._clock()
        if now_s < self._next:
            return False
        self._next = now_s + max(self._least_s, report_interval_s(now_s - self._began))
        return True

    def hurry(self) -> None:
        """Have it reported the next time."""
        self._next = self._began


def cpu_seconds(pid: int, *, has_waited: bool = False) -> float | None:
    """User and system time of a process, all its threads; None where there is none.

    Args:
        has_waited: with that of the children that it has waited for.
    """
    import psutil

    try:
        # clock_getcpuclockid(3): in /proc, which psutil reads, both times are rounded down to whole ticks.
        used_s = time.clock_gettime(~pid << 3 | _SCHEDULED)
        times = psutil.Process(pid).cpu_times() if has_waited else None
    except (OSError, psutil.NoSuchProcess, psutil.AccessDenied):
        return None
    return used_s if times is None else float(used_s + times.children_user + times.children_system)


def read_start(pid: int) -> int | None:
    """When a process began, in clock ticks since the machine was booted; None where there is none.

    With it a process id names one process: ids are given out again.
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace", encoding="utf-8")
    except OSError:
        return None
    return int(text[text.rindex(")") + 2 :].split()[19])  # proc(5): field 22, counted behind the name


@cache
def _read_own_start(pid: int) -> int | None:
    return read_start(pid)


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


class CpuClock:
    """CPU time of this process by role.

    Every moment belongs to one role, so that the roles add up to what the kernel has counted of the process since
    the clock began. The count of a role never falls.

    Args:
        whole: count from the beginning of the process, imports included; else from now on. The process of a
            command that drives a run always counts all (`count_whole_process`).
        has_children: count the children that it has waited for as well, but for those with an account of their
            own (`pipelines.ipc.child_processes.reap`): what a member starts is the member's.

    Attributes:
        role: to which time is charged now; "startup" at first.
    """

    def __init__(self, *, whole: bool = False, has_children: bool = False) -> None:
        is_whole, ticks_per_s = whole or _is_command, os.sysconf("SC_CLK_TCK")
        now_s = time.clock_gettime(time.CLOCK_BOOTTIME)
        self._began = (is_whole and read_start(os.getpid())) or int(now_s * ticks_per_s)
        self.role = "startup"
        self._has_children = has_children
        self._at_s = 0.0 if is_whole else self._read_s()
        self._used_s = {self.role: 0.0}
        self._reported_s: dict[str, float] = {}
        self._since = {self.role: time.monotonic() - (now_s - self._began / ticks_per_s)}

    def switch(self, role: str) -> str:
        """Charge the time from now on to a role; returns the one before."""
        self._charge()
        before, self.role = self.role, role
        self._used_s.setdefault(role, 0.0)
        self._since.setdefault(role, time.monotonic())
        return before

    def move(self, role: str, cpu_s: float) -> float:
        """Move seconds from the present role to another, as far as they have not been reported.

        Returns:
            The seconds that were moved.
        """
        self._charge()
        moved = max(0.0, min(cpu_s, self._used_s[self.role] - self._reported_s.get(self.role, 0.0)))
        if moved:
            self._used_s[self.role] -= moved
            self._used_s[role] = self._used_s.get(role, 0.0) + moved
            self._since.setdefault(role, time.monotonic())
        return moved

    def has_news(self, role: str) -> bool:
        """Whether a role has another count than was last reported of it."""
        self._charge()
        return role in self._used_s and self._used_s[role] != self._reported_s.get(role)

    def count(self, role: str) -> float:
        """CPU-seconds of a role, up to the last time that any was charged."""
        return self._used_s.get(role, 0.0)

    def report(self, node: str, role: str, member: str | None = None, rank: int | None = None) -> dict[str, Any]:
        """A `usage` event of a role, with the seconds on the wall (`for_s`) since it was taken on first."""
        self._charge()
        cpu_s = self._reported_s[role] = self.count(role)
        used, now_s = make_usage(node, role, os.getpid(), cpu_s, member, rank, began=self._began), time.monotonic()
        return used if member is not None else {**used, "for_s": now_s - self._since.get(role, now_s)}

    def _charge(self) -> None:
        used_s = max(self._at_s, self._read_s())  # rounded sums may fall
        self._used_s[self.role] += used_s - self._at_s
        self._at_s = used_s

    def _read_s(self) -> float:
        return time.process_time() + (read_waited_cpu_s() if self._has_children else 0.0)


def make_usage(
    node: str,
    role: str,
    pid: int,
    cpu_s: float,
    member: str | None = None,
    rank: int | None = None,
    *,
    began: int | None = None,
) -> dict[str, Any]:
    """A `usage` event: the CPU-seconds that a process has used in a role so far.

    Args:
        began: of the process, by `read_start`; needed where it may have ended, or where its count began later.
    """
    began = began or (_read_own_start(pid) if pid == os.getpid() else read_start(pid))
    who = {"node": node, "role": role, "member": member, "rank": rank, "pid": pid, "began": began}
    return {"type": "usage", **who, "cpu_s": cpu_s, "origin": "measured"}
