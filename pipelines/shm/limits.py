"""How much memory can be had: of the machine, and of the control groups (containers, services) of this process.

A control group (cgroups(7), both versions) may be limited, and so may each that it lies in: the least counts. What
a group uses includes the files that were read lately; the kernel gives them up before it refuses memory, so they
count as free, as they do in MemAvailable of proc(5).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

_PROC = Path("/proc")
_GROUPS = Path("/sys/fs/cgroup")
_Form = tuple[str, str, tuple[str, ...]]
# Limit, use and, in memory.stat, what can be given up; of version 2 and of version 1.
_UNIFIED: _Form = ("memory.max", "memory.current", ("active_file", "inactive_file", "slab_reclaimable"))
_LEGACY: _Form = ("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_active_file", "total_inactive_file"))


def available_bytes(proc: Path = _PROC, groups: Path = _GROUPS) -> int:
    """What can be had without swapping and without going over a control group's limit."""
    return min([_of_machine(proc), *(max(0, limit - used) for limit, used in _limits(proc, groups))])


def limit_bytes(proc: Path = _PROC, groups: Path = _GROUPS) -> int:
    """The memory of this machine, or what the control groups leave to all their processes where that is less."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([total, *(limit for limit, _ in _limits(proc, groups))])


def _of_machine(proc: Path) -> int:
    for name, value in _pairs(proc / "meminfo"):
        if name == "MemAvailable:":
            return value * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _limits(proc: Path, groups: Path) -> Iterator[tuple[int, int]]:
    """Limit, and use that cannot be given up, of each control group that holds this process and has a limit."""
    for line in _read(proc / "self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            roots, form = [groups, groups / "unified"], _UNIFIED
        elif "memory" in controllers.split(","):
            roots, form = [groups / "memory"], _LEGACY
        else:
            continue
        for root in roots:
            # In a container the path may be the host's, of which only the root is there to be seen: as its own.
            inside = Path(path.lstrip("/"))
            for group in (inside, *inside.parents) if ".." not in inside.parts else (Path(),):
                yield from _limit(root / group, *form)


def _limit(group: Path, limit_name: str, use_name: str, given_up: tuple[str, ...]) -> Iterator[tuple[int, int]]:
    limit, use = _read(group / limit_name).strip(), _read(group / use_name).strip()
    if limit.isdigit() and use.isdigit():  # no file, or "max": no limit
        cached = sum(value for name, value in _pairs(group / "memory.stat") if name in given_up)
        yield int(limit), max(0, int(use) - cached)


def _pairs(path: Path) -> Iterator[tuple[str, int]]:
    for line in _read(path).splitlines():
        name, value, *_ = line.split()
        yield name, int(value)


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
