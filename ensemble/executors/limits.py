"""Limits the memory of a worker process, and raises the limit of open descriptors.

Memory: `RLIMIT_DATA` of setrlimit(2), which since Linux 4.7 counts private writable mappings along with the heap.
It needs no privilege and no control group (which containers seldom allow). An allocation beyond it fails in the
process that asks, with a traceback, and does not affect other processes. Shared memory and what was inherited from
the fork server do not count; a ring that is mapped privately raises the limit (`pipelines.shm.private_mapping`).

Descriptors: the usual soft limit of 1024 is for programs that call select(2), which nothing here does.
"""

from __future__ import annotations

import logging
import resource
from typing import TYPE_CHECKING

from ensemble.meter.memory import data_gb

if TYPE_CHECKING:
    from ensemble.spec import Ensemble

log = logging.getLogger(__name__)

_RESERVED = 512  # descriptors for all else: libraries, feeders, Ray
_PER_RANK = 4  # here and in the fork server: its socket, while it starts both ends, its pidfd, its log


def limit_memory(granted_gb: float | None, device: str) -> int | None:
    """Hold this process to what it holds now and `granted_gb` more; the limit in bytes, None where there is none.

    There is none where nothing is known of its needs, and on a GPU: the driver maps far more than is ever used.
    """
    if granted_gb is None or device != "cpu":
        return None
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limit = int((data_gb() + granted_gb) * 2**30)
    if hard != resource.RLIM_INFINITY:
        limit = min(limit, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))
    return limit


def raise_descriptor_limit(ensemble: Ensemble) -> int:
    """Raise the soft limit of descriptors to the hard one where a run's ranks may need more; the limit now.

    Processes that are started from here on inherit it: the fork server and the feeders need as many.
    """
    asked = [getattr(member, "workers", None) for member in ensemble.members or ({},)]
    widths = [width or ensemble.resources.workers for width in asked]
    ranks = sum(width if isinstance(width, int) else 1 for width in widths)
    if ensemble.search is not None:
        ranks *= ensemble.search.trials
    needed = _RESERVED + _PER_RANK * ranks
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return soft
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if hard != resource.RLIM_INFINITY and hard < needed:
        log.info(  # they seldom train all at once; who finds no descriptor says so
            "%d ranks at once would need %d descriptors, %d are allowed: raise the hard limit (ulimit -Hn)",
            ranks,
            needed,
            hard,
        )
    return hard
