"""Decides which resources a run asks Ray for: pure functions of the members that wait and of what nodes have free.

Ray gives out whole GPUs, and the run packs members inside them. A request is for one placement group:

- one GPU, on any node, with the cores and memory of the members that share it; so many GPUs of one node for a
  member with as many workers. What finds no room now stays pending: for that an autoscaler adds nodes.
- cores and memory of members that train on the CPU: on a named node as far as that node has them free now, else
  one request a member, on any node. A pending request for a named node is demand that no new node can serve.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ensemble.schedule import Node
from ensemble.schedule.needs import UNITS, Need, compute_need
from ensemble.spec import Identity

MOST_PENDING = 64  # requests beside each other that no node has room for
_EPSILON = 1e-4  # Ray counts in ten-thousandths


class Bundle(NamedTuple):
    """Resources on one node: `copies` times so many cores, bytes of memory and, if `on_gpu`, one GPU."""

    cpus: float
    memory: int
    on_gpu: bool = False
    copies: int = 1

    def as_resources(self) -> list[dict[str, float]]:
        """The bundles of a placement group."""
        each: dict[str, float] = {"CPU": self.cpus, "memory": self.memory, "GPU": float(self.on_gpu)}
        return [{name: amount for name, amount in each.items() if amount}] * self.copies


class Request(NamedTuple):
    """A bundle, on the node with that id of Ray's; None: on any node."""

    bundle: Bundle
    ray_id: str | None = None


class Offer(NamedTuple):
    """A node of the cluster.

    Attributes:
        ray_id: Ray's id of it.
        node: with all that Ray could ever give of it.
        free: what nobody holds now, as Ray names it: CPU, memory in bytes, GPU.
    """

    ray_id: str
    node: Node
    free: Mapping[str, float]


def plan_requests(waiting: Sequence[Identity], offers: Sequence[Offer], devices: str) -> Counter[Request]:
    """The requests that give all waiting members a place, as far as the nodes could hold them.

    Args:
        waiting: members beside those for which the run holds resources already.
        devices: "auto", "cpu" or "cuda".
    """
    needs = Counter(compute_need(identity) for identity in waiting)
    widest = max((len(offer.node.gpus) for offer in offers), default=0) if devices != "cpu" else 0
    on_gpus = {need: n for need, n in needs.items() if _trains_on_gpu(need, widest, devices)}
    on_cores = {need: n for need, n in needs.items() if need not in on_gpus}
    found = _request_gpus(on_gpus, offers) + _request_cores(on_cores, offers)
    return _limit_pending(found)


def _trains_on_gpu(need: Need, widest: int, devices: str) -> bool:
    """Whether a member trains on GPUs, as `ensemble.schedule.packing` decides it."""
    return devices == "cuda" or (
        devices == "auto" and widest > 0 and (need.requires_gpu or need.workers <= widest)
    )


def _request_gpus(needs: Mapping[Need, int], offers: Sequence[Offer]) -> Counter[Request]:
    """Requests for members that train on GPUs: first-fit decreasing, the ranks of each on one node."""
    groups: list[_GpuGroup] = []
    for need in sorted(needs, key=lambda need: (need.workers, need.share, need), reverse=True):
        for _ in range(needs[need]):
            group = next((group for group in groups if group.has_room(need)), None)
            if group is None and len(groups) >= MOST_PENDING:
                break
            if group is None:
                group = _GpuGroup(need.workers)
                groups.append(group)
            group.add(need)
    nodes = [offer.node for offer in offers if offer.node.gpus]
    return Counter(Request(group.as_bundle(nodes)) for group in groups)


@dataclass
class _GpuGroup:
    """GPUs of one node, each with room for one rank of each member in it; amounts are of one GPU, in `UNITS`."""

    width: int
    share: int = UNITS
    cpus: int = 0
    memory: int = 0
    largest_cpus: int = 0
    largest_memory: int = 0

    def has_room(self, need: Need) -> bool:
        return need.workers == self.width and need.share <= self.share

    def add(self, need: Need) -> None:
        cpus, memory = need.cpus // need.workers, need.memory // need.workers
        self.share -= need.share
        self.cpus, self.memory = self.cpus + cpus, self.memory + memory
        self.largest_cpus, self.largest_memory = max(self.largest_cpus, cpus), max(self.largest_memory, memory)

    def as_bundle(self, nodes: Sequence[Node]) -> Bundle:
        """The bundle; no more than a GPU's part of a node's cores and memory, but enough for each member alone.

        Members that find too few cores are placed on more GPUs.
        """
        cpus, memory = self.cpus / UNITS, self.memory / UNITS * 2**30
        part_cpus = min((node.cpus / len(node.gpus) for node in nodes), default=math.inf)
        part_memory = min((node.memory_gb / len(node.gpus) * 2**30 for node in nodes), default=0.0)
        cpus = min(cpus, max(part_cpus, self.largest_cpus / UNITS))
        cpus = min(cpus, max((node.cpus / self.width for node in nodes), default=math.inf))
        memory = min(memory, max(part_memory, self.largest_memory / UNITS * 2**30)) or part_memory
        return Bundle(_floor(cpus), int(memory), on_gpu=True, copies=self.width)


def _request_cores(needs: Mapping[Need, int], offers: Sequence[Offer]) -> Counter[Request]:
    """Requests for members that train on the CPU: what nodes have free, then one request for each member left."""
    found, left = Counter[Request](), dict(sorted(needs.items(), reverse=True))
    for offer in sorted(offers, key=lambda offer: bool(offer.node.gpus)):
        cpus, memory = offer.free.get("CPU", 0.0), offer.free.get("memory", 0.0)
        total, per_core = round(offer.node.cpus * UNITS), memory / cpus if cpus else 0.0
        taken_cpus = taken_memory = 0.0
        for need in left:
            each_cpus, each_memory = need.cpus_on(total) / UNITS, need.memory / UNITS * 2**30
            room = _count_room(cpus - taken_cpus, each_cpus, memory - taken_memory, each_memory)
            count = min(left[need], room)
            taken_cpus += count * each_cpus
            taken_memory += count * (each_memory or each_cpus * per_core)
            left[need] -= count
        if taken_cpus:
            bundle = Bundle(_floor(min(taken_cpus, cpus)), int(min(taken_memory, memory)))
            found[Request(bundle, offer.ray_id)] += 1
    for need, count in left.items():
        if count:
            found[Request(Bundle(_floor(need.cpus / UNITS), int(need.memory / UNITS * 2**30)))] += count
    return found


def _count_room(cpus: float, each_cpus: float, memory: float, each_memory: float) -> int:
    by_cpus = math.floor(cpus / each_cpus + _EPSILON) if each_cpus else MOST_PENDING
    by_memory = math.floor(memory / each_memory + _EPSILON) if each_memory else by_cpus
    return max(0, min(by_cpus, by_memory))


def _floor(cpus: float) -> float:
    """Cores as Ray counts them, rounded down."""
    return math.floor(cpus * 1e4 + _EPSILON) / 1e4


def _limit_pending(requests: Iterable[Request] | Counter[Request]) -> Counter[Request]:
    kept, left = Counter[Request](), MOST_PENDING
    for request, count in Counter(requests).items():
        count = count if request.ray_id is not None else min(count, left)
        left -= count if request.ray_id is None else 0
        if count:
            kept[request] = count
    return kept
