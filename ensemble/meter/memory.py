"""Measures the host memory that this process alone holds: what its exit would free.

The kernel tells private pages (`smaps_rollup`) at a moment only, and the highest moment of all resident pages
(`VmHWM`), so peak = unique now + (highest resident - resident now). See proc_pid_smaps(5), proc_pid_status(5).
Pages that nobody has written to are a file's (`Recipe.base`, a library): cache of the system, not this process's.
"""

from __future__ import annotations

import contextlib
import gc
import os
import resource
from collections.abc import Collection
from pathlib import Path

from pipelines.environment.machine_limits import available_bytes

_PROC = Path("/proc/self")
_IN_MEMORY = ("/memfd:", "/dev/shm/")


def peak_memory_gb() -> float:
    """The most that this process has held for itself since it began, or since `reset_peak_memory`, in GiB.

    Where the kernel does not tell shared pages apart (before Linux 4.14, some sandboxes) they are counted, too.
    """
    resident = _kilobytes("status", "VmRSS:")
    highest = _kilobytes("status", "VmHWM:")
    try:
        unique = _kilobytes("smaps_rollup", "Private_Dirty:")
    except OSError:
        unique = resident
    return (unique + max(0, highest - resident)) / 2**20


def data_gb(process: int | None = None) -> float:
    """What counts for RLIMIT_DATA of setrlimit(2): address space of a process to write in privately, in GiB.

    Args:
        process: its id; None: this one.
    """
    return _kilobytes("status", "VmData:", process=process) / 2**20


def describe_memory() -> str:
    """What this process holds and may hold, and what the machine has free, for the message of one that ran out."""
    limit, _ = resource.getrlimit(resource.RLIMIT_DATA)
    most = "" if limit == resource.RLIM_INFINITY else f" of at most {limit / 2**30:.3g}"
    free_gb = available_bytes() / 2**30
    return f"the process has reserved {data_gb():.3g} GiB{most}, and {free_gb:.3g} GiB of the machine are free"


class PeakMemory:
    """The process's peak memory, read anew only after growth: the kernel walks all pages for it, about 4 ms."""

    def __init__(self) -> None:
        self._gb, self._highest = 0.0, 0

    def gb(self) -> float:
        highest = _kilobytes("status", "VmHWM:")
        if highest > self._highest * 1.01:
            self._gb, self._highest = peak_memory_gb(), highest
        return self._gb


def reset_peak_memory() -> None:
    """Restarts the peak from the present use; without effect where the kernel does not permit it."""
    with contextlib.suppress(OSError):
        (_PROC / "clear_refs").write_text("5", encoding="utf-8")


def release_memory() -> None:
    """Collects garbage, and returns to the system what glibc keeps; without effect with another C library."""
    import ctypes

    gc.collect()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)


def tree_memory_gb(pid: int) -> float | None:
    """What a process and those that it started hold for themselves now, in GiB; None if it cannot be read."""
    import psutil

    try:
        pids = [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]
        held = [_kilobytes("smaps_rollup", "Private_Dirty:", process=process) for process in pids]
    except (psutil.Error, OSError):
        return None
    return sum(held) / 2**20


def held_memory_gb(root: int, others: Collection[int] = ()) -> float | None:
    """What processes hold together now, in GiB; None where the kernel does not tell (before Linux 5.4).

    Pages that several of them map count once. Page cache does not count, memory that they share does: a feeder's
    ring, files in /dev/shm, also where none of them maps a page of it at the moment.

    Args:
        root: process id of one that counts with all that it started.
        others: process ids of more of them, without what those have started.
    """
    import psutil

    with contextlib.suppress(psutil.Error):
        others = {root, *others, *(child.pid for child in psutil.Process(root).children(recursive=True))}
    private = mapped = 0
    files: dict[tuple[int, int], int] = {}
    for pid in others:
        with contextlib.suppress(OSError):  # it has ended
            private += _kilobytes("smaps_rollup", "Pss_Anon:", process=pid)
            mapped += _kilobytes("smaps_rollup", "Pss_Shmem:", process=pid)
            files |= _list_shared_files(pid)
    if not private:
        return None
    return (private + max(mapped, sum(files.values()) // 1024)) / 2**20


def _list_shared_files(pid: int) -> dict[tuple[int, int], int]:
    """The memory in bytes of each file in memory that a process has open, by device and inode."""
    sizes = {}
    for entry in os.scandir(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):  # it was closed
            if os.readlink(entry.path).startswith(_IN_MEMORY):
                status = os.stat(entry.path)
                sizes[status.st_dev, status.st_ino] = status.st_blocks * 512
    return sizes


def _kilobytes(file: str, *names: str, process: int | None = None) -> int:
    folder = _PROC if process is None else Path(f"/proc/{process}")
    lines = [line.split() for line in (folder / file).read_text(encoding="utf-8").splitlines()]
    return sum(int(words[1]) for words in lines if words and words[0] in names)
