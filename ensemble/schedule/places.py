"""Which members fit on which nodes, and on which GPUs: pure functions of what is asked and what is offered.

A member's ranks are all on one node. At most one rank of a member is on a GPU (NCCL refuses two), while
different members may share one. `gpus_per_worker` counts only on nodes that have GPUs:

| devices | node without GPUs | node with GPUs |
|---|---|---|
| cpu | CPU | CPU |
| cuda | refused | one GPU a rank |
| auto | CPU | one GPU a rank; a member with more ranks than there are GPUs: CPU, unless it declared a share |

What was left to measurement (`Identity.auto`) refuses nobody a node: a member with no more workers than a node has
cores asks for no more cores than that, and a share of a GPU does not keep it from the CPU.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from ensemble.schedule.needs import Node, Placement
from ensemble.schedule.packing import Free
from ensemble.spec import Identity

_SLACK = 1e-9  # ten members of 0.1 cores fit on one core, whatever binary fractions add up to


def pack(
    waiting: Sequence[Identity],
    running: Iterable[Placement],
    nodes: Sequence[Node],
    devices: str = "auto",
    limits: Mapping[str, int] | None = None,
    tenants: Mapping[str, int] | None = None,
) -> list[Placement]:
    """Place as many of the waiting members as first-fit decreasing finds room for beside the running ones.

    Who decides often keeps a `Free` instead, of which this is one use.

    Args:
        waiting: members to place. The largest (by GPUs, then cores, then memory) is placed first; among equals
            the order given decides.
        running: what is already there, on nodes of `nodes` (elsewhere it is ignored: that node is lost).
        nodes: tried in order, those with GPUs first unless `devices` is "cpu".
        devices: "auto", "cpu" or "cuda".
        limits: most members at one time, by node's name.
        tenants: most members at one time on one GPU, by its model's name.

    Returns:
        Placements in the order of `waiting`; those that found no room are left out.
    """
    return Free(nodes, devices, running).place(waiting, limits, tenants)


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
    if "cpus_per_worker" in identity.auto and node.cpus:
        most = max(most, int(node.cpus), 1)
    if identity.memory_gb:
        most = min(most, int((node.memory_gb + _SLACK) // identity.memory_gb))
    declared = identity.gpus_per_worker and "gpus_per_worker" not in identity.auto
    if devices == "cuda" or (devices == "auto" and node.gpus and declared):
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
    offers = f"{node.cpus:g} cpus, {len(node.gpus)} GPUs, {node.memory_gb:.1f} GiB"
    return f"node {node.name} ({offers}{'; ' * bool(node.no_gpus)}{node.no_gpus})"
