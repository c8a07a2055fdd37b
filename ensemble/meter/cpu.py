"""Measures the CPU time of a process, of a process tree, and of many processes as `usage` events.

A process's CPU time is what the kernel has counted for it in user and in system mode, all threads together,
in steps of 10 ms on Linux. It is gone when the process is: the sampler therefore keeps the last value it saw.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


def cpu_seconds(pid: int) -> float | None:
    """User and system time of a process, all its threads, without its children; None where there is none."""
    import psutil

    try:
        times = psutil.Process(pid).cpu_times()
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return None
    return float(times.user + times.system)


def tree_cpu_seconds(pid: int) -> float | None:
    """CPU time of a process and of all its descendants, also of those that have ended and been waited for.

    A descendant whose parent died before it has another parent now, and counts no more.
    """
    import psutil

    try:
        root = psutil.Process(pid)
        members = [root, *root.children(recursive=True)]
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return None
    total = 0.0
    for process in members:
        try:
            # One file a process; a child's time moves into its parent's children_* when it is waited for.
            times = process.cpu_times()
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
        total += times.user + times.system + times.children_user + times.children_system
    return total


def clocks() -> tuple[float, float, float]:
    """Seconds: on the wall, of this process on cores, and of this thread ready to run while others had them.

    The last is 0 from a kernel without scheduler statistics (proc(5), /proc/pid/schedstat).
    """
    try:
        with open("/proc/thread-self/schedstat", encoding="ascii") as file:
            queued_ns = int(file.read().split()[1])
    except (OSError, IndexError):
        queued_ns = 0
    return time.perf_counter(), time.process_time(), queued_ns / 1e9


class CpuClock:
    """CPU time of this process, all threads, to the nanosecond.

    Example:
        >>> clock = CpuClock()
        >>> clock.lap() >= 0.0
        True
    """

    def __init__(self) -> None:
        self._start = self._last = time.process_time()

    @staticmethod
    def total() -> float:
        """CPU-seconds since the process began, imports included."""
        return time.process_time()

    def seconds(self) -> float:
        """CPU-seconds since this clock was made."""
        return time.process_time() - self._start

    def lap(self) -> float:
        """CPU-seconds since the last lap, or since this clock was made."""
        last, self._last = self._last, time.process_time()
        return self._last - last


Owner = tuple[str, str | None, int | None]  # role, member, rank


@dataclass
class _ProcessUsage:
    """CPU time of one process in one role: what it has used above `base_s` of its own count.

    That is since `since` of the monotonic clock. `before_s` is what the same process used in the same role
    earlier, for whomever.
    """

    pid: int
    owner: Owner
    process: Any
    since: float
    base_s: float = 0.0
    cpu_s: float = 0.0
    before_s: float = 0.0

    def update(self, read: Callable[[int], float | None]) -> bool:
        """Read the process's time; False when it is gone."""
        # is_running compares start times, so that a pid given to another process is not taken for this one.
        seconds = read(self.pid) if self.process.is_running() else None
        if seconds is not None:
            self.cpu_s = max(self.cpu_s, seconds - self.base_s)
        return seconds is not None


class Sampler:
    """CPU time of the given processes, as fields of `usage` events.

    A process counts in one role at a time, from its first second on (but see `since`); `watch` with another
    role closes the account of the old one, which keeps what it has. Of a process that ended, the last value seen
    is kept.

    Example:
        >>> import os
        >>> sampler = Sampler("local", {os.getpid(): ("train", "member-0", 0)})
        >>> sampler.sample()[0]["role"]
        'train'
    """

    def __init__(
        self,
        node: str,
        processes: Mapping[int, Owner] | None = None,
        *,
        tree: bool = False,
        since: float = 0.0,
    ) -> None:
        """Begin.

        Args:
            node: its name, as in the events.
            processes: pid -> (role, member, rank).
            tree: whether each counts with all its descendants.
            since: unix time; a process older than this counts from when it is first watched.
        """
        self.node = node
        self._since = since
        self._read = tree_cpu_seconds if tree else cpu_seconds
        self._open: dict[int, _ProcessUsage] = {}
        self._closing: list[_ProcessUsage] = []  # ended since the last sample, still to be reported
        self._closed: dict[Owner, float] = {}
        self._spent: dict[Any, dict[str, float]] = {}  # of processes that changed: by role
        self.watch(processes or {})

    def watch(self, processes: Mapping[int, Owner]) -> None:
        """Add processes, or change what they count as; those not named stay as they are."""
        import psutil

        for pid, owner in processes.items():
            account = self._open.get(pid)
            if account is not None and not account.update(self._read):
                self._closing.append(self._open.pop(pid))  # the pid is another process's now, or nobody's
                account = None
            if account is None:
                try:
                    process = psutil.Process(pid)
                except psutil.NoSuchProcess:
                    continue  # it ended before it could be looked at: nothing is known of it
                began, now = process.create_time(), time.monotonic()
                since = now - max(0.0, time.time() - began)
                account = self._open[pid] = _ProcessUsage(pid, owner, process, since)
                if began < self._since and account.update(self._read):
                    self._open[pid] = _ProcessUsage(pid, owner, process, since=now, base_s=account.cpu_s)
            elif account.owner != owner:
                self._closing.append(account)
                spent = self._spent.setdefault(account.process, {})
                spent[account.owner[0]] = account.before_s + account.cpu_s
                self._open[pid] = _ProcessUsage(
                    pid,
                    owner,
                    account.process,
                    since=time.monotonic(),
                    base_s=account.base_s + account.cpu_s,
                    before_s=spent.get(owner[0], 0.0),
                )

    def sample(self) -> list[dict[str, Any]]:
        """Fields of one `usage` event a process and role, with how long it has had the role, since when (unix).

        `cpu_s` is cumulative over all that the process has done in that role, for whichever member. What
        ended since the last sample, or changed its role, is reported once more with its last value.
        """
        for pid, account in list(self._open.items()):
            if not account.update(self._read):
                self._closing.append(self._open.pop(pid))
        events = [self._fields(account) for account in [*self._closing, *self._open.values()]]
        for account in self._closing:
            self._closed[account.owner] = self._closed.get(account.owner, 0.0) + account.cpu_s
        self._closing = []
        return events

    def totals(self) -> dict[Owner, float]:
        """CPU-seconds by (role, member, rank) as of the last sample, those of ended processes included."""
        sums = dict(self._closed)
        for account in [*self._closing, *self._open.values()]:
            sums[account.owner] = sums.get(account.owner, 0.0) + account.cpu_s
        return sums

    def _fields(self, account: _ProcessUsage) -> dict[str, Any]:
        role, member, rank = account.owner
        for_s = time.monotonic() - account.since
        return {
            "node": self.node,
            "role": role,
            "member": member,
            "rank": rank,
            "pid": account.pid,
            "cpu_s": account.before_s + account.cpu_s,
            "origin": "measured",
            "since": time.time() - for_s,
            "for_s": for_s,
        }
