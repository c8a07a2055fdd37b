"""Reads how much memory is available: of the machine, and of this process's control groups (containers, services).

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
_Format = tuple[str, str, tuple[str, ...]]
# Limit, use and, in memory.stat, what can be given up; of version 2 and of version 1.
_UNIFIED: _Format = ("memory.max", "memory.current", ("active_file", "inactive_file", "slab_reclaimable"))
_LEGACY: _Format = ("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_active_file", "total_inactive_file"))


def available_bytes(proc: Path = _PROC, groups: Path = _GROUPS) -> int:
    """Bytes available without swapping and within the limits of all control groups."""
    return min([_machine_bytes(proc), *(max(0, limit - used) for limit, used in _group_limits(proc, groups))])


def limit_bytes(proc: Path = _PROC, groups: Path = _GROUPS) -> int:
    """Bytes of memory of this machine, or the smallest limit of its control groups if that is less."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([total, *(limit for limit, _ in _group_limits(proc, groups))])


def _machine_bytes(proc: Path) -> int:
    for name, value in _read_pairs(proc / "meminfo"):
        if name == "MemAvailable:":
            return value * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _group_limits(proc: Path, groups: Path) -> Iterator[tuple[int, int]]:
    """Limit, and use that cannot be given up, of each control group that holds this process and has a limit."""
    for line in _read_text(proc / "self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            roots, format_ = [groups, groups / "unified"], _UNIFIED
        elif "memory" in controllers.split(","):
            roots, format_ = [groups / "memory"], _LEGACY
        else:
            continue
        for root in roots:
            # In a container the path may be the host's, of which only the root is there to be seen: as its own.
            inside = Path(path.lstrip("/"))
            for group in (inside, *inside.parents) if ".." not in inside.parts else (Path(),):
                yield from _read_limit(root / group, *format_)


def _read_limit(
    group: Path, limit_name: str, use_name: str, reclaimable: tuple[str, ...]
) -> Iterator[tuple[int, int]]:
    limit, use = _read_text(group / limit_name).strip(), _read_text(group / use_name).strip()
    if limit.isdigit() and use.isdigit():  # no file, or "max": no limit
        cached = sum(value for name, value in _read_pairs(group / "memory.stat") if name in reclaimable)
        yield int(limit), max(0, int(use) - cached)


def _read_pairs(path: Path) -> Iterator[tuple[str, int]]:
    for line in _read_text(path).splitlines():
        name, value, *_ = line.split()
        yield name, int(value)


def _read_text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
