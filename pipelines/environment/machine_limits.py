"""Reads how much memory and how many cores are available: of the machine, and of this process's control groups
(containers, services, jobs).

A control group (cgroups(7), both versions) may be limited, and so may each that it lies in: the least counts. What
a group uses includes the files that were read lately; the kernel gives them up before it refuses memory, so they
count as free, as they do in MemAvailable of proc(5).

OpenMP pins the main thread to one core as soon as its library is loaded, which importing torch does, if a variable
such as OMP_PROC_BIND says so, and children inherit that. The cores that the process was given are its *places*.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
from collections.abc import Iterator
from pathlib import Path

_PROC = Path("/proc")
_GROUPS = Path("/sys/fs/cgroup")
#: Variables with which OpenMP pins threads to cores: members that share a node would all have the first ones.
PINNING = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY", "KMP_HW_SUBSET")
_UNPINNED = ("", "false", "none", "disabled")
_OPENMP = re.compile(r"/\S*/lib(?:gomp|iomp5|omp)[-.\w]*\.so[.\w]*$", re.MULTILINE)
_Format = tuple[str, str, tuple[str, ...]]
# Limit, use and, in memory.stat, what can be given up; of version 2 and of version 1.
_UNIFIED: _Format = ("memory.max", "memory.current", ("active_file", "inactive_file", "slab_reclaimable"))
_LEGACY: _Format = ("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_active_file", "total_inactive_file"))


def available_bytes(proc: Path = _PROC, groups: Path = _GROUPS) -> int:
    """Bytes available without swapping and within the limits of all control groups."""
    return min([_machine_bytes(proc), *(max(0, limit - used) for limit, used in _group_limits(proc, groups))])


def fits_in_memory(size: int) -> bool:
    """Whether so many bytes may be taken for a long time: at most half of what is available."""
    return 2 * size <= available_bytes()


def limit_bytes(proc: Path = _PROC, groups: Path = _GROUPS) -> int:
    """Bytes of memory of this machine, or the smallest limit of its control groups if that is less."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([total, *(limit for limit, _ in _group_limits(proc, groups))])


def _machine_bytes(proc: Path) -> int:
    for name, value in _read_pairs(proc / "meminfo"):
        if name == "MemAvailable:":
            return value * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def usable_cpus(proc: Path = _PROC, groups: Path = _GROUPS) -> float:
    """Cores that this process may use, or the smallest CPU quota of its control groups if that is less."""
    quotas = []
    for group, is_unified in _list_groups("cpu", proc, groups):
        names = ("cpu.max",) if is_unified else ("cpu.cfs_quota_us", "cpu.cfs_period_us")
        words = " ".join(_read_text(group / name) for name in names).split()
        if len(words) == 2 and all(word.isdigit() and int(word) for word in words):  # "max" and -1: no quota
            quotas.append(int(words[0]) / int(words[1]))
    return min([float(len(allowed_cores())), *quotas])


def allowed_cores() -> set[int]:
    """The numbers of the cores that this process was given, also where OpenMP has pinned this thread to one."""
    cores = os.sched_getaffinity(0)
    for library in _find_openmp() if find_pinning() else ():
        with contextlib.suppress(OSError, AttributeError):
            openmp = ctypes.CDLL(library)
            for place in range(openmp.omp_get_num_places()):
                numbers = (ctypes.c_int * openmp.omp_get_place_num_procs(place))()
                openmp.omp_get_place_proc_ids(place, numbers)
                cores.update(numbers)
    return cores


def free_pinned_thread() -> None:
    """Let this thread, and the processes that it starts, use all cores of the process, if OpenMP has pinned it."""
    if find_pinning():
        with contextlib.suppress(OSError):  # a core was taken from the process meanwhile
            os.sched_setaffinity(0, allowed_cores())


def find_pinning() -> dict[str, str]:
    """The variables of the environment with which OpenMP pins threads to cores."""
    variables = {name: os.environ[name] for name in PINNING if name in os.environ}
    return {name: value for name, value in variables.items() if value.lower() not in _UNPINNED}


def _find_openmp() -> set[str]:
    """The files of the OpenMP libraries that this process has loaded."""
    return set(_OPENMP.findall(_read_text(_PROC / "self/maps")))


def _group_limits(proc: Path, groups: Path) -> Iterator[tuple[int, int]]:
    """Limit, and use that cannot be given up, of each control group that holds this process and has a limit."""
    for group, is_unified in _list_groups("memory", proc, groups):
        yield from _read_limit(group, *(_UNIFIED if is_unified else _LEGACY))


def _list_groups(controller: str, proc: Path, groups: Path) -> Iterator[tuple[Path, bool]]:
    """(directory, whether it is of version 2) of the control groups that hold this process, and hold these."""
    for line in _read_text(proc / "self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            roots = [groups, groups / "unified"]
        elif controller in controllers.split(","):
            roots = list(dict.fromkeys((groups / controllers, groups / controller)))  # "cpu,cpuacct" is one mount
        else:
            continue
        for root in roots:
            # In a container the path may be the host's, of which only the root is there to be seen: as its own.
            inside = Path(path.lstrip("/"))
            for group in (inside, *inside.parents) if ".." not in inside.parts else (Path(),):
                yield root / group, controllers == ""


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
        return path.read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:
        return ""
