"""Finds which ranks share a host, and groups ranks accordingly.

A **host** here is a network stack: two ranks share one when bytes between them stay in memory. Its key is the
machine's boot id with the inode of the network namespace (network_namespaces(7)), so containers and namespaces
count as hosts of their own, as they are for the network, and a name that two machines share does no harm.
"""

from __future__ import annotations

import contextlib
import itertools
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ensemble.comm.communicator import Communicator

Groups = tuple[tuple[int, ...], ...]


def machine_key() -> str:
    """The boot id and the PID namespace: equal in two processes that see each other in /proc."""
    return f"{_boot()}/{_namespace('pid')}"


def host_key() -> str:
    """The boot id and the network namespace: equal in two processes that share a network stack."""
    return f"{_boot()}/{_namespace('net')}"


def gather_host_keys(comm: Communicator) -> list[str]:
    """The host key of each rank; all ranks call it."""
    import torch

    own = torch.frombuffer(bytearray(host_key().encode()), dtype=torch.uint8)
    return [bytes(key.tolist()).decode() for key in comm.all_gather(own)]


def group_by_host(keys: Sequence[str]) -> Groups:
    """The ranks of each host, by rank, hosts by their first rank.

    Examples:
        >>> group_by_host(["a", "b", "a", "b", "c"])
        ((0, 2), (1, 3), (4,))

    Args:
        keys: the host of each rank.
    """
    hosts: dict[str, list[int]] = {}
    for rank, key in enumerate(keys):
        hosts.setdefault(key, []).append(rank)
    return tuple(tuple(ranks) for ranks in hosts.values())


def split_groups(groups: Groups, size: int | None) -> Groups:
    """Split each group into parts of at most `size` ranks, as equal as possible; a part never spans two hosts.

    Examples:
        >>> split_groups(((0, 2, 4, 6, 8), (1, 3)), 3)
        ((0, 2, 4), (6, 8), (1, 3))

    Args:
        size: None leaves the groups whole.
    """
    if size is None:
        return groups
    parts: list[tuple[int, ...]] = []
    for group in groups:
        number = -(-len(group) // size)
        bounds = [-(-len(group) * part // number) for part in range(number + 1)]
        parts += [group[a:b] for a, b in itertools.pairwise(bounds)]
    return tuple(parts)


def _boot() -> str:
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
    return socket.gethostname()  # not Linux


def _namespace(kind: str) -> str:
    with contextlib.suppress(OSError):
        return str(Path(f"/proc/self/ns/{kind}").stat().st_ino)
    return ""
