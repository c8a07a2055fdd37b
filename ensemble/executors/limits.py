"""Limits the memory of a worker process (`RLIMIT_DATA`), and raises the limit of open descriptors.

An allocation beyond the limit fails in the process that asks, with a traceback. Shared memory does not count. A
limit that was measured, not declared, is raised from outside (prlimit(2)) while the machine has memory free.
"""

from __future__ import annotations

import logging
import resource
from typing import TYPE_CHECKING

from ensemble.meter.memory import data_gb
from pipelines.environment.machine_limits import available_bytes, limit_bytes

if TYPE_CHECKING:
    from ensemble.spec import Ensemble

log = logging.getLogger(__name__)

_RESERVE = 0.1  # of the machine's memory
_RESERVED = 512  # descriptors for libraries, feeders and Ray
_PER_RANK = 4  # descriptors here and in the fork server: both ends of its socket, its pidfd, its log


def limit_memory(granted_gb: float | None, device: str) -> int | None:
    """Limit this process to the memory that it holds now and `granted_gb` more.

    Returns:
        The limit in bytes. None (no limit) if the worker's need is not known, or it trains on a GPU, whose driver
        maps far more memory than it uses.
    """
    if granted_gb is None or device != "cpu":
        return None
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limit = int((data_gb() + granted_gb) * 2**30)
    if hard != resource.RLIM_INFINITY:
        limit = min(limit, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))
    return limit


def raise_memory_limit(pid: int, room_gb: float) -> None:
    """Let a process that has a limit take so much more memory than it holds now; a limit is never lowered."""
    soft, hard = resource.prlimit(pid, resource.RLIMIT_DATA)
    raised = int((data_gb(pid) + room_gb) * 2**30)
    if soft != resource.RLIM_INFINITY and raised > soft and (hard == resource.RLIM_INFINITY or raised <= hard):
        resource.prlimit(pid, resource.RLIMIT_DATA, (raised, hard))


def find_memory_room(processes: int) -> float:
    """What each of so many processes may take beyond its grant, in GiB: together half of what is free of the
    machine, of which a part stays for the system and for others.
    """
    free = available_bytes() - _RESERVE * limit_bytes()
    return max(0.0, free / 2 / max(1, processes)) / 2**30


def raise_descriptor_limit(ensemble: Ensemble) -> int:
    """Raise the soft limit of descriptors to the hard one if a run's ranks may need more; returns the limit.

    The fork server and the feeders inherit it.
    """
    declared = [getattr(member, "workers", None) for member in ensemble.members or ({},)]
    widths = [width or ensemble.resources.workers for width in declared]
    ranks = sum(width if isinstance(width, int) else 1 for width in widths)
    if ensemble.search is not None:
        ranks *= ensemble.search.expected_trials
    needed = _RESERVED + _PER_RANK * ranks
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return soft
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if hard != resource.RLIM_INFINITY and hard < needed:
        text = "%d ranks at once would need %d descriptors, %d are allowed: raise the hard limit (ulimit -Hn)"
        log.info(text, ranks, needed, hard)  # no warning, because they seldom train all at once
    return hard
