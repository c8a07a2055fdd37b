"""Which of the leases of a node its members use."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from ensemble.executors.ray.leases import Lease
from ensemble.schedule import Node, Placement
from ensemble.schedule.needs import UNITS

_EPSILON = 1e-6  # cores, and GiB


class Use(NamedTuple):
    """What members take of a node: the ids of GPUs, cores, GiB."""

    devices: frozenset[str | None]
    cpus: float
    memory_gb: float


def list_by_node(placed: Iterable[Placement]) -> Mapping[str, list[tuple[Placement, list[int]]]]:
    """The members on each node, by its name, with their ranks there; a node without members has an empty list."""
    found = defaultdict[str, list[tuple[Placement, list[int]]]](list)
    for placement in placed:
        for name, ranks in placement.ranks_by_node.items():
            found[name].append((placement, ranks))
    return found


def sum_use(placed: Sequence[tuple[Placement, list[int]]], node: Node) -> Use:
    """What members with some of their ranks on a node take of it."""
    needs = [placement.need.take_ranks(len(ranks)) for placement, ranks in placed]
    total = round(node.cpus * UNITS)
    return Use(
        frozenset(placement.devices[rank] for placement, ranks in placed for rank in ranks),
        sum(need.cpus_on(total) for need in needs) / UNITS,
        sum(need.memory for need in needs) / UNITS,
    )


def is_used(lease: Lease, leases: Sequence[Lease], use: Use) -> bool:
    """Whether members need one of a node's leases: its GPUs, or its part of the cores and of the memory."""
    if not use.devices.isdisjoint(lease.devices):
        return True
    return not do_hold([each for each in leases if each is not lease], use)


def do_hold(leases: Sequence[Lease], use: Use) -> bool:
    """Whether leases have the cores and the memory that members take."""
    return (
        use.cpus <= sum(each.cpus for each in leases) + _EPSILON
        and use.memory_gb <= sum(each.memory_gb for each in leases) + _EPSILON
    )
