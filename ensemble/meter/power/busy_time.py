"""Finds whose CPU time can be seen from here: that of the whole host, or of this container only.

``/proc/stat`` covers the host, also in most containers. With lxcfs or in gVisor it does not: then it is the
container's, from ``cpu.stat`` (cgroup v2) or ``cpuacct.usage`` (v1), which is right for the estimate, and
unknown beside a source of the host.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from ensemble.meter.power.common import Absent

PROC = Path("/proc")
CGROUP = Path("/sys/fs/cgroup")
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_BUSY = (0, 1, 2, 5, 6)  # user, nice, system, irq, softirq; guests' time is contained in user and nice


@dataclass(frozen=True)
class BusyTime:
    """CPU-seconds of all processes of a scope, without idling, waiting and stolen time.

    Attributes:
        scope: whose they are.
        file: where they are read.
        read: returns them, since some moment. Raises `OSError` where the file cannot be read.
    """

    scope: Literal["host", "container"]
    file: Path
    read: Callable[[], float]


def find_busy_time(proc: Path = PROC, cgroup: Path = CGROUP) -> BusyTime | Absent:
    """The widest scope of which the CPU time can be read."""
    stat = proc / "stat"
    shown = _sum_stat(stat, range(8))
    if shown and not _is_lxcfs(proc):
        return BusyTime("host", stat, lambda: _read_stat(stat, _BUSY))
    for name, read_usage in _USAGE.items():
        file = cgroup / name
        try:
            read_usage(file)
        except (OSError, ValueError):
            continue
        return BusyTime("container", file, partial(read_usage, file))
    if shown:
        return BusyTime("container", stat, lambda: _read_stat(stat, _BUSY))
    return Absent("CPU time", f"{stat} shows none, and {cgroup} no cpu.stat (v2) or cpuacct.usage (v1)")


def _is_lxcfs(proc: Path) -> bool:
    """Whether lxcfs is mounted over the file stat of proc."""
    try:
        mounts = (proc / "self" / "mountinfo").read_text(encoding="utf-8")
    except OSError:
        return False
    return any(_is_mount_of_lxcfs(line) for line in mounts.splitlines())


def _is_mount_of_lxcfs(line: str) -> bool:
    mount, _, kind = line.partition(" - ")
    return mount.split()[4:5] == ["/proc/stat"] and "lxcfs" in kind


def _sum_stat(stat: Path, columns: range) -> float:
    try:
        return _read_stat(stat, columns)
    except (OSError, ValueError):
        return 0.0


def _read_stat(stat: Path, columns: range | tuple[int, ...]) -> float:
    with open(stat, "rb") as file:
        ticks = file.readline().split()[1:]
    return sum(int(ticks[column]) for column in columns if column < len(ticks)) / _TICKS_PER_S


def _read_usage_usec(file: Path) -> float:
    for line in file.read_text(encoding="utf-8").splitlines():
        name, _, value = line.partition(" ")
        if name == "usage_usec":
            return int(value) / 1e6
    raise ValueError(f"{file} has no line usage_usec")


def _read_usage_ns(file: Path) -> float:
    return int(file.read_text(encoding="utf-8")) / 1e9


_USAGE: dict[str, Callable[[Path], float]] = {
    "cpu.stat": _read_usage_usec,
    "cpuacct/cpuacct.usage": _read_usage_ns,
    "cpu,cpuacct/cpuacct.usage": _read_usage_ns,
}
