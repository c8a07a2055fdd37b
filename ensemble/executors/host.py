"""Describes the resources of this host: cores, memory, GPUs and network interfaces."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ensemble.schedule.needs import Node
from pipelines.environment.machine_limits import limit_bytes, usable_cpus

_VMSTAT = Path("/proc/vmstat")


#: The part of a node's memory that the rings of its feeders may take. As any shared memory it counts in the limit
#: of the control group (a pod's, a job's).
RINGS_SHARE = 1 / 16


def describe_host(
    name: str, *, places: int | None = None, power: Mapping[str, Any] | None = None, feeds: bool = False
) -> Node:
    """This host as a node: the cores and memory that this process may use, and all GPUs it sees.

    Args:
        feeds: whether feeders may run here: what their rings may take is not offered.
    """
    from ensemble.meter.devices import list_gpus, share_by_slices

    gpus = list_gpus()

    return Node(
        name=name,
        cpus=usable_cpus(),
        gpus=tuple(gpu.model for gpu in gpus),
        memory_gb=limit_bytes() / 2**30 * (1 - RINGS_SHARE if feeds else 1),
        host=socket.gethostname(),
        places=places,
        power=power or {},
        gpu_memory_gb=tuple(gpu.memory_gb for gpu in gpus),
        gpu_ids=tuple(gpu.id for gpu in gpus),
        gpu_parents=tuple(gpu.parent for gpu in gpus),
        gpu_shares=share_by_slices(gpus),
    )


def find_interface(address: str) -> str | None:
    """The network interface of this host with that IP address; None if there is none."""
    import psutil

    interfaces = psutil.net_if_addrs().items()
    return next(
        (str(name) for name, addresses in interfaces if address in [one.address for one in addresses]), None
    )


def count_oom_kills() -> int:
    """How often the kernel has killed a process for lack of memory since the start; 0 if unknown."""
    for line in _read(_VMSTAT).splitlines():
        name, _, value = line.partition(" ")
        if name == "oom_kill":
            return int(value)
    return 0


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""
