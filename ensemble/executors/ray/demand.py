"""Decides which resources a run asks Ray for: pure functions of the members that wait and of what nodes have free.

A request is for one placement group: on a named node for what fits there now, over several nodes for a member
whose ranks may be apart. What fits nowhere now is planned on empty copies of the nodes and asked of any node: Ray
queues it, and an autoscaler adds nodes for it. A guess is reduced to what a node has.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Sequence

from ensemble.executors.ray.planned_node import PlannedNode, Shape, is_width_open, join_parts, make_bundle
from ensemble.executors.ray.request import Offer, RequestPart, ResourceRequest
from ensemble.schedule.needs import SLACK, Need, Node, Placement, compute_need, needs_gpu, uses_gpus
from ensemble.schedule.packing import pack
from ensemble.schedule.selection import has_labels, is_selected, make_label_selector
from ensemble.spec import Identity
from ensemble.spec.nodes import Selection

MOST_PENDING = 64  # requests beside each other that no node has room for


def plan_requests(
    waiting: Sequence[Identity], offers: Sequence[Offer], devices: str, gone: Iterable[Node] = ()
) -> Counter[ResourceRequest]:
    """The requests that give all waiting members a place, as far as the nodes could hold them.

    Args:
        waiting: members beside those for which the run holds resources already.
        devices: as `ensemble.schedule.needs.resolve_devices` returns it.
        gone: nodes with GPUs that were lost: others like them may take their place.
    """
    needs = [compute_need(identity) for identity in waiting]
    selections = sorted({need.selection for need in needs})
    nodes = [PlannedNode(offer, devices, selections) for offer in offers]
    shapes = Counter(sorted(node.shape for node in nodes))
    is_for_gpus = {need: _is_for_gpus(need, shapes, devices) for need in set(needs)}
    on_gpus = [identity for identity, need in zip(waiting, needs, strict=True) if is_for_gpus[need]]
    on_cores = [identity for identity, need in zip(waiting, needs, strict=True) if not is_for_gpus[need]]
    with_gpus = [node for node in nodes if node.shape.gpus]
    without_gpus = [node for node in nodes if not node.shape.gpus]
    gpus_left = _place(on_gpus, with_gpus, "cuda")
    cores_left = _place(_place(on_cores, without_gpus, devices), with_gpus, devices)
    requests = Counter(request for node in nodes for request in node.request_placed())
    gpus_left = _place_across(gpus_left, with_gpus, "cuda", requests)
    guesses = [identity for identity in cores_left if uses_gpus(identity, devices)]
    cores_left = [identity for identity in cores_left if not uses_gpus(identity, devices)]
    cores_left = _place_across(cores_left, nodes, "cpu", requests)
    cores_left += _place_across(guesses, without_gpus, "cpu", requests)
    requests += _request_widths(on_gpus, with_gpus, on_gpus=True)
    requests += _request_widths(on_cores, nodes, on_gpus=False)
    like_lost = [PlannedNode(Offer(node.name, node, {}), devices, selections) for node in gone]
    empty_with_gpus = with_gpus or [node for node in like_lost if node.shape.gpus]
    queued = _queue(gpus_left, empty_with_gpus, "cuda", offers) + _queue(cores_left, nodes, devices, offers)
    return requests + _limit_pending(queued)


def _is_for_gpus(need: Need, shapes: Counter[Shape], devices: str) -> bool:
    """Whether GPUs are requested for a member: one that declared a share waits for them.

    For one that did not: where nodes with GPUs could hold it, or none at all could, in the order in which
    `ensemble.schedule.packing` tries nodes.
    """
    if devices == "cpu" or need.cpu_only or needs_gpu(need, devices):
        return needs_gpu(need, devices)
    able = [shape for shape in shapes if shape.holds(need)]
    kinds = {shape.puts_on_gpu(need, devices) for shape in able}
    if True in kinds:
        return True
    if any(not shape.gpus for shape in able):
        return False
    on_gpus = sum(n * shape.count_ranks(need, shape.gpus) for shape, n in shapes.items())
    on_cores = sum(n * shape.count_ranks(need, need.workers) for shape, n in shapes.items() if not shape.gpus)
    if need.spans_nodes and on_gpus >= need.workers:
        return True
    if False in kinds or (need.spans_nodes and on_cores >= need.workers):
        return False
    return need.workers <= max((shape.gpus for shape in shapes if need.selection in shape.fits), default=0)


# -- what nodes have free -----------------------------------------------------------------------------------------


def _place(identities: Sequence[Identity], nodes: Sequence[PlannedNode], devices: str) -> Sequence[Identity]:
    """Pack members into what nodes have free, each on one, and return those that find no place."""
    if not identities or not nodes:
        return identities
    running = [one for node in nodes for one in (node.describe_taken(identities[0]), *node.placed)]
    by_id, unplaced = {node.ray_id: node for node in nodes}, []
    offered = [node.describe_free_gpus() if devices == "cuda" else node.node for node in nodes]
    on_one = [one if one.span_nodes is False else dataclasses.replace(one, span_nodes=False) for one in identities]
    placements = iter(pack(on_one, running, offered, devices))
    placement = next(placements, None)
    for identity, single in zip(identities, on_one, strict=True):
        if placement is not None and placement.identity is single:
            by_id[placement.node].placed.append(placement)
            placement = next(placements, None)
        else:
            unplaced.append(identity)
    return unplaced


def _place_across(
    identities: Sequence[Identity], nodes: Sequence[PlannedNode], devices: str, requests: Counter[ResourceRequest]
) -> list[Identity]:
    """Add requests for members whose ranks find room on several nodes together; returns the other members.

    Each takes whole GPUs: who shares them is decided once the run holds them.
    """
    by_id, unplaced = {node.ray_id: node for node in nodes}, list[Identity]()
    by_need: dict[Need, list[Identity]] = {}
    for identity in identities:
        by_need.setdefault(compute_need(identity), []).append(identity)
    for need, alike in by_need.items():
        placed: list[Placement] = []
        if need.spans_nodes and _count_ranks(need, nodes, devices) >= need.workers:
            whole = [dataclasses.replace(one, gpus_per_worker=float(devices == "cuda")) for one in alike]
            taken = [node.describe_taken(alike[0]) for node in nodes]
            placed = pack(whole, taken, [node.describe_free_gpus() for node in nodes], devices)
        for placement in placed:
            parts = [by_id[name].request_ranks(placement, len(r)) for name, r in placement.ranks_by_node.items()]
            requests[join_parts(parts)._replace(selections=(need.selection,))] += 1
        unplaced += alike[len(placed) :]  # equal members are placed in their order
    return unplaced


def _count_ranks(need: Need, nodes: Iterable[PlannedNode], devices: str) -> int:
    """How many ranks nodes have room for at most: by GPUs, if the member trains on these, else by cores."""
    if devices == "cuda":
        return sum(node.gpus for node in nodes)
    if need.guessed_cpus:  # a guess is reduced
        return sum(node.shape.count_ranks(need, need.workers) for node in nodes)
    rank_cpus = need.take_ranks(1).cpus
    return sum(max(0, node.cpus + SLACK) // rank_cpus if rank_cpus else need.workers for node in nodes)


def _request_widths(
    identities: Sequence[Identity], nodes: Sequence[PlannedNode], *, on_gpus: bool
) -> Counter[ResourceRequest]:
    """Requests for the rest of as many nodes as there are members whose number of workers is to be chosen."""
    needs = [compute_need(identity) for identity in identities if is_width_open(identity)]
    requests, cpus = Counter[ResourceRequest](), max((need.cpus for need in needs), default=0)
    usable = (
        [node for node in nodes if node.gpus and any(need.selection in node.shape.fits for need in needs)]
        if on_gpus
        else [node for node in nodes if node.is_usable(needs)]
    )
    selections = {need.selection for need in needs}
    usable.sort(key=lambda node: (bool(node.shape.gpus), -node.gpus, -node.cpus))
    for node in usable[: len(needs)]:
        if on_gpus:
            while (request := node.request_gpu(min(cpus, node.shape.cpus), selections)) is not None:
                requests[request] += 1
        else:
            requests[node.request_cores(selections)] += 1
    return requests


# -- what no node has free ----------------------------------------------------------------------------------------


def _queue(
    waiting: Sequence[Identity], nodes: Sequence[PlannedNode], devices: str, offers: Sequence[Offer]
) -> Counter[ResourceRequest]:
    """Requests to any node, of those that members select.

    Args:
        waiting: members that all train on GPUs ("cuda"), or all on cores.
        nodes: that there are, with what they offer when they are empty.
        offers: all nodes: which of them do not fit although their labels do is known to no one else.
    """
    by_kind: dict[tuple[Selection, int, frozenset[Shape]], list[Identity]] = {}
    shapes, on_gpus = Counter(node.shape for node in nodes), devices == "cuda"
    for identity in waiting:
        need = compute_need(identity)
        usable = (s for s in shapes if s.holds(need) and s.puts_on_gpu(need, devices) is on_gpus)
        key = need.selection, need.workers * on_gpus, frozenset(usable)
        by_kind.setdefault(key, []).append(identity)
    requests = Counter[ResourceRequest]()
    for (selection, gpus, usable_shapes), alike in by_kind.items():
        like = list({node.shape: node for node in nodes if node.shape in usable_shapes}.values())
        if on_gpus and like:
            like = [min(like, key=lambda node: node.shape.cpus // node.shape.gpus)]
        new = _queue_spanning([one for one in alike if compute_need(one).spans_nodes], shapes, on_gpus=on_gpus)
        new += _queue_single([one for one in alike if not compute_need(one).spans_nodes], like, gpus, devices)
        requests += _select_nodes(new, selection, offers) if selection else new
    return requests


def _queue_single(
    waiting: Sequence[Identity], like: Sequence[PlannedNode], gpus: int, devices: str
) -> Counter[ResourceRequest]:
    """Requests for members, each on one node like one of these, as if that, or some GPUs of it, were empty."""
    requests = Counter[ResourceRequest]()
    empty = [node.make_empty(number, gpus) for node in like for number in range(min(len(waiting), MOST_PENDING))]
    unplaced = _place(waiting, empty, devices)
    for node in empty:
        requests.update(request._replace(ray_id=None, selections=()) for request in node.request_placed())
    for need, count in Counter(map(compute_need, unplaced)).items():
        able = [node.shape for node in like if node.shape.holds(need)]
        cpus = max((need.cpus_on(shape.cpus) for shape in able), default=need.cpus)
        memory = need.memory or min((shape.memory * cpus // max(1, shape.cpus) for shape in able), default=0)
        requests[ResourceRequest(make_bundle(cpus, memory, gpus))] += count
        if gpus and not able:  # how many share one of its GPUs is not known, so the first one shows
            return Counter({ResourceRequest(make_bundle(cpus, memory, gpus)): 1})
    return requests


def _queue_spanning(
    waiting: Sequence[Identity], shapes: Counter[Shape], *, on_gpus: bool
) -> Counter[ResourceRequest]:
    """Requests for members whose ranks may be on several nodes, which have whole GPUs."""
    requests = Counter[ResourceRequest]()
    for need, count in Counter(map(compute_need, waiting)).items():
        able = [shape for shape in shapes if need.selection in shape.fits]
        cpus = _divide_cores(need, Counter({shape: shapes[shape] for shape in able}), on_gpus=on_gpus)
        cpus = [min(cpus)] * need.workers if on_gpus else cpus
        memory = need.memory or min((shape.memory * sum(cpus) // max(1, shape.cpus) for shape in able), default=0)
        requests[_split(cpus, memory, on_gpus=on_gpus)] += count
    return requests


def _select_nodes(
    requests: Counter[ResourceRequest], selection: Selection, offers: Sequence[Offer]
) -> Counter[ResourceRequest]:
    """The requests, to be met by nodes that fit a selection."""
    plain = make_label_selector(selection)
    misfits = [o for o in offers if _is_found(plain, o) and not is_selected(selection, o.node)]
    labels = make_label_selector(selection, [offer.node for offer in misfits])
    left_out = tuple(sorted(offer.ray_id for offer in misfits))
    return Counter(
        {
            request._replace(selections=(selection,), labels=labels, misfits=left_out): count
            for request, count in requests.items()
        }
    )


def _is_found(labels: Selection, offer: Offer) -> bool:
    """Whether Ray takes a node for one with these labels; that of a node with GPUs of several models is of one."""
    return has_labels(labels, offer.node.labels if offer.labels is None else offer.labels)


def _split(cpus: Sequence[int], memory: int, *, on_gpus: bool) -> ResourceRequest:
    """A request for ranks of members, which may be on several nodes: the cores of each, the memory of all."""
    return join_parts(
        [RequestPart(make_bundle(rank_cpus, memory // len(cpus), int(on_gpus))) for rank_cpus in cpus]
    )


def _divide_cores(need: Need, shapes: Counter[Shape], *, on_gpus: bool) -> list[int]:
    """The cores of each rank in units: a guess is at most what empty nodes have, those with most ranks first."""
    most = {shape: shape.count_ranks(need, shape.gpus if on_gpus else need.workers) for shape in shapes}
    ranks: list[int] = []
    for shape in sorted(shapes, key=lambda shape: (most[shape], shape), reverse=True):
        for _ in range(shapes[shape]):
            if here := min(most[shape], need.workers - len(ranks)):
                ranks += [need.take_ranks(here).cpus_on(shape.cpus) // here] * here
    others = min(ranks, default=need.cpus // need.workers)  # of those that only further nodes could hold
    return sorted(ranks + [others] * (need.workers - len(ranks)), reverse=True)


def _limit_pending(requests: Counter[ResourceRequest]) -> Counter[ResourceRequest]:
    """At most `MOST_PENDING` requests for any node, of each number of GPUs and selection with an equal right."""
    by_width = Counter[tuple[int, tuple[Selection, ...]]]()
    for request, count in requests.items():
        by_width[request.bundle.gpus, request.selections] += count
    allowed, remaining = Counter[tuple[int, tuple[Selection, ...]]](), MOST_PENDING
    for n, width in enumerate(sorted(by_width, key=by_width.__getitem__)):
        allowed[width] = min(by_width[width], max(1, remaining // (len(by_width) - n)))
        remaining -= allowed[width]
    kept = Counter[ResourceRequest]()
    for request, count in requests.items():
        width = request.bundle.gpus, request.selections
        if allowed[width]:
            kept[request] = min(count, allowed[width])
            allowed[width] -= kept[request]
    return kept
