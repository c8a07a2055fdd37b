"""What the kernel holds a worker process to.

Memory: `RLIMIT_DATA` of setrlimit(2), which since Linux 4.7 counts private writable mappings along with the heap.
It needs no privilege and no control group (which containers seldom let one make), and what goes over it is refused
in the process that asks: an error with a traceback, and nothing happens to the neighbours. Shared memory does not
count, nor what was inherited from the fork server; a ring mapped privately raises the limit (`pipelines.mapping`).
"""

from __future__ import annotations

import resource

from ensemble.meter.memory import data_gb


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
