"""Decides which resources a run asks Ray for: pure functions of the members that wait and of what nodes have free.

Ray gives out whole GPUs, and the run packs members inside them. A request is for one placement group:

- what members can have now, on a named node: they are packed into what the nodes have free, as they are later
  packed into what the run holds. A request is for what some members on the CPU take of a node, or for GPUs that
  share members, with what these take beside.
- what finds no room now, on any node: for that Ray has a queue, and an autoscaler adds nodes. (A pending request
  for a named node is demand that no new node can serve.)
- for a member whose ranks may be on several nodes, where no node has room for all: one group over these nodes,
  given whole or not at all.
- for a member whose number of workers is to be chosen: all else that a node has free.

A member asks only for what some node could give it when nobody else uses the node: a guess is reduced to that.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Sequence

from ensemble.executors.ray.queued_demand import Shape, join_parts, make_bundle, queue_members
from ensemble.executors.ray.request import Bundle, Offer, RequestPart, ResourceRequest
from ensemble.schedule import Node, Placement, pack
from ensemble.schedule.needs import SLACK, UNITS, Need, compute_need, needs_gpu, uses_gpus
from ensemble.schedule.selection import is_selected
from ensemble.spec import Identity
from ensemble.spec.nodes import Selection

_BYTE = 2**30 / UNITS  # of a unit of memory
_PARTS = 8  # of a node's cores


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
    nodes = [_NodeState(offer, devices, selections) for offer in offers]
    shapes = Counter(sorted(node.shape for node in nodes))
    is_for_gpus = {need: _is_for_gpus(need, shapes, devices) for need in set(needs)}
    on_gpus = [identity for identity, need in zip(waiting, needs, strict=True) if is_for_gpus[need]]
    on_cores = [identity for identity, need in zip(waiting, needs, strict=True) if not is_for_gpus[need]]
    with_gpus = [node for node in nodes if node.shape.gpus]
    without_gpus = [node for node in nodes if not node.shape.gpus]
    gpus_left = _place(on_gpus, with_gpus, "cuda")
    cores_left = _place(_place(on_cores, without_gpus, devices), with_gpus, devices)
    found = Counter(request for node in nodes for request in node.request_placed())
    gpus_left = _place_across(gpus_left, with_gpus, "cuda", found)
    guesses = [identity for identity in cores_left if uses_gpus(identity, devices)]
    cores_left = [identity for identity in cores_left if not uses_gpus(identity, devices)]
    cores_left = _place_across(cores_left, nodes, "cpu", found)
    cores_left += _place_across(guesses, without_gpus, "cpu", found)
    found += _request_widths(on_gpus, with_gpus, on_gpus=True)
    found += _request_widths(on_cores, nodes, on_gpus=False)
    lost = [_make_shape(node, selections) for node in gone]
    return found + queue_members(gpus_left, cores_left, shapes, devices, lost, offers)


def is_width_open(identity: Identity) -> bool:
    """Whether a member's number of workers is still to be chosen: it can use whatever a node has."""
    return "workers" in identity.auto and identity.workers == 1


def _is_for_gpus(need: Need, shapes: Counter[Shape], devices: str) -> bool:
    """Whether GPUs are requested for a member: one that declared a share waits for them.

    For one that did not: where nodes with GPUs could hold it, or none at all could, in the order in which
    `ensemble.schedule.packing` tries nodes.
    """
    if devices == "cpu" or need.cpu_only or needs_gpu(need, devices):
        return needs_gpu(need, devices)
    able = [shape for shape in shapes if shape.holds(need)]
    found = {shape.puts_on_gpu(need, devices) for shape in able}
    if True in found:
        return True
    if any(not shape.gpus for shape in able):
        return False
    on_gpus = sum(n * shape.count_ranks(need, shape.gpus) for shape, n in shapes.items())
    on_cores = sum(n * shape.count_ranks(need, need.workers) for shape, n in shapes.items() if not shape.gpus)
    if need.spans_nodes and on_gpus >= need.workers:
        return True
    if False in found or (need.spans_nodes and on_cores >= need.workers):
        return False
    return need.workers <= max((shape.gpus for shape in shapes if need.selection in shape.fits), default=0)


# -- what nodes have free -----------------------------------------------------------------------------------------


class _NodeState:
    """A node: what is free of it, cores and memory in `UNITS`, and the members that are planned there."""

    def __init__(self, offer: Offer, devices: str, selections: Sequence[Selection]) -> None:
        self.ray_id, free = offer.ray_id, offer.free
        self.node = dataclasses.replace(offer.node.select_gpus(lambda i: devices != "cpu"), name=offer.ray_id)
        self.shape = _make_shape(self.node, selections)
        self.cpus = _clip(round(free.get("CPU", 0.0) * UNITS), self.shape.cpus)
        self.memory = _clip(round(free.get("memory", 0.0) / _BYTE), self.shape.memory)
        self.gpus = _clip(int(free.get("GPU", 0.0)), self.shape.gpus)
        self.placed: list[Placement] = []

    def describe_free_gpus(self) -> Node:
        """The node without the GPUs that others hold."""
        return self.node.select_gpus(lambda i: i < self.gpus)

    def describe_taken(self, example: Identity) -> Placement:
        """The cores and memory that are not free, as a member."""
        cpus, memory_gb = (self.shape.cpus - self.cpus) / UNITS, (self.shape.memory - self.memory) / UNITS
        other = dataclasses.replace(example, workers=1, cpus_per_worker=cpus, memory_gb=memory_gb, auto=[])
        return Placement(other, self.ray_id, (None,))

    def request_placed(self) -> list[ResourceRequest]:
        """Requests for the members planned here, a few for those on the CPU; what they take is free no more.

        A request is given back as a whole: one for all of a node could be shared with no other run.
        """
        on_cpu = [placement for placement in self.placed if placement.devices[0] is None]
        groups = [(frozenset[str | None](), chunk) for chunk in self._divide(on_cpu)]
        groups += _group_by_gpus(placement for placement in self.placed if placement.devices[0] is not None)
        self.memory -= sum(placement.need.memory for placement in self.placed)
        return [self._request(placements, len(gpus)) for gpus, placements in groups]

    def _divide(self, on_cpu: Iterable[Placement]) -> list[list[Placement]]:
        """Members on the CPU in groups that take an `_PARTS`-th of the cores or little more."""
        chunks, taken = list[list[Placement]](), 0
        for placement in on_cpu:
            if not chunks or taken * _PARTS >= self.shape.cpus:
                chunks, taken = [*chunks, []], 0
            chunks[-1].append(placement)
            taken += placement.need.cpus_on(self.shape.cpus)
        return chunks

    def _request(self, placements: Sequence[Placement], gpus: int) -> ResourceRequest:
        """A request for members; those that did not declare their memory get a part of what nobody declared."""
        total = self.shape.cpus
        cpus, memory = sum(each.need.cpus_on(total) for each in placements), sum(p.need.memory for p in placements)
        undeclared = sum(each.need.cpus_on(total) for each in placements if not each.need.memory)
        part = self.shape.memory * gpus // self.shape.gpus if gpus else self.shape.memory * undeclared // total
        more = _clip(part - memory if gpus else part, self.memory) if undeclared else 0
        self.cpus, self.memory, self.gpus = self.cpus - cpus, self.memory - more, self.gpus - gpus
        bundle, selections = make_bundle(cpus, memory + more, gpus), {each.need.selection for each in placements}
        return ResourceRequest(bundle, self.ray_id, selections=tuple(sorted(selections)))

    def request_ranks(self, placement: Placement, ranks: int) -> RequestPart:
        """A part for so many ranks of a member, with a GPU each where it trains on GPUs."""
        need, gpus = placement.need.take_ranks(ranks), ranks * (placement.devices[0] is not None)
        cpus = need.cpus_on(self.shape.cpus)
        memory = need.memory or min(self.shape.memory * cpus // max(1, self.shape.cpus), max(0, self.memory))
        self.cpus, self.memory, self.gpus = self.cpus - cpus, self.memory - memory, self.gpus - gpus
        return RequestPart(make_bundle(cpus, memory, gpus), self.ray_id)

    def request_gpu(self, cpus: int, selections: Iterable[Selection]) -> ResourceRequest | None:
        """A request for one more GPU with so many cores, or with its part of them; None: that is not free."""
        if not self.gpus or cpus > self.cpus + SLACK:
            return None
        cpus = min(max(cpus, self.shape.cpus // self.shape.gpus), max(cpus, self.cpus // self.gpus))
        memory = min(self.shape.memory // self.shape.gpus, max(0, self.memory) // self.gpus)
        self.cpus, self.memory, self.gpus = self.cpus - cpus, self.memory - memory, self.gpus - 1
        return self._request_rest(make_bundle(cpus, memory, 1), selections)

    def is_usable(self, needs: Iterable[Need]) -> bool:
        """Whether one of these members on the CPU could use the cores that are left."""
        needs = [need for need in needs if need.selection in self.shape.fits]
        here = {each.need for each in self.placed if is_width_open(each.identity)}
        has_room = any(need in here or need.cpus_on(self.shape.cpus) <= self.cpus for need in needs)
        return has_room and not self.shape.gpus and self.cpus > SLACK

    def request_cores(self, selections: Iterable[Selection]) -> ResourceRequest:
        """A request for all cores and memory that are left."""
        cpus, memory, self.cpus, self.memory = self.cpus, max(0, self.memory), 0, 0
        return self._request_rest(make_bundle(cpus, memory), selections)

    def _request_rest(self, bundle: Bundle, selections: Iterable[Selection]) -> ResourceRequest:
        """A request for any member of some selections that fits here."""
        fitting = set(selections).intersection(self.shape.fits)
        return ResourceRequest(bundle, self.ray_id, selections=tuple(sorted(fitting)))


def _make_shape(node: Node, selections: Iterable[Selection]) -> Shape:
    fits = tuple(selection for selection in selections if is_selected(selection, node))
    return Shape(round(node.cpus * UNITS), round(node.memory_gb * UNITS), len(node.gpus), fits)


def _place(identities: Sequence[Identity], nodes: Sequence[_NodeState], devices: str) -> Sequence[Identity]:
    """Pack members into what nodes have free, each on one, and return those that find no place."""
    if not identities or not nodes:
        return identities
    running = [each for node in nodes for each in (node.describe_taken(identities[0]), *node.placed)]
    known, left = {node.ray_id: node for node in nodes}, []
    offered = [node.describe_free_gpus() if devices == "cuda" else node.node for node in nodes]
    on_one = [
        each if each.span_nodes is False else dataclasses.replace(each, span_nodes=False) for each in identities
    ]
    found = iter(pack(on_one, running, offered, devices))
    placement = next(found, None)
    for identity, asked in zip(identities, on_one, strict=True):
        if placement is not None and placement.identity is asked:
            known[placement.node].placed.append(placement)
            placement = next(found, None)
        else:
            left.append(identity)
    return left


def _place_across(
    identities: Sequence[Identity], nodes: Sequence[_NodeState], devices: str, found: Counter[ResourceRequest]
) -> list[Identity]:
    """Add requests for members whose ranks find room on several nodes together; returns the other members.

    Each takes whole GPUs: who shares them is decided once the run holds them.
    """
    known, left = {node.ray_id: node for node in nodes}, list[Identity]()
    by_need: dict[Need, list[Identity]] = {}
    for identity in identities:
        by_need.setdefault(compute_need(identity), []).append(identity)
    for need, alike in by_need.items():
        placed: list[Placement] = []
        if need.spans_nodes and _count_ranks(need, nodes, devices) >= need.workers:
            whole = [dataclasses.replace(each, gpus_per_worker=float(devices == "cuda")) for each in alike]
            taken = [node.describe_taken(alike[0]) for node in nodes]
            placed = pack(whole, taken, [node.describe_free_gpus() for node in nodes], devices)
        for placement in placed:
            parts = [known[name].request_ranks(placement, len(r)) for name, r in placement.ranks_by_node.items()]
            found[join_parts(parts)._replace(selections=(need.selection,))] += 1
        left += alike[len(placed) :]  # equal members are placed in their order
    return left


def _count_ranks(need: Need, nodes: Iterable[_NodeState], devices: str) -> int:
    """How many ranks nodes have room for at most: by GPUs, if the member trains on these, else by cores."""
    if devices == "cuda":
        return sum(node.gpus for node in nodes)
    if need.guessed_cpus:  # a guess is reduced
        return sum(node.shape.count_ranks(need, need.workers) for node in nodes)
    each = need.take_ranks(1).cpus
    return sum(max(0, node.cpus + SLACK) // each if each else need.workers for node in nodes)


def _group_by_gpus(
    placements: Iterable[Placement],
) -> list[tuple[frozenset[str | None], list[Placement]]]:
    """Sets of GPUs that no member joins to others, each with its members."""
    groups: list[tuple[frozenset[str | None], list[Placement]]] = []
    for placement in placements:
        gpus, members, others = frozenset(placement.devices), [placement], []
        for group in groups:
            if gpus & group[0]:
                gpus, members = gpus | group[0], group[1] + members
            else:
                others.append(group)
        groups = [*others, (gpus, members)]
    return groups


def _request_widths(
    identities: Sequence[Identity], nodes: Sequence[_NodeState], *, on_gpus: bool
) -> Counter[ResourceRequest]:
    """Requests for the rest of as many nodes as there are members whose number of workers is to be chosen."""
    needs = [compute_need(identity) for identity in identities if is_width_open(identity)]
    found, cpus = Counter[ResourceRequest](), max((need.cpus for need in needs), default=0)
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
                found[request] += 1
        else:
            found[node.request_cores(selections)] += 1
    return found


def _clip(amount: int, most: int) -> int:
    return max(0, min(amount, most))
