"""Which ranks share a host.

A **host** here is a network stack: two ranks share one when bytes between them stay in memory. Its key is the
machine's boot id with the inode of the network namespace (network_namespaces(7)), so containers and namespaces
count as hosts of their own, as they are for the network, and a name that two machines share does no harm.
"""

from __future__ import annotations

import contextlib
import socket
from pathlib import Path


def machine_key() -> str:
    """The same in two processes that see each other in /proc: the boot id and the PID namespace."""
    return f"{_boot()}/{_namespace('pid')}"


def host_key() -> str:
    """The same in two processes that share a network stack: the boot id and the network namespace."""
    return f"{_boot()}/{_namespace('net')}"


def _boot() -> str:
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return socket.gethostname()  # not Linux


def _namespace(kind: str) -> str:
    with contextlib.suppress(OSError):
        return str(Path(f"/proc/self/ns/{kind}").stat().st_ino)
    return ""
