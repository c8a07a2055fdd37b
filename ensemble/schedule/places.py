"""Which members fit on which nodes, and on which GPUs: pure functions of declared resources.

A member's ranks are all on one node. At most one rank of a member is on a GPU (NCCL refuses two), while
different members may share one. `gpus_per_worker` counts only on nodes that have GPUs:

| devices | node without GPUs | node with GPUs |
|---|---|---|
| cpu | CPU | CPU |
| cuda | refused | one GPU a rank |
| auto | CPU | one GPU a rank; a member that asks for no share and has more ranks than there are GPUs: CPU |
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ensemble.spec import Identity

_SLACK = 1e-9  # ten members of 0.1 cores fit on one core, whatever binary fractions add up to


@dataclass(frozen=True)
class Node:
    """What one node offers.

    Attributes:
        name: unique among the nodes of a run.
        cpus: cores that members may be packed on.
        gpus: model names; a name's index is its device number.
        memory_gb: host memory in GiB.
        host: host name.
        places: most members at one time; None for as many as their resources allow.
        interface: the network interface through which the other nodes are reached; None where that is not known.
        power: the source and the origin of its energy figures, for the record.
    """

    name: str
    cpus: float
    gpus: tuple[str, ...]
    memory_gb: float
    host: str
    places: int | None = None
    interface: str | None = "lo"
    power: Mapping[str, str] = field(default_factory=dict, compare=False)


@dataclass(frozen=True)
class Placement:
    """A member on a node; `devices` has one entry a rank, a GPU's number or None for the CPU."""

    identity: Identity
    node: str
    devices: tuple[int | None, ...]

    @property
    def member(self) -> str:
        """The member's id."""
        return self.identity.member


class _Free:
    """What is left of one node while it is being packed."""

    def __init__(self, node: Node, limit: int | None):
        limits = [n for n in (node.places, limit) if n is not None]
        self.node = node
        self.cpus = node.cpus
        self.memory_gb = node.memory_gb
        self.gpus = [1.0] * len(node.gpus)
        self.tenants = [0] * len(node.gpus)
        self.places = min(limits) if limits else None

    def take(self, placement: Placement) -> None:
        identity = placement.identity
        self.cpus -= identity.cpus_per_worker * identity.workers
        self.memory_gb -= (identity.memory_gb or 0.0) * identity.workers
        for device in placement.devices:
            if device is not None:
                self.gpus[device] -= identity.gpus_per_worker
                self.tenants[device] += 1
        if self.places is not None:
            self.places -= 1

    def place(self, identity: Identity, devices: str) -> Placement | None:
        if self.places is not None and self.places < 1:
            return None
        if identity.cpus_per_worker * identity.workers > self.cpus + _SLACK:
            return None
        if (identity.memory_gb or 0.0) * identity.workers > self.memory_gb + _SLACK:
            return None
        where = _where(identity, self.node, devices)
        if where != "cuda":
            return Placement(identity, self.node.name, (None,) * identity.workers) if where == "cpu" else None
        # the emptiest GPUs first: members that share a GPU slow each other down
        by_load = sorted(range(len(self.gpus)), key=lambda d: (-round(self.gpus[d], 9), self.tenants[d], d))
        room = [d for d in by_load if self.gpus[d] + _SLACK >= identity.gpus_per_worker][: identity.workers]
        return Placement(identity, self.node.name, tuple(room)) if len(room) == identity.workers else None


def _where(identity: Identity, node: Node, devices: str) -> str | None:
    """ "cuda" or "cpu", None where the member may not be; see the table in the module's docstring."""
    if devices != "cpu" and identity.workers <= len(node.gpus):
        return "cuda"
    insists = devices == "cuda" or (devices == "auto" and node.gpus and identity.gpus_per_worker > 0)
    return None if insists else "cpu"


def _size(identity: Identity) -> tuple[float, float, float]:
    workers = identity.workers
    return (
        identity.gpus_per_worker * workers,
        identity.cpus_per_worker * workers,
        (identity.memory_gb or 0.0) * workers,
    )


def pack(
    waiting: Sequence[Identity],
    running: Iterable[Placement],
    nodes: Sequence[Node],
    devices: str = "auto",
    limits: Mapping[str, int] | None = None,
) -> list[Placement]:
    """Place as many of the waiting members as first-fit decreasing finds room for beside the running ones.

    Args:
        waiting: members to place. The largest (by GPUs, then cores, then memory) is placed first; among equals
            the order given decides.
        running: what is already there, on nodes of `nodes` (elsewhere it is ignored: that node is lost).
        nodes: tried in order, those with GPUs first unless `devices` is "cpu".
        devices: "auto", "cpu" or "cuda".
        limits: most members at one time, by node's name.

    Returns:
        Placements in the order of `waiting`; those that found no room are left out.
    """
    free = {node.name: _Free(node, (limits or {}).get(node.name)) for node in nodes}
    for placement in running:
        if placement.node in free:
            free[placement.node].take(placement)
    order = sorted(nodes, key=lambda node: devices != "cpu" and not node.gpus)
    placed: dict[str, Placement] = {}
    for identity in sorted(waiting, key=_size, reverse=True):
        for node in order:
            found = free[node.name].place(identity, devices)
            if found is not None:
                free[node.name].take(found)
                placed[identity.member] = found
                break
    return [placed[identity.member] for identity in waiting if identity.member in placed]


def fits(identity: Identity, nodes: Sequence[Node], devices: str = "auto") -> str | None:
    """Why a member can never be placed on these nodes, naming the largest that would fit; None when it can."""
    if pack([identity], [], nodes, devices):
        return None
    asked = _asked(identity)
    usable = [node for node in nodes if devices != "cuda" or node.gpus]
    if not usable:
        why = "there is no node" if not nodes else f"devices='cuda' and no node has a GPU ({_offers(nodes[0])})"
        return f"{identity.member} {asked}: {why}" + ("; use devices='auto' or 'cpu'" if nodes else "")
    best = max(usable, key=lambda node: (_most_workers(identity, node, devices), *_richness(node)))
    workers = _most_workers(identity, best, devices)
    if workers:
        return (
            f"{identity.member} {asked} on one node; the largest that would fit is workers={workers} "
            f"on {_offers(best)}"
        )
    limits = [f"cpus_per_worker={best.cpus:g}"]
    if identity.memory_gb is not None:
        limits.append(f"memory_gb={best.memory_gb:.1f}")
    return f"{identity.member} {asked}; the largest that would fit is {', '.join(limits)} on {_offers(best)}"


def _most_workers(identity: Identity, node: Node, devices: str) -> int:
    """The widest member with the same shares that the empty node could hold."""
    most = int((node.cpus + _SLACK) // identity.cpus_per_worker)
    if identity.memory_gb:
        most = min(most, int((node.memory_gb + _SLACK) // identity.memory_gb))
    if devices == "cuda" or (devices == "auto" and node.gpus and identity.gpus_per_worker):
        most = min(most, len(node.gpus))
    return min(most, identity.workers)


def _richness(node: Node) -> tuple[float, ...]:
    return (len(node.gpus), node.cpus, node.memory_gb)


def _asked(identity: Identity) -> str:
    text = f"asks for {identity.workers} worker{'s' * (identity.workers > 1)} x {identity.cpus_per_worker:g} cpus"
    if identity.gpus_per_worker:
        text += f", {identity.gpus_per_worker:g} GPU"
    if identity.memory_gb is not None:
        text += f", {identity.memory_gb:g} GiB"
    return text


def _offers(node: Node) -> str:
    return f"node {node.name} ({node.cpus:g} cpus, {len(node.gpus)} GPUs, {node.memory_gb:.1f} GiB)"
