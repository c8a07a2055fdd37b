"""Says why a member can never be placed, and what would fit, or that it waits for memory of others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ensemble.schedule.needs import UNITS, Node, compute_need, needs_gpu
from ensemble.schedule.packing import FreeCapacity, pack
from ensemble.schedule.placement import ClusterSnapshot
from ensemble.schedule.selection import explain_unselected, find_gpus, is_selected
from ensemble.spec import Identity
from ensemble.spec.nodes import Selection, describe_selection, selects_gpus

_ROUNDING = 1e-9  # ten members of 0.1 cores fit on one core, whatever binary fractions add up to


def explain_unplaceable(identity: Identity, nodes: Sequence[Node], devices: str = "auto") -> str | None:
    """Say why a member can never be placed on these nodes and what would fit; None if it can be placed."""
    return None if pack([identity], [], nodes, devices) else _explain_unplaceable(identity, nodes, devices)


def _explain_unplaceable(identity: Identity, nodes: Sequence[Node], devices: str) -> str:
    request, need = _describe_request(identity), compute_need(identity)
    wants_gpu = needs_gpu(need, devices)
    if not nodes:
        return f"{identity.member} {request}: there is no node"
    selected = [_select_gpus(need.selection, node) for node in nodes if is_selected(need.selection, node)]
    if not selected:
        return f"{identity.member} {request}: {explain_unselected(need.selection, nodes)}"
    if not (usable := [node for node in selected if not wants_gpu or node.gpus]):
        why = f"no node has a GPU ({_describe_node(selected[0])})"
        if devices == "cuda":
            return f"{identity.member} {request}: devices='cuda' and {why}; use devices='auto' or 'cpu'"
        return f"{identity.member} {request}: {why}; with gpus_per_worker=0 it trains on the CPU"

    def rank(node: Node) -> tuple[float, ...]:
        return _max_workers(identity, node, devices), node.physical_gpus, node.cpus, node.memory_gb

    best = max(usable, key=rank)
    workers = _max_workers(identity, best, devices)
    if need.spans_nodes and len(usable) > 1:
        together = max(workers, FreeCapacity(usable, devices).count_ranks(need))
        if together:
            return f"{identity.member} {request}; all {len(usable)} nodes together hold workers={together}"
    if workers:
        why = "; each worker of a member takes a GPU of its own" if wants_gpu else ""
        return (
            f"{identity.member} {request} on one node; the largest that would fit is workers={workers} "
            f"on {_describe_node(best)}{why}"
        )
    limits = [f"cpus_per_worker={best.cpus:g}"]
    if identity.memory_gb is not None:
        limits.append(f"memory_gb={best.memory_gb:.1f}")
    return (
        f"{identity.member} {request}; the largest that would fit is {', '.join(limits)} on {_describe_node(best)}"
    )


def explain_beyond_limits(identity: Identity, limits: Mapping[str, float], devices: str = "auto") -> str | None:
    """Say why a member takes more than the run may have (`Ensemble.limits`); None where it does not."""
    need, most = compute_need(identity), limits.get("cpus", float("inf"))
    gpus = need.workers if needs_gpu(need, devices) else 0
    if gpus > limits.get("gpus", gpus):
        hint = "; each worker of a member takes a GPU of its own" if gpus > 1 else ""
        return f"{identity.member} needs {gpus} GPU{'s' * (gpus > 1)}, and limits allow {limits['gpus']:g}{hint}"
    cpus = min(need.workers, most) if need.guessed_cpus and need.workers <= max(1, most) else need.cpus / UNITS
    if cpus > most + _ROUNDING:
        return f"{identity.member} needs {cpus:g} cores, and limits allow {most:g}"
    return None


def explain_memory_wait(cluster: ClusterSnapshot) -> str | None:
    """Say which member would start now if processes of others held no memory; None where none would."""
    if all(node.memory_left_gb is None for node in cluster.nodes):
        return None
    empty = [replace(node, memory_left_gb=None) for node in cluster.nodes]
    waiting = [*cluster.waiting, *(identity for identity, _ in cluster.returning)]
    free = pack(waiting, cluster.running, empty, cluster.devices, cluster.limits)
    if not free or pack(waiting, cluster.running, cluster.nodes, cluster.devices, cluster.limits):
        return None
    first = free[0].identity
    held = [
        f"others hold {node.memory_gb - node.free_memory_gb:.1f} of {node.memory_gb:.1f} GiB on node {node.name}"
        for node in cluster.nodes
        if node.memory_left_gb is not None
    ]
    return f"{first.member} {_describe_request(first)}, and {'; '.join(held[:3])}"


def _select_gpus(selection: Selection, node: Node) -> Node:
    return node.select_gpus(find_gpus(selection, node).__getitem__) if selects_gpus(selection) else node


def _max_workers(identity: Identity, node: Node, devices: str) -> int:
    """The number of workers with the same shares that the empty node could hold."""
    most = int((node.cpus + _ROUNDING) // identity.cpus_per_worker)
    if "cpus_per_worker" in identity.auto and node.cpus:
        most = max(most, int(node.cpus), 1)
    if identity.memory_gb:
        most = min(most, int((node.memory_gb + _ROUNDING) // identity.memory_gb))
    if needs_gpu(compute_need(identity), devices):
        offers = zip(node.gpu_parents, node.gpu_free, strict=True)
        most = min(most, len({gpu for gpu, free in offers if 0 < free >= identity.gpus_per_worker - _ROUNDING}))
    return min(most, identity.workers)


def _describe_request(identity: Identity) -> str:
    text = f"asks for {identity.workers} worker{'s' * (identity.workers > 1)} x {identity.cpus_per_worker:g} cpus"
    if identity.gpus_per_worker:
        text += f", {identity.gpus_per_worker:g} GPU"
    if identity.memory_gb is not None:
        text += f", {identity.memory_gb:g} GiB"
    selection = compute_need(identity).selection
    return f"{text}, on nodes with {describe_selection(selection)}" if selection else text


def _describe_node(node: Node) -> str:
    offers = f"{node.cpus:g} cpus, {len(node.gpus)} GPUs, {node.memory_gb:.1f} GiB"
    return f"node {node.name} ({offers}{'; ' * bool(node.no_gpus)}{node.no_gpus})"
